"""One connection of a client: requests read with a deadline, answers written with another."""

from __future__ import annotations

import hmac
import http.client
import io
import json
import os
import re
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from jitkern._version import __version__
from jitkern.remote import layout
from jitkern.service import request

if TYPE_CHECKING:
    from jitkern.service.server import Server

IDLE = 20.0  # seconds that a connection may wait for its next request
READING = 15.0  # seconds for a whole request, however slowly its bytes come
SLOWEST = 50_000  # bytes in a second: a client that takes an answer more slowly is left
_CHUNK = 1 << 18
_MOST_DROPPED = 8 << 20  # bytes of a body that is too large
_OF_CACHE = ("index", "bundle", "entry")  # routes


class Body(NamedTuple):
    """A body of an answer: bytes, or a file."""

    data: bytes = b""
    file: BinaryIO | None = None

    @property
    def size(self) -> int:
        """The number of bytes."""
        return os.fstat(self.file.fileno()).st_size if self.file else len(self.data)


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


class Connection(BaseHTTPRequestHandler):
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
        self.route, self._unread = "other", True

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
        """Return whether the request has the token; answer it if not."""
        token = self.server.token
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not token or hmac.compare_digest(given, b"Bearer " + token):
            return True
        self.refuse(401, "the service wants its token", **{"WWW-Authenticate": "Bearer"})
        return False

    def body(self) -> bytes | None:
        """Return the body of a POST, or None after an answer."""
        announced = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(announced) != 1:
            self.close_connection = True
            self.refuse(411, "a request to build has one Content-Length")
        elif not re.fullmatch("[0-9]{1,15}", announced[0]):
            self.refuse(400, "its Content-Length is no number")
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
        self.answer(status, Body(data), "application/json", **headers)

    def answer(
        self, status: int, body: Body, kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        """Send an answer, without its body for a HEAD or where the client has this ETag."""
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
            "Content-Type": kind, "Content-Length": str(body.size), "Cache-Control": cached,
            layout.BUILDS: "1", **headers,
        }.items():  # fmt: skip
            if status != 304 or name not in ("Content-Type", "Content-Length"):
                self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        sent = 0 if self.command == "HEAD" or status == 304 else self._send(body)
        of_cache = self.route in _OF_CACHE
        self.server.metrics.answered(self.route, status, sent, from_cache=of_cache)
        took = time.monotonic() - self._began
        line = f"{self.requestline!r:.200} {status} {sent} bytes {took * 1000:.0f} ms"
        self.server.tell(f"{self.client_address[0]} {line}")

    def _send(self, body: Body) -> int:
        """Send a body, at no less than a certain speed; return its size."""
        end = time.monotonic() + READING + body.size / SLOWEST
        self.connection.settimeout(READING)
        self.wfile.write(body.data)
        if body.file:
            chunk = body.file.read(self.wbufsize)
            self.wfile.write(chunk)
            while chunk := body.file.read(_CHUNK):
                self.wfile.flush()
                self.connection.settimeout(max(0.001, end - time.monotonic()))
                self.connection.sendall(chunk)
        self.wfile.flush()
        return body.size

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or has a method that nothing here takes."""
        del explain
        self.close_connection = True
        self.refuse(code, message or http.HTTPStatus(code).phrase)

    def version_string(self) -> str:
        """Return the name of this server."""
        return f"jitkern/{__version__}"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Tell nothing: `answer` does, once it is sent."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name
        """Tell of a request, in one line."""
        self.server.tell(f"{self.client_address[0]} {format % args!r:.200}")
