"""Measure the configurations of a launch function, with arguments that no launch may spoil."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from jitkern.calls.signature import tensors_in
from jitkern.errors import (
    CacheError,
    CompilerNotFound,
    DeclarationError,
    LaunchError,
    TargetError,
    defined_at,
)
from jitkern.launch.arguments import ALIGNMENT
from jitkern.launch.tuned import Function, Launch, Tuned
from jitkern.named_tuple import NamedTuple

WARM_UPS, REPEATS = 3, 10
AHEAD = 1_000_000  # cycles that a GPU is kept busy, so that the time of Python is not measured
UNKNOWN_CACHE = 64 << 20  # bytes, for a CPU that does not tell the size of its last cache
LONGEST = 200  # characters of a reason in a choice
_log = logging.getLogger(__name__)
_Clock = Callable[[Launch, torch.device, Callable[[], object]], float]


class Measurement(NamedTuple):
    """The median time of a configuration; infinite if it was left out, with the reason."""

    milliseconds: float
    problem: RuntimeError | None = None

    @property
    def reason(self) -> str | None:
        """The first line of the error for which the configuration was left out, or None."""
        return f"{self.problem}".partition("\n")[0][:LONGEST] if self.problem else None


def measured(
    configs: Sequence[Any], device: torch.device, run: Callable[[Any], Launch], *, cold: bool
) -> list[Measurement]:
    """Return the result of each configuration; one that fails is left out.

    Raises the errors that concern all configurations.
    """
    results = []
    for candidate in configs:
        try:
            results.append(Measurement(milliseconds(run, candidate, device, cold=cold)))
        except (CompilerNotFound, DeclarationError, TargetError, CacheError):
            raise
        except RuntimeError as e:
            _log.info("leaving out configuration %s, which does not run: %s", candidate, e)
            _release(e)
            results.append(Measurement(float("inf"), e))
    return results


def _release(error: BaseException | None) -> None:
    """Drop the variables that an error keeps alive, so that the next configuration has memory."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def milliseconds(
    run: Callable[[Any], Launch], candidate: Any, device: torch.device, *, cold: bool
) -> float:
    """Return the median time of a few launches, in milliseconds."""
    launch = run(candidate)
    for _ in range(WARM_UPS):
        launch()
    flush = larger_than_the_cache(device).zero_ if cold else lambda: None
    clock: _Clock = _on_a_gpu if device.type == "cuda" else _on_the_cpu
    return sorted(clock(launch, device, flush) for _ in range(REPEATS))[REPEATS // 2]


def larger_than_the_cache(device: torch.device) -> torch.Tensor:
    """Return memory that takes the place of all else in the last cache once it is written."""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        known = "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names
        size = (os.sysconf("SC_LEVEL3_CACHE_SIZE") if known else 0) or UNKNOWN_CACHE
    return torch.empty(2 * max(size, 1), dtype=torch.uint8, device=device)


def _on_a_gpu(launch: Launch, device: torch.device, flush: Callable[[], object]) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        flush()
        start.record()
        launch()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end))


def _on_the_cpu(launch: Launch, _: torch.device, flush: Callable[[], object]) -> float:
    flush()
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1000


# ------------------------------------------------------------------ arguments


def arguments_for(
    tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments to measure a call with: those that `inputs` of `.tune` returns.

    Without `inputs`, those of the call, in which each tensor that the op changes is a copy. The
    others need none: a launch only reads them. Raises DeclarationError; LaunchError if memory is
    short.
    """
    if tuned.tuning.inputs:
        return _made(tuned, tuned.tuning.inputs, args, kwargs)
    copies: dict[int, torch.Tensor] = {}
    with _room_for("the arguments that the op changes", "give `.tune`"):
        for position, name in tuned.signature.changed:
            copied(kwargs[name] if name in kwargs else args[position], copies)
    replaced: tuple[Sequence[Any], Mapping[str, Any]] = tree_map_only(
        torch.Tensor, lambda tensor: copies.get(id(tensor), tensor), (args, kwargs)
    )
    return replaced


def copies_for(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return copies of a Triton kernel's arguments, since Triton does not tell which it changes.

    Raises LaunchError if memory is short.
    """
    with _room_for("the arguments of the kernel", "list its configurations by `.tune`, with"):
        return tuple(copied(args, {}))


@contextlib.contextmanager
def _room_for(what: str, remedy: str) -> Iterator[None]:
    """Raise LaunchError with a remedy if memory is short in a block that copies tensors."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise LaunchError(
            f"no memory is left to copy {what}, on which configurations are measured: {remedy} a "
            "function `inputs=` that makes smaller ones"
        ) from e


def _made(
    tuned: Tuned, inputs: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return what `inputs` makes for a call; the state of Torch's random numbers stays."""
    signature = tuned.signature
    before = signature.in_order(args, dict(kwargs))
    with torch.random.fork_rng(devices={t.device for t in tensors_in(before) if t.is_cuda}):
        made = inputs(*args, **kwargs)
    made = made if isinstance(made, tuple) else (made,)
    what = f"{defined_at(inputs)}`inputs` must return the arguments to measure with, as a tuple"
    if problem := signature.misfit(made):
        raise DeclarationError(f"{what}: {problem}")
    given = signature.complete(*signature.split(made))
    for argument, old, new in zip(signature.arguments, before, signature.in_order(*given)):
        if _class_of(old) != _class_of(new):
            raise DeclarationError(
                f"{what}: `{argument.name}` is {_class_of(old)} in the call, and it returned "
                f"{_class_of(new)}"
            )
    return given


def _class_of(value: Any) -> str:
    """Return what an argument must share with its substitute."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} on {value.device}"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a number" if type(value) in (int, float) else f"a {type(value).__name__}"


def copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a value with its tensors copied, strides and alignment kept.

    copies: the copies by the ids of their tensors, so that a tensor given twice is copied once.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = copy_of(value)
        return copies[id(value)]
    return [copied(item, copies) for item in value] if isinstance(value, (list, tuple)) else value


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides and the alignment of the tensor."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
    span = span if tensor.numel() else 0
    offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
    memory = torch.empty(offset + span, dtype=tensor.dtype, device=tensor.device)
    memory[offset:].copy_(tensor.detach().as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), offset)
