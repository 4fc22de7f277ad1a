"""The requests of clients, and their answers: the application that uvicorn serves.

GET, HEAD  /jitkern.json   /v1/<machine>/index.json   /v1/<machine>/<SHA-256>.tar[.zst]
GET, HEAD  /v1/build/<id>   /metrics   /healthz   / (for people)
POST       /v1/build

Names are parsed strictly; nothing else of a URL becomes a path.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import io
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any, BinaryIO
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jitkern.errors import TargetError
from jitkern.remote import layout
from jitkern.service import page
from jitkern.service.builds import Outcome
from jitkern.service.request import MAX_BYTES, parsed
from jitkern.service.server import Server

_CHUNK = 1 << 18
_MOST_DROPPED = 8 << 20  # bytes of a body that is too large
_NAMED = 8  # files, and digests, in the text of an answer
_TAR = "application/x-tar"
_LATER = {"Retry-After": "5"}
_CLOSE = {"Connection": "close"}
_ORIGIN = re.compile("https?://[^/]*", re.IGNORECASE)  # of a whole URL: RFC 9112, 3.2.2
_HOST = re.compile(r"(?:[\w.-]+|\[[0-9a-f:.]+\])(?::[0-9]+)?", re.ASCII | re.IGNORECASE)


class Application:
    """The routes of a server. Starlette calls plain functions in threads."""

    def __init__(self, server: Server) -> None:
        self._server = server
        routes = [
            Route("/", self.page),
            Route(f"/{layout.ROOT}", self.root),
            Route("/healthz", self.health),
            Route("/metrics", self.metrics),
            Route(f"/{layout.BUILD}", self.build, methods=["POST"]),
            Route(f"/{layout.BUILD}/{{id}}", self.outcome),
            Route("/v1/{machine}/index.json", self.index),
            Route("/v1/{machine}/{file}", self.bundle),
        ]
        handlers = {HTTPException: _error_answer, ClientDisconnect: _error_answer}
        self._routes = Starlette(routes=routes, exception_handlers=handlers)
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, count it, and tell of it."""
        request, began, status, sent = Request(scope, receive), time.monotonic(), 0, 0
        # What follows an unread body could pass for a request.
        request.state.unread = {"content-length", "transfer-encoding"} & {*request.headers}

        async def send_counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                if request.state.unread:
                    headers.update(_CLOSE)
            elif request.method != "HEAD":
                sent += len(message.get("body", b""))
            await send(message)

        await (self._refusal(request) or self._routes)(scope, receive, send_counted)
        route = getattr(scope.get("endpoint"), "__name__", "other")
        self._server.metrics.answered(route, status, sent)
        target = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode()
        line = f"{request.method} {target} HTTP/{scope['http_version']}"
        what = f"{line!r:.200} {status} {sent} bytes {1000 * (time.monotonic() - began):.0f} ms"
        self._server.tell(f"{request.client.host if request.client else ''} {what}")

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that no route is to see."""
        path = unquote(_ORIGIN.sub("", request.scope["raw_path"].decode(), 1))
        request.scope["path"] = path
        if request.method not in ("GET", "HEAD", "POST"):
            return refuse(501, f"Unsupported method ({request.method!r:.100})", _CLOSE)
        if request.scope["http_version"] not in ("1.0", "1.1"):
            return refuse(505, "HTTP Version Not Supported", _CLOSE)
        if path != "/healthz" and (challenge := self._challenge(request)):
            return refuse(401, "a token is required", {"WWW-Authenticate": challenge})
        is_name = path.isprintable() and not request.scope["query_string"]
        return None if is_name else refuse(404, "Not Found")

    def _challenge(self, request: Request) -> str:
        """Return what a client is asked for that has not shown the token, or "".

        Browsers ask for a user and a password: the page takes the token as the password.
        """
        token = self._server.token
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        wanted, shown = "Bearer", given.encode("utf-8", "replace")
        if request.scope["path"] == "/" and scheme != "Bearer":
            wanted, shown = "Basic", b""
            with contextlib.suppress(ValueError):
                shown = base64.b64decode(given).partition(b":")[2]
        if not token or (scheme == wanted and hmac.compare_digest(shown, token)):
            return ""
        return wanted + ' realm="jitkern, the password is the token"' * (wanted == "Basic")

    async def build(self, request: Request) -> Response:
        """Answer with the outcome of a build, once it is done."""
        body = await _body(request)
        try:
            wanted = await run_in_threadpool(parsed, body)
        except ValueError as e:
            return refuse(422 if isinstance(e, TargetError) else 400, f"{e!s:.1000}")
        if wanted.op not in self._server.ops:
            return refuse(404, f"no package here declares {wanted.op}", serves=[*self._server.ops])
        for _ in range(2):  # again if the files of an earlier build are gone
            build = self._server.builds.submit(wanted)
            if build is None:
                waiting = self._server.builds.count(running=False)
                return refuse(429, f"{waiting} builds are queued already", _LATER)
            if answer := await self._answer(request, wanted.id, build, wanted.want):
                return answer
            self._server.builds.forget(wanted.id)
        return refuse(503, "the build is not kept here")

    async def outcome(self, request: Request) -> Response:
        """Answer with the outcome of an earlier request."""
        id_ = request.path_params["id"]
        build = self._server.builds.find(id_)
        answer = build and await self._answer(request, id_, build, frozenset())
        return answer or refuse(404, "no such build is running or recent: request it again")

    async def _answer(
        self, request: Request, id_: str, build: Future[Outcome], want: frozenset[str]
    ) -> Response | None:
        """Return the answer with the outcome of a build, or None if its bundle is gone."""
        patience = self._server.patience
        if wanted := re.search(r"\bwait=([0-9]{1,4})\b", request.headers.get("Prefer", "")):
            patience = min(patience, int(wanted[1]))  # RFC 7240
        await asyncio.wait([asyncio.wrap_future(build)], timeout=patience)
        if not build.done():
            place = {"Retry-After": "2", "Location": f"/{layout.BUILD}/{id_}"}
            return refuse(202, "the build is running", place)
        if build.cancelled():
            return refuse(503, "the service is shutting down", _LATER)
        outcome = build.result()
        missing = sorted(want - outcome.digests)
        lacking = bool(missing) if want else outcome.failed
        if outcome.status != 200 or (outcome.reason and lacking):
            return refuse(422 if outcome.status == 200 else outcome.status, outcome.reason)
        if missing:
            return _differing(outcome, missing)
        file = self._server.catalog.opened(outcome.bundle)
        return _sent(request, file) if file else None

    def page(self, request: Request) -> Response:
        """Answer with the page, whose URLs are those that its reader uses."""
        host = request.headers.get("Host", "")
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else "http"
        url = f"{scheme}://{host}" if _HOST.fullmatch(host) else self._server.url
        return Response(page.page(self._server, url), headers=page.HEADERS, media_type="text/html")

    async def root(self, _: Request) -> Response:
        """Answer that this is a remote."""
        return Response(layout.ROOT_CONTENT, media_type="application/json")

    async def health(self, _: Request) -> Response:
        """Answer whether requests are taken."""
        draining = self._server.draining
        return PlainTextResponse("draining\n" if draining else "ok\n", 503 if draining else 200)

    async def metrics(self, _: Request) -> Response:
        """Answer with all figures."""
        return Response(self._server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def index(self, request: Request) -> Response:
        """Answer with the index of a machine."""
        data = self._server.catalog.index(request.path_params["machine"])
        tag = hashlib.sha256(data or b"").hexdigest()[:32]
        file = None if data is None else io.BytesIO(data)
        return self._lasting(request, file, tag, layout.SHORT_LIVED, "application/json")

    def bundle(self, request: Request) -> Response:
        """Answer with a bundle."""
        machine, name = request.path_params["machine"], request.path_params["file"]
        file = self._server.catalog.bundle(machine, name) if layout.is_bundle(name) else None
        return self._lasting(request, file, name[:64], layout.IMMUTABLE)

    def _lasting(
        self, request: Request, file: BinaryIO | None, tag: str, rule: str, kind: str = _TAR
    ) -> Response:
        """Return the answer with a file, if any, that the client may keep, or has already."""
        if file is None:
            raise HTTPException(404)
        access = "private" if self._server.token else "public"  # else caches need no token
        headers = {"ETag": f'"{tag}"', "Cache-Control": f"{access}, {rule}"}
        if headers["ETag"] in re.split(r"\s*,\s*", request.headers.get("If-None-Match", "")):
            file.close()
            return Response(status_code=304, headers=headers)
        return _sent(request, file, headers, kind)


def refuse(
    status: int, reason: str, headers: Mapping[str, str] | None = None, **fields: Any
) -> Response:
    """Return an answer with a reason in JSON, and other fields."""
    data = json.dumps({"schema": 1, "reason": reason, **fields}) + "\n"
    return Response(data, status, headers, "application/json")


async def _error_answer(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return refuse(error.status_code, error.detail, error.headers)
    return refuse(400, "the request ended early")


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises HTTPException, and ClientDisconnect."""
    announced = request.headers.getlist("Content-Length")
    if "Transfer-Encoding" in request.headers or len(announced) != 1:
        raise HTTPException(411, "a build request needs exactly one Content-Length")
    if int(announced[0]) > MAX_BYTES:
        dropped = 0
        async for part in request.stream():  # a client reads no answer while it sends
            dropped += len(part)
            if dropped > _MOST_DROPPED:
                break
        raise HTTPException(413, f"a request to build has at most {MAX_BYTES} bytes")
    body = await request.body()
    request.state.unread = None
    return body


def _sent(
    request: Request, file: BinaryIO, headers: Mapping[str, str] = {}, kind: str = _TAR
) -> Response:
    """Return the answer with an open file, which is then closed."""

    async def chunks() -> AsyncIterator[bytes]:
        with file:
            while chunk := request.method != "HEAD" and file.read(_CHUNK):
                yield chunk

    size = str(file.seek(0, io.SEEK_END))
    file.seek(0)
    return StreamingResponse(chunks(), 200, {**headers, "Content-Length": size}, kind)


def _differing(outcome: Outcome, missing: list[str]) -> Response:
    """Return the answer that says from which files the client must have something else."""
    names = [f"{name} ({sha[:12]})" for name, sha in outcome.files.items()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    reason = (
        f"the sources here differ: no entry has the digest {', '.join(missing[:_NAMED])}; "
        f"built here from {', '.join(names[:_NAMED])}{more}, by name and SHA-256"
    )
    return refuse(409, reason, files=dict(outcome.files), digests=sorted(outcome.digests))
