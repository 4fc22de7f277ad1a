"""Microseconds a call, over the first seconds of a process that starts on an empty cache.

Each row is a process of its own that imports, makes one call and goes on calling `vec_add` on 16
floats, a thousand calls at a time: on an empty cache with a C compiler, on the cache which that
leaves, and without a C compiler. `custom_op` calls the same sum through
`torch.library.custom_op`, in the same process, turn by turn. Columns are medians of the calls made
up to so many seconds after the first one; `settled` is the second half of the time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benches import common
from benches.kinds import custom_op, synchronize

CALLS = 200
UPTO = (0.1, 0.3, 1.0, 3.0, 10.0)  # seconds after the first call
SETTINGS = {
    "empty cache": {},
    "warm": {},
    "no C compiler": {"CC": "/nonexistent", "JITKERN_FALLBACK": "raise"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=UPTO[-1], help="how long each calls")
    parser.add_argument("--child", action="store_true", help="be one of the processes")
    options = common.parsed(parser, arguments)
    if options.child:
        print(json.dumps(measured(options.device, options.seconds)))
        return 0
    upto = [seconds for seconds in UPTO if seconds <= options.seconds]
    found = processes(options.device, options.seconds)
    us = {name: {f"{s:g}": until(run["ours"], s) for s in upto} for name, run in found.items()}
    settled = {name: late(run["ours"]) for name, run in found.items()}
    custom = {name: late(run["custom_op"]) for name, run in found.items()}
    ratio = {
        "first/warm": settled["empty cache"] / settled["warm"],
        "no compiler/custom_op": settled["no C compiler"] / custom["no C compiler"],
    }
    first_ms = {name: run["first_ms"] for name, run in found.items()}
    header = ("us a call", "first ms", *(f"to {s:g} s" for s in upto), "settled", "custom_op")
    rows = [
        (
            name, f"{first_ms[name]:.0f}", *(f"{us[name][f'{s:g}']:.1f}" for s in upto),
            f"{settled[name]:.1f}", f"{custom[name]:.1f}",
        )
        for name in found
    ]  # fmt: skip
    common.report(
        options, header, rows, us=us, settled=settled, custom_op=custom, first_ms=first_ms,
        ratio=ratio,
    )  # fmt: skip
    return 0


def processes(device: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Run a process for each of `SETTINGS`, and return its figures by that name."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="first-process-") as scratch:
        for name, settings in SETTINGS.items():
            home = Path(scratch, "c" if settings else "a")
            home.mkdir(exist_ok=True)
            found[name] = common.fresh_process(
                "-W", "ignore", "-m", "benches.first_process", "--child", "--device", device,
                "--seconds", str(seconds),
                environment=common.private_environment(home, **settings),
            )  # fmt: skip
    return found


def measured(device: str, seconds: float) -> dict[str, Any]:
    """Call the op and its peer in turn: (seconds since the first call, microseconds a call)."""
    x, y = torch.rand(16, device=device), torch.rand(16, device=device)
    peer = custom_op("benches::first")
    peer(x, y)
    synchronize(device)
    started = time.perf_counter()
    import jitkern.ops

    ours: Any = jitkern.ops.vec_add
    assert torch.equal(ours(x, y), x + y)
    synchronize(device)
    first_ms = (time.perf_counter() - started) * 1e3
    began = time.perf_counter()
    figures: dict[str, list[tuple[float, float]]] = {"ours": [], "custom_op": []}
    functions = {"ours": ours, "custom_op": peer}
    for name in itertools.cycle(functions):
        at = time.perf_counter() - began
        if at > seconds:
            break
        figures[name].append((at, _microseconds(functions[name], x, y, device)))
    return {"first_ms": first_ms, **figures}


def _microseconds(
    function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, device: str
) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        function(x, y)
    taken = time.perf_counter() - started
    synchronize(device)
    return taken / CALLS * 1e6


def until(figures: Sequence[Sequence[float]], seconds: float) -> float:
    """The median of the figures up to so many seconds after the first call."""
    return statistics.median([us for at, us in figures if at <= seconds] or [figures[0][1]])


def late(figures: Sequence[Sequence[float]]) -> float:
    """The median of the second half of the time."""
    return statistics.median(us for _, us in figures[len(figures) // 2 :])


if __name__ == "__main__":
    sys.exit(main())
