"""A few kernels of each kind that works here: compiled, served by the cache, compared with PyTorch.

Each row is one kernel. `first call` compiles it, or takes it from the cache if an earlier run has
left it there. `warm start` is the first call of a second process, which may not compile. `a call`
is one call of many, and `PyTorch` one call of the function in PyTorch, in turn with it; both are
medians. All are wall times. `error` is the largest difference from the reference in float64, in
roundings. The last line is the verdict.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from benches import common
from jitkern import config, ops, pointwise, stats
from jitkern.cli.output import print_table
from jitkern.devtools import check
from jitkern.errors import JitkernError
from jitkern.runtime import specializer

ROUNDS, CALLS = 10, 50
ROUNDINGS = 4.0  # that the formula may be off; a kernel has the bound of `jitkern check`
HEADER = "kernel", "source", "first call", "warm start", "a call", "PyTorch", "error"
SLOWER = "A call of an extension runs in Python; C serves those of the other kinds."
NEXT = """
A kernel of your own:  jitkern init --kernel NAME, and docs/first_kernel.md
a formula as kernel:   docs/pointwise.md
every shipped op:      jitkern prewarm, then jitkern check jitkern
which tools work here: jitkern doctor
the documentation:     make docs
"""


class Row(NamedTuple):
    """A kernel that is shown. kind: of its source, as `JITKERN_PREFER` names it."""

    name: str
    device: str
    kind: str
    ours: Callable[..., torch.Tensor]
    torchs: Callable[..., torch.Tensor]
    args: tuple[torch.Tensor, ...]


@pointwise
def geglu(gate, up):
    """Return GELU(gate) * up."""
    return F.gelu(gate) * up


def shown() -> list[Row]:
    """Return a kernel for each kind of source that works on this machine."""
    return [
        row for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()] for row in _on(device)
    ]


def _on(device: str) -> list[Row]:
    x, y = (torch.randn(64, 1024, device=device) for _ in range(2))
    w, b, c = (torch.randn(1024, device=device) for _ in range(3))
    softmax = "softmax", ops.softmax, lambda x: torch.softmax(x, -1), (x,)
    norm = "rms_norm", ops.rms_norm, lambda x, w: F.rms_norm(x, (1024,), w, 1e-6), (x, w)
    formula = "gelu(gate) * up", geglu, lambda gate, up: F.gelu(gate) * up, (x, y)
    muladd = "a * b + c", ops.muladd, lambda a, b, c: torch.addcmul(c, a, b), (w, b, c)
    kinds = {
        "cpu": (("cc", softmax), ("cc", norm), ("cc", formula), ("extension", muladd)),
        "cuda": (("nvrtc", softmax), ("triton", softmax), ("nvrtc", norm), ("nvrtc", formula)),
    }
    return [
        Row(
            name,
            device,
            kind,
            ours if ours is geglu else common.of_kind(ours, device, kind),
            torchs,
            args,
        )
        for kind, (name, ours, torchs, args) in kinds[device]
    ]


def first_calls() -> list[tuple[str, str, float]]:
    """Call each kernel for the first time in this process; returns the rows with the seconds."""
    found = []
    rows = shown()
    for number, row in enumerate(rows, 1):
        source = f"{row.device} {row.kind}"
        print(f"[{number}/{len(rows)}] {row.name}: {source}", file=sys.stderr, flush=True)
        with config.using(fallback="raise"), torch.no_grad():
            seconds = _seconds(lambda row=row: row.ours(*row.args), 1)
            _seconds(lambda row=row: row.ours(*row.args), CALLS)
            specializer.settle()  # the next process finds the host side of the call, too
        found.append((row.name, source, seconds))
    return found


def all_calls() -> list[tuple[float, ...]]:
    """Return of each row: seconds of the first call, a call, PyTorch's; error, largest allowed."""
    found = []
    for row in shown():
        with config.using(fallback="raise"), torch.no_grad():
            sides = [lambda f=f, row=row: f(*row.args) for f in (row.ours, row.torchs)]
            first = _seconds(sides[0], 1)
            taken = [[_seconds(side, CALLS) for side in sides] for _ in range(ROUNDS)]
            found.append((first, *map(statistics.median, zip(*taken)), *_error(row)))
    return found


def _seconds(call: Callable[[], Any], count: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait()
    return (time.perf_counter() - start) / count


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _error(row: Row) -> tuple[float, float]:
    """Return the error of a row and the error that is allowed, in roundings."""
    if row.ours is not geglu:
        return check.compared(row.ours, row.args)[:2]
    want = row.torchs(*(arg.double() for arg in row.args))
    error = (row.ours(*row.args).double() - want).abs() / (want.abs() + 1)
    return float(error.max()) / torch.finfo(torch.float32).eps, ROUNDINGS


def main(arguments: Sequence[str] = ()) -> int:
    """Print the table and a verdict, and return 1 if a kernel failed or a result was wrong."""
    if arguments:  # a process that main has started
        phase = {"first": lambda: [first_calls(), stats()["compiles"]], "next": all_calls}
        try:
            print(json.dumps(phase[arguments[0]]()))
        except JitkernError as e:
            print(e, file=sys.stderr)
            return 1
        return 0
    model = common.device_name("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{model}, torch {torch.__version__}, cache {config.current().cache_dir}")
    print("First calls of a kernel of each kind of source that works here:", flush=True)
    try:
        first, compiles = _process("first", compiling="auto")
        print("A second process, which may not compile, measures them.", flush=True)
        rest = _process("next", compiling="never")
    except subprocess.CalledProcessError:
        print("FAILED: a kernel did not run; the error stands above. What works: jitkern doctor")
        return 1
    print("\nWall times; errors in roundings, from the result in float64:")
    print_table(HEADER, cells(first, rest))
    print(SLOWER)
    print(NEXT)
    wrong = [row[0] for row, (*_, error, allowed) in zip(first, rest) if error > allowed]
    print(verdict(wrong, len(first), compiles))
    return 1 if wrong else 0


def cells(first: Sequence[Any], rest: Sequence[Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table, which is never wider than 80 columns."""
    table = []
    for (name, source, cold), (warm, ours, torchs, error, _) in zip(first, rest):
        times = (f"{_time(taken):>{width}}" for taken, width in zip((cold, warm), (10, 10)))
        calls = (f"{_time(taken):>7}" for taken in (ours, torchs))
        table.append((name, source, *times, *calls, f"{error:5.2f}" if error < 100 else "> 99"))
    return table


def verdict(wrong: Sequence[str], count: int, compiles: int) -> str:
    """Return the last line: whether each result is right, and what was compiled."""
    if wrong:
        return f"FAILED: {len(wrong)} of {count} kernels give wrong results: {', '.join(wrong)}"
    said = f"{compiles:.0f} compiled, none by the second process"
    return f"OK: {count} of {count} kernels agree with PyTorch; {said}"


def _time(seconds: float) -> str:
    """Return a time with three digits, in at most seven characters."""
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * scale
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _process(phase: str, *, compiling: str) -> Any:
    """Return what a process of a phase prints as JSON. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "benches.demo", phase],
        env={**os.environ, "JITKERN_COMPILE": compiling},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
