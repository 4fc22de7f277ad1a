"""The roofline of a call: the least time that a device needs for it, and the time it takes.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures" (2009). What a device gives at most is measured on it, once a process.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jitkern import config
from jitkern.calls.signature import tensors_in
from jitkern.devtools import timing
from jitkern.errors import DeclarationError, defined_at
from jitkern.launch.call import Call
from jitkern.launch.devices import Devices
from jitkern.named_tuple import NamedTuple
from jitkern.op.all_ops import op_of
from jitkern.op.op import Op
from jitkern.runtime import specializer
from jitkern.source.kinds import Cuda

_GPU_BYTES = 1 << 30  # of each array of a copy, unless the caches hold more
SECONDS = 0.2  # for each measurement
MATRIX = {"cuda": 4096, "cpu": 1024}  # rows and columns of the matrices that are multiplied
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of a matrix product


class Cost(NamedTuple):
    """The bytes that a call must move, and the operations that it computes, as `@op.cost` says."""

    bytes: int
    flops: float


class Bandwidth(NamedTuple):
    """The bandwidth of the memory of a device, in bytes a second.

    copy: reading and writing, counted together. read: reading alone.
    """

    copy: float
    read: float


class Roofline(NamedTuple):
    """The least time for a call, and the time that the call takes; see `jitkern.roofline`.

    bytes, flops: the least that the call must move, and what it computes.
    intensity: flops for each byte.
    floor: the least seconds that the device needs for both.
    time: measured seconds of the kernels, the median; None if an argument is on meta.
    share: floor / time, which is at most about 1; None without a time.
    bound: what limits the floor, "memory" or "arithmetic".
    """

    bytes: int
    flops: float
    intensity: float
    floor: float
    time: float | None
    share: float | None
    bound: str

    def __str__(self) -> str:
        """Return the numbers as a line of text."""
        amounts = f"{quantity(self.bytes, 'B')}, {quantity(self.flops, 'flop')}"
        floor = f"{self.intensity:.2g} flop/B: at least {quantity(self.floor, 's')} ({self.bound})"
        if self.time is None or self.share is None:
            return f"{amounts}, {floor}"
        measured = f"took {quantity(self.time, 's')}, the floor is {self.share:.0%} of it"
        return f"{amounts}, {floor}; {measured}"


def quantity(number: float, unit: str) -> str:
    """Return a number with three digits and a prefix, e.g. `8.39 MB`."""
    prefixes = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}
    factor = next((f for f in prefixes if abs(number) >= f), 1 if not number else 1e-9)
    return f"{number / factor:.3g} {prefixes[factor]}{unit}"


def roofline(op: Any, *args: Any, **kwargs: Any) -> Roofline:
    """Return the least time that a device needs for a call, and the time that the call takes.

    op: an op with `@op.cost`, or a function with such an op as its `op`.
    args, kwargs: arguments of the call. The op is called on copies of them that rotate through more
        memory than the caches hold. If a tensor is on meta, nothing is called, and the floor is
        that of the current GPU, or of the CPU on a machine without a GPU.

    The floor comes from a copy by 16-byte accesses (by Torch, on the CPU) and from a matrix product
    by Torch in the dtype of the first floating-point argument. Both are measured once a process.
    Raises DeclarationError for an op without a cost.
    """
    cost = cost_of(op, args, kwargs)
    declared = op_of(op)
    complete = declared.signature.in_order(*declared.signature.complete(args, kwargs))
    tensors = tensors_in(complete)
    placeless = any(tensor.is_meta for tensor in tensors)
    device = _device_of(tensors)
    dtype = next((t.dtype for t in tensors if t.dtype in _PLAIN), torch.float32)
    moving = cost.bytes / bandwidth(device).copy
    computing = cost.flops / arithmetic(device, dtype) if cost.flops else 0.0
    floor = max(moving, computing)
    seconds = None if placeless else _seconds(declared, complete, device)
    return Roofline(
        bytes=cost.bytes,
        flops=cost.flops,
        intensity=cost.flops / cost.bytes if cost.bytes else 0.0,
        floor=floor,
        time=seconds,
        share=floor / seconds if seconds else None,
        bound="memory" if moving >= computing else "arithmetic",
    )


def cost_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cost:
    """Return the result of `@op.cost` for a call. Raises DeclarationError."""
    declared = op_of(op)
    function = declared.declaration.cost
    if function is None:
        inputs = ", ".join(argument.name for argument in declared.signature.arguments)
        raise DeclarationError(
            f"{declared.name}: {declared.place}it has no cost: add `@{declared.__name__}.cost` on "
            f"a function `f({inputs})` that returns (bytes, flops): each input read once and each "
            "output written once, e.g. (2 * x.nbytes, x.numel())"
        )
    complete, by_name = declared.signature.complete(args, kwargs)
    result: Any = function(*complete, **by_name)
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not all(isinstance(v, (int, float)) and v >= 0 for v in result):
        raise DeclarationError(
            f"{declared.name}: {defined_at(function)}its cost returned {result!r:.80}: return two "
            "numbers, (bytes, flops)"
        )
    return Cost(int(result[0]), result[1])


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    """Return the device of a call; for meta tensors the current GPU, or the CPU without a GPU."""
    real = [tensor.device for tensor in tensors if not tensor.is_meta]
    if len(real) < len(tensors) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return next((device for device in real if device.type != "cpu"), torch.device("cpu"))


def _seconds(op: Op, args: tuple[Any, ...], device: torch.device) -> float:
    """Return the median seconds of a call."""
    calls: list[timing.Call] = []
    for copy in timing.rotated(args, device):
        positional, by_name = op.signature.split(copy)
        calls.append(functools.partial(op, *positional, **by_name))
    with torch.no_grad():
        calls[0]()
        specializer.settle()  # the next calls are served by C
        return statistics.median(_samples(calls, device))


def _samples(calls: list[timing.Call], device: torch.device) -> list[float]:
    """Return samples of the seconds of a call: of its kernels on a GPU, of all of it on the CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return timing.interleaved({"": timing.captured(calls, device)}, SECONDS)[""]
    sampler = timing.issued(timing.repeated(calls, device), device)
    return timing.interleaved({"": sampler}, SECONDS)[""]


