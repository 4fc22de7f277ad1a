"""A few kernels of each kind that works here: compiled, served by the cache, compared with PyTorch.

Each row is one kernel. `first call` compiles it, or takes it from the cache if an earlier run has
left it there. `next process` is the first call of a second process, which may not compile. `a call`
is one call of many, and `PyTorch` one call of the function in PyTorch, in turn with it; both are
medians. `error` is the largest difference from the reference in float64, in roundings.
"""

from __future__ import annotations

import json
import os
import statistics
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
from jitkern.runtime import specializer

ROUNDS, CALLS = 10, 50
ROUNDINGS = 4.0  # that the formula may be off; a kernel has the bound of `jitkern check`
NEXT = """
A kernel of your own:  jitkern init --kernel NAME, and docs/author_guide.md
a formula as kernel:   docs/pointwise.md
every shipped op:      jitkern prewarm, then jitkern check
which tools work here: jitkern doctor
the documentation:     make docs"""


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
        Row(name, device, kind, ours, torchs, args)
        for kind, (name, ours, torchs, args) in kinds[device]
    ]


def first_calls() -> list[tuple[str, str, str, float]]:
    """Call each kernel for the first time in this process; returns the rows with the seconds."""
    found = []
    for row in shown():
        with config.using(prefer=row.kind, fallback="raise"), torch.no_grad():
            seconds = _seconds(lambda row=row: row.ours(*row.args), 1)
            _seconds(lambda row=row: row.ours(*row.args), CALLS)
            specializer.settle()  # the next process finds the host side of the call, too
        found.append((row.name, row.device, row.kind, seconds))
    return found


def all_calls() -> list[tuple[float, ...]]:
    """Return of each row: seconds of the first call, a call, PyTorch's; error, largest allowed."""
    found = []
    for row in shown():
        with config.using(prefer=row.kind, fallback="raise"), torch.no_grad():
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
    """Print the table, and return 1 if a result was wrong."""
    if arguments == ["first"]:  # a process that main has started
        print(json.dumps([first_calls(), stats()["compiles"]]))
        return 0
    if arguments == ["next"]:
        print(json.dumps(all_calls()))
        return 0
    model = common.device_name("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{model}, torch {torch.__version__}")
    print("Compiling a kernel for each kind of source that works here …", flush=True)
    first, compiles = _process("first", compiling="auto")
    rest = _process("next", compiling="never")
    print_table(
        ("kernel", "device", "source", "first call", "next process", "a call", "PyTorch", "error"),
        [
            (*row, f"{seconds:.2f} s", f"{1e3 * warm:.1f} ms", f"{1e6 * ours:.1f} us",
             f"{1e6 * torchs:.1f} us", f"{error:.2f}")
            for (*row, seconds), (warm, ours, torchs, error, _) in zip(first, rest)
        ],
    )  # fmt: skip
    print(
        f"{compiles:.0f} compiled now; the next process took all from {config.current().cache_dir}"
    )
    wrong = [row[0] for row, (*_, error, allowed) in zip(first, rest) if error > allowed]
    print(f"WRONG: {', '.join(wrong)}" if wrong else "Each result is PyTorch's, up to rounding.")
    print(NEXT)
    return 1 if wrong else 0


def _process(phase: str, *, compiling: str) -> Any:
    environment = {**os.environ, "JITKERN_COMPILE": compiling}
    return common.fresh_process(
        "-W", "ignore", "-m", "benches.demo", phase, environment=environment
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
