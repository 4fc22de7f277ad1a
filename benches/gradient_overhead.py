"""Microseconds of CPU for a small call and its gradient, in one warm process, contenders in turns.

`forward` is a call on 4 x 32 floats that records a gradient; `both` is that call and its backward
pass by `torch.autograd.grad`. `torch` is PyTorch's own function, `python` jitkern where Python
records the calls, as in a process whose cache does not hold the C++ node yet. On a GPU it is the
cost of issuing: the device is waited for between rounds, not inside. Ratios are of medians.
"""

from __future__ import annotations

import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from benches import common
from benches.kinds import synchronize
from jitkern import jit
from jitkern.config import background
from jitkern.op import recorder, recording
from jitkern.runtime import binding
from jitkern.target import Target

CALLS = 300
ROUNDS = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = common.parsed(common.parser(__doc__), arguments)
    torch.set_num_threads(1)
    jit.ensure(binding.variant(), Target.current("cpu"))
    jit.ensure(recorder.variant(), Target.current("cpu"))
    times = measured(options.device, options.rounds or ROUNDS)
    us = {name: statistics.median(rounds) for name, rounds in times.items()}
    ratio = {
        name: us[name] / us[f"torch.{name.split('.', 1)[1]}"] for name in us if "jitkern" in name
    }
    least = {name: min(rounds) for name, rounds in times.items()}
    rows = [
        (
            name,
            f"{us[name]:.2f}",
            f"{least[name]:.2f}",
            f"{ratio[name]:.2f}" if name in ratio else "",
        )
        for name in us
    ]
    header = ("gradient of one call", "median us", "min us", "of torch's")
    common.report(options, header, rows, us=us, min_us=least, ratio=ratio)
    return 0


def calls(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[Any, ...]]]:
    """By the name of the op: a call of PyTorch's, one of jitkern's, and what is differentiated."""
    import jitkern.ops

    ops: Any = jitkern.ops
    x = torch.rand(4, 32, device=device, requires_grad=True)
    w, b = (torch.rand(32, device=device, requires_grad=True) for _ in range(2))
    return {
        "softmax": (lambda: torch.softmax(x, -1), lambda: ops.softmax(x), (x,)),
        "layer_norm": (
            lambda: functional.layer_norm(x, (32,), w, b),
            lambda: ops.layer_norm(x, w, b),
            (x, w, b),
        ),
        "rms_norm": (
            lambda: functional.rms_norm(x, (32,), w, 1e-6),
            lambda: ops.rms_norm(x, w, 1e-6),
            (x, w),
        ),
    }


def measured(device: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each contender, one figure a round; a first round is thrown away."""
    timers: list[tuple[str, str, timeit.Timer]] = []
    for name, (theirs, ours, leaves) in calls(device).items():
        grad = torch.rand(4, 32, device=device)
        for whose, function in (("torch", theirs), ("jitkern", ours), ("python", ours)):

            def both(call: Callable[[], Any] = function, given: Any = leaves, g: Any = grad) -> Any:
                return torch.autograd.grad(call(), given, g)

            for _ in range(10):
                both()
            timers.append((whose, f"{whose}.{name}.forward", timeit.Timer(function)))
            timers.append((whose, f"{whose}.{name}.both", timeit.Timer(both)))
    background.settle()  # the node, too
    assert recording.cpp, "the node is not in the cache"
    times: dict[str, list[float]] = {name: [] for _, name, _ in timers}
    for _ in range(rounds + 1):
        for whose, name, timer in timers:
            by_python(whose == "python")
            synchronize(device)
            times[name].append(timer.timeit(CALLS) / CALLS * 1e6)
            synchronize(device)
    return {name: figures[1:] for name, figures in times.items()}


def by_python(python: bool) -> None:  # noqa: FBT001
    """Let Python record the calls of all ops, or the C++ node."""
    node, runtime = recording.cpp, binding.runtime()
    assert node and runtime
    for slot in recording.GRADIENTS:
        if python:
            runtime.record(slot, node.record, 0)
        else:
            recorder.follow(node, slot)


if __name__ == "__main__":
    sys.exit(main())
