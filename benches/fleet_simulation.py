"""A simulation of a fleet: hosts start with empty caches and fetch what they need from one remote.

Each host asks for its objects one after the other. The remote takes a number of requests a second
and answers 503 to the rest; a host that gets 503 asks again after a pause with full jitter. A host
that stops asking (`rest`) counts five such answers in a row as failures, and compiles for 30 s what
it should have fetched. Latency is lognormal. Nothing is connected, and no time passes.

The figures of the remote are those of S3 for one prefix (5,500 GET/s); docs/performance.md shows
the outcome. A plot of the hosts that are ready over time is written with --plot. Needs `pip install
jitkern[docs]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benches import plots
from jitkern.cli.output import print_json, print_table

STEP = 0.01  # seconds
LATENCY, SPREAD_OF_LATENCY = 0.020, 0.6  # seconds (median), and sigma of the lognormal
INDEX = 20  # digests in a kilobyte of an index
LONGEST_PAUSE = 2.0  # seconds
COMPILE = 0.4  # seconds for an entry
FAILURES, REST = 5, 30.0  # answers in a row after which a host rests, and for how many seconds
END = 4 * 3600.0  # seconds of the simulated time


class Way(NamedTuple):
    """A way to fetch.

    requests: GETs of each host, of `kilobytes` each on average. starts: seconds over which hosts
    start. capacity: requests a second that the remote takes. rests: whether 503 counts as a
    failure.
    """

    requests: int
    kilobytes: float
    starts: float = 1.0
    capacity: float = 5500.0
    rests: bool = False


class Outcome(NamedTuple):
    """The outcome of a way to fetch.

    requests: all requests, of which the remote served the share `served`. median_s, p99_s: seconds
    from a host's start until it has all. compiles: entries compiled. gigabytes: bytes served.
    """

    requests: int
    served: float
    median_s: float
    p99_s: float
    compiles: int
    gigabytes: float


def ways(entries: int, kilobytes: float, bundle: float) -> dict[str, Way]:
    """Return the ways that are compared.

    kilobytes, bundle: the size of an entry as an object, and in a bundle.
    """
    whole = entries * bundle + entries / INDEX
    return {
        "each entry, 503 is a failure": Way(entries, kilobytes, starts=30, rests=True),
        "each entry": Way(entries, kilobytes, starts=30),
        "each entry, 50,000 GET/s": Way(entries, kilobytes, starts=30, capacity=50_000),
        "index and 5 bundles": Way(6, whole / 6),
        "index and 5 bundles, 503 is a failure": Way(6, whole / 6, rests=True),
        "index and 1 bundle": Way(2, whole / 2),
        "index and 5 bundles, starts over 30 s": Way(6, whole / 6, starts=30),
        "index and 5 bundles, 20,000 GET/s": Way(6, whole / 6, capacity=20_000),
        "index and 5 bundles, 8 ranks each": Way(48, whole / 6),
    }


def simulate(way: Way, hosts: int, entries: int, seed: int = 1) -> tuple[Outcome, Any]:
    """Return the outcome, and the seconds after the first start at which each host was ready."""
    random = np.random.default_rng(seed)
    started = random.uniform(0, way.starts, hosts)
    at, left = started.copy(), np.full(hosts, way.requests)
    failed, resting, ready = np.zeros(hosts, int), np.zeros(hosts), np.full(hosts, np.inf)
    entries_each = entries / (way.requests - (way.requests != entries))  # an index holds none
    asked = served = compiled = 0
    now = 0.0
    while np.isinf(ready).any() and now < END:
        due = np.nonzero(np.isinf(ready) & (at <= now))[0]
        random.shuffle(due)
        compiling = due[resting[due] > now]
        compiled += len(compiling)
        left[compiling] -= 1
        at[compiling] = now + COMPILE * entries_each
        due = due[resting[due] <= now]
        taken = int(way.capacity * STEP)
        good, bad = due[:taken], due[taken:]
        asked, served = asked + len(due), served + len(good)
        latency = LATENCY * np.exp(SPREAD_OF_LATENCY * random.standard_normal(len(good)))
        left[good] -= 1
        failed[good] = 0
        at[good] = now + latency
        failed[bad] += 1
        pause = np.minimum(LONGEST_PAUSE, 0.1 * 2.0 ** failed[bad])
        at[bad] = now + LATENCY + random.random(len(bad)) * pause
        if way.rests:
            tired = bad[failed[bad] >= FAILURES]
            resting[tired], failed[tired] = now + REST, 0
        done = (left <= 0) & np.isinf(ready)
        ready[done] = at[done]
        now += STEP
    waited = ready - started
    outcome = Outcome(
        asked, served / max(1, asked), float(np.median(waited)), float(np.quantile(waited, 0.99)),
        round(compiled * entries_each), served * way.kilobytes / 1e6,
    )  # fmt: skip
    return outcome, np.sort(ready)


def draw(ready: dict[str, Any], path: Path) -> None:
    """Write the share of hosts that are ready over time, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jitkern"})
    from matplotlib import pyplot as plt

    mpl.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor"), plots.TEXT))
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for name, times in ready.items():
        axes.step(times, np.arange(1, len(times) + 1) / len(times) * 100, label=name, where="post")
    axes.set(xscale="log", xlabel="seconds after the first start", ylabel="hosts ready, %")
    axes.tick_params(colors=plots.TEXT)
    axes.legend(frameon=False, fontsize=8)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=10_000, metavar="N")
    parser.add_argument("--entries", type=int, default=500, metavar="N", help="that each needs")
    parser.add_argument("--entry", type=float, default=14.4, metavar="KB", help="one as an object")
    parser.add_argument("--bundled", type=float, default=0.8, metavar="KB", help="one in a bundle")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    outcomes, ready = {}, {}
    for name, way in ways(options.entries, options.entry, options.bundled).items():
        outcomes[name], ready[name] = simulate(way, options.hosts, options.entries)
    if options.plot:
        draw(ready, options.plot)
    if options.json:
        outcome = {name: outcome._asdict() for name, outcome in outcomes.items()}
        print_json(hosts=options.hosts, entries=options.entries, outcomes=outcome)
        return 0
    header = ("way", "M requests", "served", "p50 s", "p99 s", "compiles", "GB")
    rows = [
        (
            name, f"{o.requests / 1e6:.2f}", f"{o.served:.0%}", f"{o.median_s:.1f}",
            f"{o.p99_s:.1f}", f"{o.compiles:,}", f"{o.gigabytes:.1f}",
        )
        for name, o in outcomes.items()
    ]  # fmt: skip
    print_table(header, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
