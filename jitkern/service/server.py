"""The server, which is uvicorn's: what it serves, and the way to its end."""

from __future__ import annotations

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

from jitkern import config, jit
from jitkern._version import __version__
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import OF_ALL_OPS
from jitkern.op.op import Op
from jitkern.remote import layout
from jitkern.service.builds import Builds, CallBuilder, Outcome
from jitkern.service.catalog import Catalog
from jitkern.service.metrics import Metrics

MOST_CONNECTIONS = 512
MOST_HEAD = 1 << 16  # bytes of a request before its body, about
IDLE = 20.0  # seconds that a connection may wait for its next request
PATIENCE = 25.0  # seconds for which a client is kept waiting: load balancers cut at 60
GRACE = 25.0  # seconds for builds to end: Kubernetes kills after 30
LAST = 5.0  # seconds for the answers after that


class Server:
    """A server of ops, which its packages declare.

    Making it binds its address and starts its workers. address: host and port. jobs: builds at
    once. key: the private key that signs entries. token: what clients must show, or b"". tell:
    takes a line for each request. Raises OSError for an address that cannot be bound, SettingError,
    CacheError for an unusable cache, and JitkernError for a key that cannot sign.
    """

    patience = PATIENCE

    def __init__(
        self,
        ops: Sequence[Op],
        address: tuple[str, int],
        *,
        jobs: int = 1,
        key: Path | None = None,
        token: bytes = b"",
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.ops: Mapping[str, Op] = {op.name: op for op in ops}
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

    def start(self, app: ASGIApp) -> None:
        """Serve in a thread until `drain`, by an application for this server."""
        settings = uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", workers=1,
            limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=MOST_HEAD,
            timeout_keep_alive=int(IDLE),
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
                transport: Any = connection.transport
                connection.loop.call_soon_threadsafe(transport.abort)
        self._thread.join(LAST)
        self._end.close()

    def _note(self, outcome: Outcome, seconds: float) -> None:
        """Count a build, and make room for its bundle."""
        self.metrics.built(outcome, seconds)
        if outcome.bundle:
            self.catalog.sweep()


def _names_of(ops: Sequence[Op]) -> frozenset[str]:
    """Return the names that entries of these ops, and of what all ops share, have."""
    sources = [source for op in ops for of_device in op.sources.values() for source in of_device]
    owners = {source.owner for source in sources if source.owner}
    return frozenset((*OF_ALL_OPS, *(op.name for op in ops), *owners))
