"""The server: sockets, limits, and the way to its end.

It is the standard library's, in threads. An answer is a file or a wait for a build, so there is
little for an event loop to win: it sends thousands of answers a second, more than a fleet needs
behind a cache. uvicorn with starlette would be two more packages in a process that holds a key.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from jitkern import config, jit
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import OF_ALL_OPS
from jitkern.named_tuple import NamedTuple
from jitkern.op.op import Op
from jitkern.service.build import CallBuilder, Outcome
from jitkern.service.builds import Builds
from jitkern.service.call_log import CallLog
from jitkern.service.catalog import Catalog
from jitkern.service.metrics import Metrics
from jitkern.service.request import Asked

_log = logging.getLogger(__name__)
MOST_CONNECTIONS = 512
PATIENCE = 25.0  # seconds for which a client is kept waiting: load balancers cut at 60
GRACE = 25.0  # seconds for builds to end: Kubernetes kills after 30
LAST = 5.0  # seconds for the answers after that
MOST_FAILURES = 10
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Cache-Control: no-store\r\nConnection: close\r\n\r\n"
)


class Failure(NamedTuple):
    """A build that failed. at: when, by the monotonic clock."""

    asked: Asked
    reason: str
    at: float


class Server(ThreadingHTTPServer):
    """A server of ops, which its packages declare.

    Making it binds its address and starts its workers. address: host and port. handler: answers
    each connection, see `handler`. jobs: builds at once. key: the private key that signs entries.
    record: the file that calls are appended to. token: what clients must show, or b"". tell: takes
    a line for each request. Raises OSError for an address that cannot be bound, SettingError,
    CacheError for an unusable cache, and JitkernError for a key that cannot sign.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    patience = PATIENCE

    def __init__(
        self,
        ops: Sequence[Op],
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
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
        self._failures: dict[str, Failure] = {}  # by the ids of requests; the oldest first
        self.connections: set[socket.socket] = set()
        self._answering: set[socket.socket] = set()  # those among them with a request
        self.metrics = Metrics(
            lambda: len(self._answering), lambda running: self.builds.count(running=running)
        )
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        with config.using(fallback="raise"), contextlib.ExitStack() as undo:
            cache = jit.open_cache()
            self._record = CallLog(record) if record else None
            super().__init__(address, handler)
            undo.callback(self.server_close)
            self._folder = tempfile.TemporaryDirectory(prefix="jitkern-serve-")
            undo.callback(self._folder.cleanup)
            folder = Path(self._folder.name)
            build = CallBuilder(self.ops, folder, key)
            self.catalog = Catalog(cache, names_of(ops), folder, key)
            self.builds = Builds(build, jobs, self._note)
            undo.pop_all()

    @property
    def crowded(self) -> bool:
        """Whether connections are short, so that a client is not to keep the one that it has."""
        return len(self.connections) > MOST_CONNECTIONS // 2

    @property
    def url(self) -> str:
        """The URL of this server."""
        host, port = self.server_address[:2]
        text = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://{f'[{text}]' if ':' in text else text}:{port}"

    @property
    def failures(self) -> list[Failure]:
        """The builds that failed last, the newest first."""
        return [*self._failures.values()][::-1]

    def server_bind(self) -> None:
        """Bind the address, without the look-up of a host name that http.server does."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, unless there are too many."""
        if len(self.connections) < MOST_CONNECTIONS:  # only this thread adds one
            self.connections.add(request)
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_BUSY)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.connections.discard(request)
        super().shutdown_request(request)

    @contextlib.contextmanager
    def busy(self, connection: socket.socket) -> Iterator[None]:
        """Count a request, which is answered to its end before this server ends."""
        self._answering.add(connection)
        try:
            yield
        finally:
            self._answering.discard(connection)

    def handle_error(self, _: Any, client_address: Any) -> None:
        """Log an error of this server; ignore a client that has disconnected."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _log.error("a request of %s failed", client_address, exc_info=error)

    def drain(self, grace: float = GRACE) -> None:
        """Accept no more, finish what runs, for `grace` seconds at most, and end the workers.

        To be called from another thread than `serve_forever`.
        """
        self.draining = True
        self.shutdown()
        self.server_close()
        self.builds.drain(grace)
        end = time.monotonic() + LAST
        while self._answering and time.monotonic() < end:
            time.sleep(0.02)
        for connection in [*self.connections]:  # which wait for another request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._folder.cleanup()

    def _note(self, asked: Asked, outcome: Outcome, seconds: float) -> None:
        """Count a build, make room for its bundle, and write its call down."""
        self.metrics.built(outcome, seconds)
        self._failures.pop(asked.id, None)
        if outcome.failed or outcome.status != 200:
            self._failures[asked.id] = Failure(asked, outcome.reason, time.monotonic())
            if len(self._failures) > MOST_FAILURES:
                del self._failures[next(iter(self._failures))]
        if self._record:
            self._record.note(asked, outcome)
        if outcome.bundle:
            self.catalog.sweep()


def names_of(ops: Sequence[Op]) -> frozenset[str]:
    """Return the names that entries of these ops, and of what all ops share, have."""
    sources = [source for op in ops for of_device in op.sources.values() for source in of_device]
    owners = {source.owner for source in sources if source.owner}
    return frozenset((*OF_ALL_OPS, *(op.name for op in ops), *owners))
