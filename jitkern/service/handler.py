"""A connection of a client: its requests, and their answers.

GET, HEAD  /jitkern.json   /v1/<machine>/index.json   /v1/<machine>/<SHA-256>.tar[.zst]
GET, HEAD  /v1/build/<id>   /metrics   /healthz   / (for people)
POST       /v1/build

Requests are read with a deadline, and answers written with another. Names are parsed strictly;
nothing of a URL becomes a path.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import io
import json
import os
import re
import time
from concurrent.futures import CancelledError, Future, TimeoutError as NotYet
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO
from urllib.parse import unquote

from jitkern._version import __version__
from jitkern.errors import TargetError
from jitkern.remote import layout
from jitkern.service import page, request
from jitkern.service.build import Outcome
from jitkern.service.metrics import REMEDY
from jitkern.service.server import Server

IDLE = 20.0  # seconds that a connection may wait for its next request
READING = 15.0  # seconds for a whole request, however slowly its bytes come
SLOWEST = 50_000  # bytes in a second: a client that takes an answer more slowly is left
_CHUNK = 1 << 18
_MOST_DROPPED = 8 << 20  # bytes of a body that is too large
_ROUTES = (
    ("page", re.compile("/")),
    ("root", re.compile("/" + re.escape(layout.ROOT))),
    ("health", re.compile("/healthz")),
    ("metrics", re.compile("/metrics")),
    ("outcome", re.compile("/v1/build/([0-9a-f]{64})")),
    ("index", re.compile(r"/v1/([\w.+!-]+)/index\.json", re.ASCII)),
    ("bundle", re.compile(r"/v1/([\w.+!-]+)/([0-9a-f]{64}\.tar(?:\.zst)?)", re.ASCII)),
)
_BUILD = f"/{layout.BUILD}"
_NAMED = 8  # files, and digests, in the text of an answer
_LATER = {"Retry-After": "5"}
_HOST = re.compile(r"(?:[\w.-]+|\[[0-9a-f:.]+\])(?::[0-9]+)?", re.ASCII | re.IGNORECASE)


class _Deadline(io.RawIOBase):
    """The bytes of a connection, until a moment by the monotonic clock."""

    end = 0.0

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        return int(self._connection.recv_into(buffer))


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other."""

    server: Server
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: as two, each answer waits 40 ms for the client's delayed ACK.
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Read with a deadline."""
        super().setup()
        self._deadline = _Deadline(self.connection)
        self.rfile = io.BufferedReader(self._deadline)

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self._deadline.end = time.monotonic() + IDLE
        try:
            if not self.rfile.peek(1) or self.server.draining:  # type: ignore[attr-defined]
                self.close_connection = True
                return
            self._deadline.end = time.monotonic() + READING
            self.route, self._unread = "other", True
            self._began = time.monotonic()
            self.headers = http.client.HTTPMessage()  # until those of this request are read
            with self.server.busy(self.connection):
                super().handle_one_request()
        except OSError:  # the client is gone, or too slow
            self.close_connection = True

    def parse_request(self) -> bool:
        """Read the head of a request; refuse one that a proxy could have read otherwise."""
        if not super().parse_request():
            return False
        if self.headers.defects:  # the standard library takes no header after an odd line
            self.send_error(400, "its headers are not well-formed")
            return False
        self.path = re.sub("^https?://[^/]*", "", self.path, flags=re.IGNORECASE)  # RFC 9112, 3.2.2
        return True

    def handle_expect_100(self) -> bool:
        """Tell a client now, and not with the answer, to send its body."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def is_allowed(self) -> bool:
        """Return whether the request has the token; answer it if not.

        Browsers ask for a user and a password: the page takes the token as the password.
        """
        token = self.server.token
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        wanted, shown = "Bearer", given.encode("utf-8", "replace")
        if self.route == "page" and scheme != "Bearer":
            wanted, shown = "Basic", b""
            with contextlib.suppress(ValueError):
                shown = base64.b64decode(given).partition(b":")[2]
        if not token or (scheme == wanted and hmac.compare_digest(shown, token)):
            return True
        challenge = wanted + ' realm="jitkern, the password is the token"' * (wanted == "Basic")
        self.refuse(401, "a token is required", **{"WWW-Authenticate": challenge})
        return False

    def body(self) -> bytes | None:
        """Return the body of a POST, or None after an answer."""
        announced = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(announced) != 1:
            self.close_connection = True
            self.refuse(411, "a build request needs exactly one Content-Length")
        elif not re.fullmatch("[0-9]{1,15}", announced[0]):
            self.refuse(400, "its Content-Length is not a number")
        elif int(announced[0]) > request.MAX_BYTES:
            self.refuse(413, f"a request to build has at most {request.MAX_BYTES} bytes")
            self.wfile.flush()
            for _ in range(_MOST_DROPPED // _CHUNK):  # a client reads no answer while it sends
                if not self.rfile.read(_CHUNK):
                    break
        else:
            size = int(announced[0])
            body = self.rfile.read(size)
            self._unread = len(body) < size
            if not self._unread:
                return body
            self.close_connection = True
        return None

    def refuse(self, status: int, reason: str, **rest: Any) -> None:
        """Answer with a reason in JSON. rest: headers, by names with capitals, and other fields."""
        headers = {name: value for name, value in rest.items() if name[0].isupper()}
        fields = {name: value for name, value in rest.items() if name not in headers}
        data = json.dumps({"schema": 1, "reason": reason, **fields}).encode() + b"\n"
        headers["Cache-Control"] = "no-store"  # a proxy that kept a miss would hide what comes
        self.answer(status, data, "application/json", **headers)

    def answer(
        self,
        status: int,
        body: bytes | BinaryIO,
        kind: str = "text/plain; charset=utf-8",
        **headers: str,
    ) -> None:
        """Send an answer, without its body for a HEAD or where the client has this ETag."""
        size = len(body) if isinstance(body, bytes) else os.fstat(body.fileno()).st_size
        tag = headers.get("ETag")
        if tag and tag in re.split(r"\s*,\s*", self.headers.get("If-None-Match", "")):
            status = 304
        cached = headers.pop("Cache-Control", "no-store")
        if cached != "no-store":  # a shared cache would hand it to clients without a token
            cached = f"{'private' if self.server.token else 'public'}, {cached}"
        if self._unread and {"Content-Length", "Transfer-Encoding"} & {*self.headers.keys()}:
            self.close_connection = True  # what follows is the body, and no request
        self.close_connection |= self.server.draining or self.server.crowded
        self.send_response(status)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(size), "Cache-Control": cached,
            layout.BUILDS: "1", **headers,
        }.items():  # fmt: skip
            if status != 304 or name not in ("Content-Type", "Content-Length"):
                self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        sent = 0 if self.command == "HEAD" or status == 304 else size
        if sent:
            self._send(body, size)
        self.server.metrics.answered(self.route, status, sent)
        took = time.monotonic() - self._began
        line = f"{self.requestline!r:.200} {status} {sent} bytes {took * 1000:.0f} ms"
        self.server.tell(f"{self.client_address[0]} {line}")

    def _send(self, body: bytes | BinaryIO, size: int) -> None:
        """Send a body, at no less than a certain speed."""
        end = time.monotonic() + READING + size / SLOWEST
        self.connection.settimeout(READING)
        file = io.BytesIO(body) if isinstance(body, bytes) else body
        self.wfile.write(file.read(self.wbufsize))
        while chunk := file.read(_CHUNK):
            self.wfile.flush()
            self.connection.settimeout(max(0.001, end - time.monotonic()))
            self.connection.sendall(chunk)
        self.wfile.flush()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or has a method that nothing here takes."""
        del explain
        self.close_connection = True
        self.refuse(code, message or http.HTTPStatus(code).phrase)

    def version_string(self) -> str:
        """Return the name of this server."""
        return f"jitkern/{__version__}"

    def log_message(self, *_: Any) -> None:
        """Tell nothing: `answer` does, once it is sent."""

    def do_GET(self) -> None:
        """Answer a GET or a HEAD."""
        path = unquote(self.path)
        for route, pattern in _ROUTES:
            if match := pattern.fullmatch(path):
                self.route = route
                if route == "health" or self.is_allowed():
                    getattr(self, f"_{route}")(*match.groups())
                return
        if self.is_allowed():
            self._missing()

    do_HEAD = do_GET  # noqa: N815  the same

    def do_POST(self) -> None:
        """Answer a request to build."""
        if not self.is_allowed():
            return
        if self.path != _BUILD:
            known = any(pattern.fullmatch(self.path) for _, pattern in _ROUTES)
            self.refuse(405 if known else 404, f"only {_BUILD} takes a POST")
            return
        self.route = "build"
        if (body := self.body()) is None:
            return
        try:
            asked = request.parsed(body, self.server.modules)
        except ValueError as e:
            self.refuse(422 if isinstance(e, TargetError) else 400, f"{e!s:.1000}")
            return
        if asked.op not in self.server.ops:
            self.refuse(404, f"no package here declares {asked.op}", serves=[*self.server.ops])
            return
        self._submit(asked)

    def _submit(self, asked: request.Asked) -> None:
        """Answer with the outcome of the build, once it is done."""
        for _ in range(2):  # again if the files of an earlier build are gone
            build = self.server.builds.submit(asked)
            if build is None:
                text = f"{self.server.builds.count(running=False)} builds are queued already"
                self.refuse(429, text, **_LATER)
                return
            if self._respond(asked.id, build, asked.want):
                return
            self.server.builds.forget(asked.id)
        self.refuse(503, "the build is not kept here")

    def _outcome(self, id_: str) -> None:
        """Answer with the outcome of an earlier request."""
        build = self.server.builds.find(id_)
        if build is None or not self._respond(id_, build, frozenset()):
            self.refuse(404, "no such build is running or recent: request it again")

    def _respond(self, id_: str, build: Future[Outcome], want: frozenset[str]) -> bool:
        """Answer with the outcome of a build; return False if its bundle is gone."""
        patience = self.server.patience
        if wanted := re.search(r"\bwait=([0-9]{1,4})\b", self.headers.get("Prefer", "")):
            patience = min(patience, int(wanted[1]))  # RFC 7240
        try:
            outcome = build.result(patience)
        except NotYet:
            place = f"{_BUILD}/{id_}"
            self.refuse(202, "the build is running", **{"Retry-After": "2", "Location": place})
            return True
        except CancelledError:
            self.refuse(503, "the service is shutting down", **_LATER)
            return True
        missing = sorted(want - outcome.digests)
        lacking = bool(missing) if want else outcome.failed
        if outcome.status != 200 or (outcome.reason and lacking):
            status = 422 if outcome.status == 200 else outcome.status
            self.refuse(status, outcome.reason)
        elif missing:
            self._differ(outcome, missing)
        else:
            file = self.server.catalog.opened(outcome.bundle)
            if file is None:
                return False
            with file:
                self.answer(200, file, "application/x-tar")
        return True

    def _differ(self, outcome: Outcome, missing: list[str]) -> None:
        """Say from which files the client must have something else."""
        names = [f"{name} ({sha[:12]})" for name, sha in outcome.files.items()]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        reason = (
            f"the sources here differ: no entry has the digest {', '.join(missing[:_NAMED])}; "
            f"built here from {', '.join(names[:_NAMED])}{more}, by name and SHA-256"
        )
        digests = sorted(outcome.digests)
        self.refuse(409, reason, files=dict(outcome.files), digests=digests)

    def _page(self) -> None:
        host = self.headers.get("Host", "")
        scheme = "https" if self.headers.get("X-Forwarded-Proto") == "https" else "http"
        url = f"{scheme}://{host}" if _HOST.fullmatch(host) else self.server.url
        self.answer(200, page.page(self.server, url), "text/html; charset=utf-8", **page.HEADERS)

    def _root(self) -> None:
        self.answer(200, layout.ROOT_CONTENT, "application/json")

    def _health(self) -> None:
        draining = self.server.draining
        self.answer(503 if draining else 200, b"draining\n" if draining else b"ok\n")

    def _metrics(self) -> None:
        text = self.server.metrics.text()
        if text is None:
            self.refuse(501, f"metrics need the package prometheus-client: {REMEDY}")
        else:
            self.answer(200, text, self.server.metrics.content_type)

    def _index(self, machine: str) -> None:
        data = self.server.catalog.index(machine)
        if data is None:
            self._missing()
            return
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        self.answer(
            200, data, "application/json", ETag=tag, **{"Cache-Control": layout.SHORT_LIVED}
        )

    def _bundle(self, machine: str, file: str) -> None:
        opened = self.server.catalog.bundle(machine, file)
        if opened is None:
            self._missing()
            return
        with opened:
            headers = {"ETag": f'"{file[:64]}"', "Cache-Control": layout.IMMUTABLE}
            self.answer(200, opened, "application/x-tar", **headers)

    def _missing(self) -> None:
        self.refuse(404, "there is no such object")
