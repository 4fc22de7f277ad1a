"""Microseconds of CPU for one call on 16 floats, in one warm process, contenders taking turns.

`held` is an overload object (`torch.ops.jitkern.vec_add.default`), `public` the function that users
call; both sides of a ratio are called in the same form, through a local name, with the same inputs,
and no gradient is recorded. On a GPU it is the cost of issuing: the device is waited for between
rounds, not inside. On a CPU there is one thread. Ratios are of medians. All compute x + y;
jitkern.differentiable is an op with a backward, and vec_add's kernel.
"""

from __future__ import annotations

import os
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benches import common, vec_add_nvidia
from benches.kinds import KINDS, custom_op, synchronize, verify_events
from jitkern import config, jit, on_compile
from jitkern.runtime import binding, specializer
from jitkern.target import Target

CALLS = 1000
ROUNDS = 25
BASELINES = {"held": "aten.held", "public": "torch.public"}


@dataclass(frozen=True)
class Contender:
    """A call of x + y to time."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def timer(self) -> timeit.Timer:
        """Calls the function through a local name, with arguments in locals."""
        names = ", ".join(f"a{i}" for i in range(len(self.args)))
        setup = f"f = function; {names}, = args"
        return timeit.Timer(
            f"f({names})", setup, globals={"function": self.function, "args": self.args}
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--fill", action="store_true", help="only fill the cache, for a warm run")
    options = common.parsed(parser, arguments)
    if options.fill:
        return fill(options.device)
    command = ("-m", "benches.call_overhead", "--fill", "--device", options.device)
    common.fresh_process(*command, environment=dict(os.environ))
    torch.set_num_threads(1)
    wanted = list(contenders(options.device))
    ready = prepared(wanted)
    times = measured(ready, options.device, options.rounds or ROUNDS)
    us = {name: statistics.median(rounds) for name, rounds in times.items()}
    ratio = {form: ratios(us, form) for form in BASELINES}
    of = {f"{kind}.{form}": value for form, kinds in ratio.items() for kind, value in kinds.items()}
    least = {name: min(rounds) for name, rounds in times.items()}
    rows = [
        (name, f"{us[name]:.2f}", f"{least[name]:.2f}", f"{of[name]:.2f}" if name in of else "")
        for name in us
    ]
    header = ("one call", "median us", "min us", "ratio")
    common.report(options, header, rows, us=us, min_us=least, ratio=ratio)
    return 0 if len(ready) == len(wanted) else 1


def fill(device: str) -> int:
    """Compile all that a warm process then finds."""
    jit.ensure(binding.variant(), Target.current("cpu"))
    prepared(list(contenders(device)))
    print("0")
    return 0


def contenders(device: str) -> Iterator[Contender]:
    """All that this device can run, Torch's own first."""
    x, y = torch.rand(16, device=device), torch.rand(16, device=device)
    import jitkern.ops

    yield Contender("aten.held", torch.ops.aten.add.Tensor, (x, y))
    yield Contender("torch.public", torch.add, (x, y))
    for kind in KINDS.values():
        if kind.op == "vec_add" and device in kind.devices and not kind.missing():
            vec_add = common.of_kind(jitkern.ops.vec_add, device, kind.prefer)
            yield Contender(f"{kind.name}.held", vec_add.overload, (x, y))
            yield Contender(f"{kind.name}.public", vec_add, (x, y))
    yield Contender("custom_op", custom_op("benches::vec_add"), (x, y))
    if device == "cuda" and not KINDS["triton"].missing():
        from benches.vec_add_triton import vec_add

        yield Contender("triton", vec_add, (x, y))
    for name, op in vec_add_nvidia.VEC_ADD.items():
        if device == "cuda" and vec_add_nvidia.is_ready(name):
            yield Contender(f"jitkern.{name}.held", op.overload, (x, y))
            yield Contender(f"jitkern.{name}.public", op, (x, y))
    differentiable = _differentiable()
    yield Contender("jitkern.differentiable.held", differentiable.overload, (x, y))
    yield Contender("jitkern.differentiable.public", differentiable, (x, y))


def _differentiable() -> Any:
    """vec_add's kernels and launch functions under an op that has a gradient."""
    from jitkern.calls.signature import Signature
    from jitkern.op.declaration import Declaration
    from jitkern.op.op import OPS, Op

    vec_add = OPS["jitkern::vec_add"]
    signature = Signature("benches::differentiable(Tensor x, Tensor y) -> Tensor")
    op = Op(signature, Declaration(vec_add.sources))
    op.reference(torch.add)
    for kind, function in vec_add.declaration.launchers.items():
        op.launch(kind)(function)
    op.backward(lambda grad: (grad, grad))
    return op


def prepared(wanted: Sequence[Contender]) -> list[Contender]:
    """Those that run, compiled by now and compared with Torch; one that cannot is named on stderr.

    Raises AssertionError for a wrong result, or one by another kind of kernel than named.
    """
    events: list[Any] = []
    stop = on_compile(events.append)
    ready = []
    for contender in wanted:
        try:
            with config.using(fallback="raise"):
                out = contender.function(*contender.args)
                specializer.settle()  # the next calls are served by C
        except (ImportError, RuntimeError) as e:
            print(f"FAILED: {contender.name} is left out: {e}", file=sys.stderr)
            continue
        args = contender.args
        expected = torch.add(*args)
        if not torch.allclose(out, expected):
            raise AssertionError(f"{contender.name} is wrong: {out} instead of {expected}")
        for kind in KINDS.values():
            if contender.name.startswith(f"{kind.name}."):
                verify_events(events, kind.op, kind.prefer)
        ready.append(contender)
    stop()
    return ready


def measured(ready: Sequence[Contender], device: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each contender, one figure a round; a first round is thrown away."""
    timers = [(contender, contender.timer()) for contender in ready]
    times: dict[str, list[float]] = {contender.name: [] for contender in ready}
    for _ in range(rounds + 1):
        for contender, timer in timers:
            with config.using(fallback="raise"):
                synchronize(device)
                times[contender.name].append(timer.timeit(CALLS) / CALLS * 1e6)
                synchronize(device)
    return {name: figures[1:] for name, figures in times.items()}


def ratios(us: dict[str, float], form: str) -> dict[str, float]:
    """Each kind of jitkern's against Torch's own call of the same form."""
    kinds = sorted(
        name.removesuffix(f".{form}")
        for name in us
        if name.startswith("jitkern.") and name.endswith(f".{form}")
    )
    baseline = us.get(BASELINES[form])
    return {kind: us[f"{kind}.{form}"] / baseline for kind in kinds} if baseline else {}


if __name__ == "__main__":
    sys.exit(main())
