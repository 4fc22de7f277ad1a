"""The server, which is uvicorn's: its limits, what it serves, and the way to its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from jitkern import config, jit
from jitkern._version import __version__
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import OF_ALL_OPS
from jitkern.op.op import Op
from jitkern.remote import layout
from jitkern.service.builds import Builds, CallBuilder, Outcome
from jitkern.service.call_log import CallLog
from jitkern.service.catalog import Catalog
from jitkern.service.metrics import Metrics
from jitkern.service.request import Asked

MOST_CONNECTIONS = 512
MOST_HEAD = 1 << 16  # bytes of a request before its body, about
IDLE = 20.0  # seconds that a connection may wait for its next request
READING = 15.0  # seconds for a whole request, however slowly its bytes come
SLOWEST = 50_000  # bytes in a second: a client that takes an answer more slowly is left
PATIENCE = 25.0  # seconds for which a client is kept waiting: load balancers cut at 60
GRACE = 25.0  # seconds for builds to end: Kubernetes kills after 30
LAST = 5.0  # seconds for the answers after that
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Cache-Control: no-store\r\nConnection: close\r\n\r\n"
)


class Connection(H11Protocol):
    """A connection that is cut off where its client sends or reads too slowly.

    uvicorn itself bounds only the rest after an answer. A request has this object in its state.
    """

    def __init__(self, *, app_state: dict[str, Any], **rest: Any) -> None:
        super().__init__(app_state={**app_state, "connection": self}, **rest)
        self._timer: asyncio.TimerHandle | None = None
        self._waits = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, unless there are too many connections."""
        super().connection_made(transport)
        self.answered()
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_BUSY)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Bound the time for a request from its first byte on."""
        if self._waits:
            self._waits = False
            self.cut_after(READING)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time."""
        self.cut_after(None)
        super().connection_lost(exc)

    def answering(self, size: int) -> None:
        """Bound the time for taking an answer of so many bytes."""
        self.cut_after(READING + size / SLOWEST)

    def answered(self) -> None:
        """Wait for a request; the time for an answer that was not taken yet goes on."""
        self._waits = True
        if not self.transport.get_write_buffer_size():
            self.cut_after(IDLE)

    def cut_after(self, seconds: float | None) -> None:
        """Cut the connection off after some time, from now on, or not at all."""
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort) if seconds else None


class Server:
    """A server of ops, which its packages declare.

    Making it binds its address and starts its workers. address: host and port. jobs: builds at
    once. key: the private key that signs entries. record: the file that calls are appended to.
    token: what clients must show, or b"". tell: takes a line for each request. Raises OSError for
    an address that cannot be bound, SettingError, CacheError for an unusable cache, and
    JitkernError for a key that cannot sign.
    """

    patience = PATIENCE

    def __init__(
        self,
        ops: Sequence[Op],
        address: tuple[str, int],
        *,
        jobs: int = 1,
        key: Path | None = None,
        record: Path | None = None,
        token: bytes = b"",
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.ops: Mapping[str, Op] = {op.name: op for op in ops}
        self.modules = {op.name: op.module for op in ops}
        self.token = token
        self.tell = tell
        self.draining = False
        self.signer = signing.public_key_of(key) if key else ""
        self.metrics = Metrics(
            lambda: len(self._uvicorn.server_state.tasks),
            lambda running: self.builds.count(running=running),
        )
        with config.using(fallback="raise"), contextlib.ExitStack() as undo:
            cache = jit.open_cache()
            self._record = CallLog(record) if record else None
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            tcp = socket.IPPROTO_TCP  # else asyncio leaves Nagle's delay on
            self._socket = undo.enter_context(socket.socket(family, socket.SOCK_STREAM, tcp))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(1024)
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="jitkern-serve-")))
            self.catalog = Catalog(cache, _names_of(ops), folder, key)
            self.builds = Builds(CallBuilder(self.ops, folder, key), jobs, self._note)
            self._end = undo.pop_all()
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def keeps_connections(self) -> bool:
        """Whether clients may keep their connections, of which there are enough."""
        return not self.draining and len(self.connections) <= MOST_CONNECTIONS // 2

    def start(self, app: ASGIApp) -> None:
        """Serve in a thread until `drain`, by an application for this server."""
        settings = uvicorn.Config(
            app, http=Connection, ws="none", loop="asyncio", lifespan="off", workers=1,
            h11_max_incomplete_event_size=MOST_HEAD, timeout_keep_alive=int(IDLE),
            log_config=None, log_level="error", access_log=False, proxy_headers=False,
            headers=[("Server", f"jitkern/{__version__}"), (layout.BUILDS, "1")],
        )  # fmt: skip
        self._uvicorn = uvicorn.Server(settings)
        self.connections = self._uvicorn.server_state.connections
        serve = functools.partial(self._uvicorn.run, [self._socket])
        self._thread = threading.Thread(target=serve, name="jitkern serve", daemon=True)
        self._thread.start()

    def drain(self, grace: float = GRACE) -> None:
        """Accept no more, finish what runs, for `grace` seconds at most, and end the workers."""
        self.draining = self._uvicorn.should_exit = True
        self.builds.drain(grace)
        self._thread.join(LAST)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for connection in [*self.connections]:
                connection.loop.call_soon_threadsafe(connection.transport.abort)
        self._thread.join(LAST)
        self._end.close()

    def _note(self, asked: Asked, outcome: Outcome, seconds: float) -> None:
        """Count a build, make room for its bundle, and write its call down."""
        self.metrics.built(outcome, seconds)
        if self._record:
            self._record.note(asked, outcome)
        if outcome.bundle:
            self.catalog.sweep()


def _names_of(ops: Sequence[Op]) -> frozenset[str]:
    """Return the names that entries of these ops, and of what all ops share, have."""
    sources = [source for op in ops for of_device in op.sources.values() for source in of_device]
    owners = {source.owner for source in sources if source.owner}
    return frozenset((*OF_ALL_OPS, *(op.name for op in ops), *owners))
