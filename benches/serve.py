"""`jitkern serve`: requests a second, and what a build takes for one client and for 60 at once.

A service of the shipped ops in a process of its own, on an empty cache. `build` is the first of its
call, `again` the same call later, `alike` a call of other sizes that needs the same kernel, and
`60 at once` another first one, by 60 clients together, until the last of them has it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benches import common
from jitkern.target import Target, this_platform

TOGETHER = 60
COMMAND = ("-W", "ignore", "-m", "jitkern", "serve", "jitkern", "--listen", "127.0.0.1:0", "-q")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 8, 32])
    options = common.parsed(parser, arguments)
    rounds = options.rounds or 3
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="serve-") as home, serving(Path(home)) as url:
        seconds["build"] = build(url, 1000, "float32")
        seconds["again"] = statistics.median(build(url, 1000, "float32") for _ in range(rounds))
        seconds["alike"] = statistics.median(
            build(url, 1001 + number, "float32") for number in range(rounds)
        )
        seconds["60 at once"] = together(TOGETHER, lambda: build(url, 1000, "float64"))
        index, bundle = names(url)
        rates = {
            f"{what}, {count} connections": statistics.median(
                requests_per_second(url, path, options.requests, count) for _ in range(rounds)
            )
            for what, path in (("bundle", bundle), ("index", index))
            for count in options.connections
        }
    rows = [(name, f"{1000 * taken:.0f} ms") for name, taken in seconds.items()]
    rows += [(name, f"{rate:.0f}/s") for name, rate in rates.items()]
    common.report(options, ("what", "measured"), rows, seconds=seconds, per_second=rates)
    return 0


@contextlib.contextmanager
def serving(home: Path, *arguments: str) -> Iterator[str]:
    """The URL of a service on an empty cache."""
    process = subprocess.Popen(
        [sys.executable, *COMMAND, *arguments], env=common.private_environment(home),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        if not found:
            raise common.ChildFailed("the service did not start")
        yield found[0]
    finally:
        process.terminate()
        process.communicate()


def requests_per_second(url: str, path: str, count: int, connections: int = 1) -> float:
    """How many GETs of a path are answered in a second, over connections that are kept."""

    def get() -> None:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
            for _ in range(count // connections):
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200, answer.status

    return count // connections * connections / together(connections, get)


def together(count: int, work: Callable[[], object]) -> float:
    """The seconds until the last of `count` threads is done, which begin at once."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            failed.append(e)
            raise

    threads = [threading.Thread(target=run) for _ in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - started


def build(url: str, size: int, dtype: str) -> float:
    """The seconds until a client has what a call of vec_add needs on this machine's CPU."""
    tensor = {"tensor": dtype, "shape": [size], "stride": [1], "offset": 0}
    call = {"schema": 1, "op": "jitkern::vec_add", "module": "", "device": "cpu", "kind": "cc"}
    line = json.dumps({**call, "args": [tensor, tensor]})
    body = json.dumps({"schema": 1, "call": line, "targets": [str(Target.current("cpu"))]})
    started = time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("POST", "/v1/build", body)
        answer = connection.getresponse()
        data = answer.read()
    if answer.status != 200:
        raise common.ChildFailed(data.decode("utf-8", "replace"))
    return time.perf_counter() - started


def names(url: str) -> tuple[str, str]:
    """The paths of this machine's index, and of its smallest bundle."""
    machine = f"{Target.current('cpu')}-{this_platform()}"
    index = f"/v1/{machine}/index.json"
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("GET", index)
        bundles = json.loads(connection.getresponse().read())["bundles"]
    return index, f"/v1/{machine}/{min(bundles, key=lambda bundle: bundle['bytes'])['file']}"


if __name__ == "__main__":
    sys.exit(main())