@functools.cache
def bandwidth(device: torch.device) -> Bandwidth:
    """Return what the memory of a device gives. Measured once a process.

    On a GPU by 16-byte accesses, so it compiles `ceilings.cu` on an empty cache: raises the errors
    of `jit.ensure`. On the CPU by `Tensor.copy_` and `Tensor.sum`.
    """
    size = timing.past_caches(device)
    size = max(_GPU_BYTES, size) if device.type == "cuda" else size
    x = torch.rand(size // 4, device=device)
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x), "read": x.sum}
    if device.type == "cuda":
        calls = {"copy": launch("copy16", 1024, y, x), "read": launch("read16", 2048, y, x)}
        background = config.current().compile == "background"
        with config.using(compile="auto") if background else contextlib.nullcontext():
            for call in calls.values():
                call()
    seconds = {name: _usual(_samples([call], device), device) for name, call in calls.items()}
    return Bandwidth(2 * x.nbytes / seconds["copy"], x.nbytes / seconds["read"])


def _usual(samples: list[float], device: torch.device) -> float:
    """Return the median on a GPU; on a CPU, where other processes interfere, the minimum."""
    return statistics.median(samples) if device.type == "cuda" else min(samples)


def launch(function: str, vectors: int, y: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """Return a launch of a kernel of `ceilings.cu`, with so many vectors a block."""
    count = x.nbytes // 16
    keywords = {"grid": -(-count // vectors), "block": 256}
    runner = Devices("jitkern::ceilings", "cuda").runner(SOURCE, x.device)
    return functools.partial(runner, Call(function, (), (y, x, count), keywords))


SOURCE = Cuda(
    "ceilings.cu", folder=str(Path(__file__).parent), package=__package__ or "", module=__name__
)


@functools.cache
def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Return the flops a second of a matrix product by Torch. Measured once a process.

    On the CPU, whose arithmetic in 16 bits may be emulated, 16-bit dtypes count as float32.
    """
    if device.type == "cpu" and dtype != torch.float64:
        dtype = torch.float32
    size = MATRIX["cuda" if device.type == "cuda" else "cpu"]
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    call = functools.partial(torch.mm, a, b, out=out)
    call()
    return 2 * size**3 / _usual(_samples([call], device), device)
