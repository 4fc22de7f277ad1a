"""A TCP proxy that behaves as a far and unreliable network, for benches and tests.

python -m benches.slow_network --listen 8001 --to 127.0.0.1:8000 --delay 0.025 --failing 0.3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

VERBS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")
THROTTLED = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
SILENCE = 30.0  # seconds


class SlowNetwork:
    """A proxy before a server, on a port of its own, in a thread of its own.

    port: where it listens. delay: seconds that each byte takes, each way. failing: the share of
    requests that fail, each in one of the ways `kinds`:
        "503"      it is answered so;
        "reset"    its connection is closed;
        "silence"  it gets no answer for half a minute;
        "lost"     the server does it, and its answer is lost.
    requests, failures: how many there were so far.
    """

    def __init__(
        self,
        to: tuple[str, int],
        *,
        delay: float = 0.0,
        failing: float = 0.0,
        kinds: Sequence[str] = ("503", "reset", "silence", "lost"),
        port: int = 0,
        seed: int = 1,
    ) -> None:
        self.to, self.delay, self.failing, self.kinds, self.port = to, delay, failing, kinds, port
        self.requests = self.failures = 0
        self._random = random.Random(seed)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=1000)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopped.wait()
        server.close()  # and connections end with the loop

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_server, to_server = await asyncio.open_connection(*self.to)
            await asyncio.gather(
                self._pump(reader, to_server, writer), self._pump(from_server, writer)
            )
        writer.close()

    async def _pump(self, source: Any, sink: Any, client: Any = None) -> None:
        """Carry bytes with the delay. client: where requests are told from other bytes."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def write() -> None:
            while True:
                at, data = await queue.get()
                await asyncio.sleep(at - loop.time())
                if not data:
                    break
                with contextlib.suppress(OSError):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        writing = asyncio.ensure_future(write())
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if client and data.startswith(VERBS):
                    self.requests += 1
                    if self._random.random() < self.failing:
                        self.failures += 1
                        await self._fail(data, sink, client)
                        break
                queue.put_nowait((loop.time() + self.delay, data))
        queue.put_nowait((loop.time() + self.delay, b""))
        await writing

    async def _fail(self, request: bytes, server: Any, client: Any) -> None:
        kind = self._random.choice(self.kinds)
        if kind == "lost":
            client.close()
            server.write(request)
        elif kind == "503":
            client.write(THROTTLED)
            await client.drain()
        elif kind == "silence":
            await asyncio.sleep(SILENCE)
        client.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a proxy until Ctrl-C, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--listen", type=int, required=True, metavar="PORT")
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--delay", type=float, default=0.025, metavar="S", help="each way")
    parser.add_argument("--failing", type=float, default=0.0, metavar="SHARE", help="of requests")
    options = parser.parse_args(arguments)
    host, _, port = options.to.partition(":")
    with SlowNetwork(
        (host, int(port)), delay=options.delay, failing=options.failing, port=options.listen
    ) as network:
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        print(f"{network.requests} requests, {network.failures} of them failed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
