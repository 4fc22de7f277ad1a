"""The first results of a process on an empty cache: compiled there, fetched, or built by a service.

A process calls `vec_add` and `softmax` on the CPU. The clock starts after `import torch`, stops at
the second result, and again as soon as C serves the calls. `local compile` has no remote. The
others may not compile, and reach their server through a network that takes --delay seconds each
way: `bundles` reads a static web server with all that a prewarm of the shipped ops has built;
`service` is the first process that asks `jitkern serve` on an empty cache, `service again` the next
one. `warm` is a process on a filled cache. Ratios are to it.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benches import common
from benches.serve import serving
from benches.slow_network import SlowNetwork
from jitkern import cache_tools
from jitkern.cache.store import Cache
from jitkern.remote import publish
from jitkern.remote.stores.directory import DirectoryStore
from jitkern.target import Target

LONGEST = 120.0  # seconds until C serves the calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--delay", type=float, default=0.025, metavar="S", help="each way")
    parser.add_argument("--node", action="store_true", help="be the process that is measured")
    options = common.parsed(parser, arguments)
    if options.node:
        print(json.dumps(node()))
        return 0
    with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(Path(scratch), options.delay)
        rounds = [bench.round() for _ in range(options.rounds or 5)]
    seconds = {
        name: {
            field: statistics.median(found[name][field] for found in rounds)
            for field in ("first", "served", "requests", "compiles")
        }
        for name in rounds[0]
    }
    warm = seconds["warm"]["first"]
    over = {name: fields["first"] - warm for name, fields in seconds.items()}
    header = ("cold process", "first s", "over warm", "served by C after", "requests", "compiles")
    rows = [
        (
            name, f"{fields['first']:.3f}", f"{over[name]:.3f}", f"{fields['served']:.3f}",
            f"{fields['requests']:.0f}", f"{fields['compiles']:.0f}",
        )
        for name, fields in seconds.items()
    ]  # fmt: skip
    common.report(
        options, header, rows,
        entries=bench.entries, delay=options.delay, seconds=seconds, over_warm=over,
    )  # fmt: skip
    return 0


class Bench:
    """A filled cache, a remote made of it, and processes that start with empty caches."""

    def __init__(self, home: Path, delay: float) -> None:
        self.home, self.delay = home, delay
        cpu = Target.current("cpu")
        gpu = f"cuda-sm_90-cu130-torch{cpu.torch}"  # what a fleet's builder would add
        command = (sys.executable, "-m", "jitkern", "prewarm", "jitkern", "-q")
        self._run(home / "full", *command, "--target", str(cpu), "--target", gpu)
        cache = Cache(home / "full" / "jitkern")
        chosen = cache_tools.chosen(cache, cache_tools.EntryFilter())
        self.entries = len(chosen)
        store = DirectoryStore((home / "bundles").as_uri())
        publish.push(cache, chosen, store, unsigned=True)

    def round(self) -> dict[str, dict[str, float]]:
        """Measure each way once."""
        found = {"local compile": self._node("local")}
        found["warm"] = self._node("local", keep=True)
        with static(self.home / "bundles") as to:
            found["bundles"] = self._node("bundles", to)
        with serving(self.home / "service") as url:
            to = ("127.0.0.1", urlsplit(url).port or 0)
            found["service"] = self._node("service-1", to)
            found["service again"] = self._node("service-2", to)
        shutil.rmtree(self.home / "service")
        return found

    def _node(
        self, name: str, to: tuple[str, int] | None = None, *, keep: bool = False
    ) -> dict[str, float]:
        """Run a process on an empty cache, or on the one that the process before has left."""
        home = self.home / f"node-{name}"
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
        command = (sys.executable, "-W", "ignore", "-m", "benches.fleet", "--node")
        if to is None:
            return {**self._run(home, *command, wanted=True), "requests": 0}
        with SlowNetwork(to, delay=self.delay) as network:
            url = f"http://127.0.0.1:{network.port}"
            settings = home / "config" / "jitkern" / "config.toml"
            settings.parent.mkdir(parents=True)
            settings.write_text(f'trusted_remotes = ["{url}"]\n')
            found = self._run(
                home, *command, wanted=True,
                JITKERN_REMOTE=url, JITKERN_COMPILE="never", XDG_CONFIG_HOME=str(home / "config"),
            )  # fmt: skip
            return {**found, "requests": network.requests}

    def _run(self, home: Path, *command: str, wanted: bool = False, **variables: str) -> Any:
        environment = {**common.private_environment(home), **variables}
        environment["XDG_RUNTIME_DIR"] = str(home / "run")
        (home / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise common.ChildFailed(done.stderr[-2000:])
        return json.loads(done.stdout.splitlines()[-1]) if wanted else None


def node() -> dict[str, float]:
    """Call two ops; return the seconds to their results, until C serves them, and the compiles."""
    import torch

    x = torch.randn(64, 1000)
    expected = torch.softmax(x + x, -1)
    started = time.perf_counter()
    import jitkern.ops
    from jitkern.runtime.binding import runtime

    calls: list[Callable[[], Any]] = [
        functools.partial(jitkern.ops.vec_add, x, x),
        functools.partial(jitkern.ops.softmax, x + x),
    ]
    sums, found = (call() for call in calls)
    first = time.perf_counter() - started
    slots = [op.programs["cpu"] for op in (jitkern.ops.vec_add, jitkern.ops.softmax)]
    while time.perf_counter() - started < LONGEST:
        before = [slot.misses for slot in slots if slot]
        sums, found = (call() for call in calls)
        if runtime() and before == [slot.misses for slot in slots if slot]:
            break
        time.sleep(0.002)
    served = time.perf_counter() - started
    if not torch.equal(sums, x + x) or not torch.allclose(found, expected, atol=1e-6):
        raise SystemExit("a wrong result")
    return {"first": first, "served": served, "compiles": jitkern.stats()["compiles"]}


class _Files(http.server.SimpleHTTPRequestHandler):
    """A static web server, which sends the head and the body of an answer together."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that a client has closed."""


@contextlib.contextmanager
def static(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a web server of the files in a folder."""
    handler = functools.partial(_Files, directory=str(folder))
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield "127.0.0.1", server.server_address[1]
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
