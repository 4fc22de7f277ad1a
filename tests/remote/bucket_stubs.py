"""The small part of S3's and of GCS's XML interface that obstore speaks, in this process; and how it fails.

GCS has no server that can be installed here. Of S3, moto is the server to test against: the stub stands
for stores that break the rules, and for answers that a good server gives once in a year.
"""

import contextlib
import hashlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "kernels"


class Stub:
    """A server of one bucket.

    honours: whether writes are conditional. status: what every request, or every one of `verb`, is answered with
    instead, 0 for none. delay: seconds before each answer. requests: what was asked.
    """

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.honours, self.status, self.verb, self.delay = True, 0, "", 0.0
        self.error = ""
        self.objects: dict[str, tuple[bytes, int, float, str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.generation = 100
        stub = self

        class Handler(_Handler):
            pass

        Handler.stub = stub
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables by which obstore finds this server."""
        if self.dialect == "gs":
            account = {
                "gcs_base_url": self.url,
                "disable_oauth": True,
                "client_email": "",
                "private_key": "",
                "private_key_id": "",
            }
            file = folder / "account.json"
            file.write_text(json.dumps(account))
            return {"GOOGLE_SERVICE_ACCOUNT": str(file), "GOOGLE_ALLOW_HTTP": "true"}
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        }  # fmt: skip


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    stub: Stub

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._answered_otherwise():
            return
        stub, name = self.stub, self._name()
        with stub.lock:
            there = stub.objects.get(name)
            if stub.honours and not self._condition_holds(there):
                self._end(412)
                return
            stub.generation += 1
            stub.objects[name] = (
                body,
                stub.generation,
                time.time(),
                self.headers.get("Cache-Control", ""),
            )
            self._end(200, headers=self._headers_of(stub.objects[name]))

    def do_GET(self) -> None:
        if self._answered_otherwise():
            return
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
            return
        there = self.stub.objects.get(self._name())
        if there is None:
            self._end(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.headers.get("If-None-Match") == self._headers_of(there)["ETag"]:
            self._end(304)
        else:
            self._end(200, there[0], self._headers_of(there))

    do_HEAD = do_GET

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _condition_holds(self, there: tuple[bytes, int, float, str] | None) -> bool:
        if self.stub.dialect == "gs":
            wanted = self.headers.get("x-goog-if-generation-match")
            return wanted is None or int(wanted) == (there[1] if there else 0)
        if self.headers.get("If-None-Match") == "*":
            return there is None
        wanted = self.headers.get("If-Match")
        return wanted is None or (there is not None and wanted == self._headers_of(there)["ETag"])

    def _headers_of(self, there: tuple[bytes, int, float, str]) -> dict[str, str]:
        body, generation, modified, control = there
        headers = {
            "ETag": f'"{hashlib.md5(body).hexdigest()}"',
            "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(modified)),
        }
        return (
            headers
            | ({"x-goog-generation": str(generation)} if self.stub.dialect == "gs" else {})
            | ({"Cache-Control": control} if control else {})
        )

    def _list(self, prefix: str) -> None:
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(there[2]))}"
            f"</LastModified><ETag>{escape(self._headers_of(there)['ETag'])}</ETag><Size>{len(there[0])}</Size></Contents>"
            for name, there in sorted(self.stub.objects.items())
            if name.startswith(prefix)
        )
        text = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>'
        self._end(200, text.encode(), {"Content-Type": "application/xml"})

    def _answered_otherwise(self) -> bool:
        stub = self.stub
        stub.requests.append((self.command, self.path, dict(self.headers)))
        time.sleep(stub.delay)
        if stub.status and stub.verb in ("", self.command):
            self._end(stub.status, stub.error.encode())
            return True
        return False

    def _end(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)


@contextlib.contextmanager
def serving(dialect: str) -> Iterator[Stub]:
    stub = Stub(dialect)
    try:
        yield stub
    finally:
        stub.server.shutdown()
        stub.server.server_close()
