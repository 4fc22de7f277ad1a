"""Choose among the configurations of `@triton.autotune` or `.tune`, once per device model.

The choice is measured on the device, on copies of the arguments, and published like any artifact:
keyed by the source, the configurations, the values of the key, the dtypes and the device's name. A
process that finds a published choice measures nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jitkern import config, jit
from jitkern.cache import facts
from jitkern.cache.entry import Entry
from jitkern.cache.key import Key
from jitkern.errors import (
    CacheError,
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    LaunchError,
    TargetError,
)
from jitkern.launch.arguments import ALIGNMENT
from jitkern.launch.symbols import concrete
from jitkern.launch.tuned import Tuned, model_of
from jitkern.named_tuple import NamedTuple
from jitkern.source.closure import closure_of
from jitkern.source.dtypes import codes_of_torch
from jitkern.source.kinds import Source
from jitkern.source.triton_text import Function
from jitkern.source.variant_key import label_of, source_inputs
from jitkern.target import Target

WARM_UPS, REPEATS = 3, 10
AHEAD = 1_000_000  # cycles that a GPU is kept busy, so that the time of Python is not measured
Situation = tuple[tuple[str, Any], ...]
Launch = Callable[[], object]
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.SymBool, torch.SymInt, torch.SymFloat)
_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The number of a configuration, and the device model that it was chosen on.

    model: "" for a single configuration; None if no configuration was measured.
    """

    number: int
    model: str | None


# ------------------------------------------------------------------ configurations and situations


def situation_of(declared: Function, named: dict[str, Any]) -> Situation:
    """Return what a choice of a Triton function is for: values of its key, and dtypes (guarded)."""
    values = [(name, concrete(named[name])) for name in declared.key if name in named]
    dtypes = [
        (name, codes_of_torch().get(value.dtype, ""))
        for name, value in named.items()
        if isinstance(value, torch.Tensor)
    ]
    return (
        *((name, value) for name, value in values if not isinstance(value, torch.Tensor)),
        *dtypes,
    )


def configs_of(
    tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], ...]:
    """Return the configurations that `.tune` lists for a call. Raises DeclarationError."""
    result = tuned.configurations(*args, **kwargs)
    listed: list[Any] = (
        [] if result is None else [result] if isinstance(result, str) else list(result)
    )
    wrong: list[Any] = [config for config in listed if not isinstance(config, Mapping)]
    configs = [] if wrong else [{n: concrete(v) for n, v in config.items()} for config in listed]
    wrong += [v for config in configs for v in config.values() if not isinstance(v, _CONSTANTS)]
    if wrong or not listed:
        raise DeclarationError(
            f"{_place(tuned.configurations)} must list configurations, each a dict of bools, "
            f"numbers, strings and dtypes, and gave {f'`{wrong[0]!r}`' if wrong else 'none'}"
        )
    return tuple(configs)


def situation_of_call(tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Situation:
    """Return what a choice of `.tune` is for: dtypes, and the value of its key (guarded)."""
    arguments = (*args, *(value for _, value in sorted(kwargs.items())))
    dtypes = tuple(
        codes_of_torch().get(value.dtype, str(value.dtype))
        for value in arguments
        if isinstance(value, torch.Tensor)
    )
    if tuned.key is None:
        return (("dtypes", dtypes),)
    return ("dtypes", dtypes), ("key", _key_value(tuned, tuned.key(*args, **kwargs)))


def _key_value(tuned: Tuned, value: Any) -> Any:
    value = concrete(value)
    if isinstance(value, (tuple, list)):
        return tuple(_key_value(tuned, item) for item in value)
    if value is not None and not isinstance(value, _CONSTANTS):
        raise DeclarationError(
            f"{_place(tuned.key)} must return numbers, bools, strings or tuples of them, and "
            f"returned a {type(value).__name__}"
        )
    return value


def _place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


# ------------------------------------------------------------------ choices in the cache


def may_measure() -> bool:
    """Whether configurations may be measured now; otherwise a call takes the first one."""
    return config.current().compile == "auto" and not jit.capturing()


def _brought(key: Key, op: str, source: Source) -> bool:
    """Return whether a remote had the choice, where a call may wait for that."""
    settings = config.current()
    if not settings.remotes or settings.compile == "background" or jit.capturing():
        return False
    try:
        return not jit.download.brought(key, op, source.kind)
    except CacheError:  # nothing can be written
        return False


def published(
    op: str, source: Source, function: str, target: Target, model: str,
    configs: Sequence[Any], situation: Situation,
) -> Choice | None:  # fmt: skip
    """The choice that the cache keeps for a device model; of one configuration there is none."""
    if len(configs) == 1:
        return Choice(0, "")
    key = _key(op, source, function, target, model, configs, situation)
    number = facts.read(jit.open_cache(), key, lambda entry: _number(entry, configs))
    return None if number is None else Choice(number, model)


def choose(
    op: str, source: Source, function: str, target: Target, device: torch.device,
    configs: Sequence[Any], situation: Situation, run: Callable[[Any], Launch],
) -> Choice:  # fmt: skip
    """The configuration to use: the one published for this device model, else the quickest now.

    function: of a Triton source, or "" where `.tune` lists the configurations.
    run: makes a launch of a configuration on copies of the arguments. Raises LaunchError where none
    works; where nothing may be compiled or measured, takes the first, and says so.
    """
    model = model_of(device)
    if choice := published(op, source, function, target, model, configs, situation):
        return choice
    key = _key(op, source, function, target, model, configs, situation)
    if _brought(key, op, source) and (
        choice := published(op, source, function, target, model, configs, situation)
    ):
        return choice
    what = f"`{function}`" if function else "its launch function"
    if not may_measure():
        _log.warning(
            "%s: no tuned configuration of %s for %s; using the first. Call the op once with "
            "compiling allowed to tune it", op, what, dict(situation),
        )  # fmt: skip
        return Choice(0, None)
    times, problems = _measured(configs, device, run)
    best = min(range(len(configs)), key=times.__getitem__)
    if times[best] == float("inf"):
        if problems and not isinstance(problems[0], JitkernError):
            raise problems[0]  # an error that the launch function itself raises for its arguments
        why = f": {problems[-1]}" if problems else ""
        raise LaunchError(f"{op}: none of the {len(configs)} configurations of {what} runs{why}")
    report = {
        "choice": best,
        "configs": list(map(repr, configs)),
        "milliseconds": [t if t < 1e9 else None for t in times],
        "model": model,
        "situation": {name: repr(value) for name, value in situation},
    }
    facts.write(jit.open_cache(), key, report, {"name": "autotune", "version": "1"})
    return published(op, source, function, target, model, configs, situation) or Choice(best, model)


def choices_of(op: str, source: Source, target: Target) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Yield each choice that the cache keeps for an op: the entry, and its content."""
    place, label = str(target.for_device_code()), label_of(op, "choice")
    for entry in facts.every(jit.open_cache(), "choice", op, place, label):
        if entry.manifest.inputs["source"]["kind"] == source.kind:
            with contextlib.suppress(OSError, ValueError):
                yield entry, facts.content_of(entry)


def _key(
    op: str, source: Source, function: str, target: Target, model: str,
    configs: Sequence[Any], situation: Situation,
) -> Key:  # fmt: skip
    inputs = {
        **source_inputs(source, closure_of(source)), "flags": list(source.flags),
        "function": function, "model": model, "configs": list(map(repr, configs)),
        "situation": {name: repr(value) for name, value in situation},
    }  # fmt: skip
    label = label_of(op, f"choice.{function}" if function else "choice")
    return facts.key_of("choice", op, str(target.for_device_code()), label, inputs)


def _number(entry: Entry, configs: Sequence[Any]) -> int:
    """Return the number that an entry holds. Raises ValueError if no configuration has it."""
    content = facts.content_of(entry)
    number = content.get("choice") if isinstance(content, dict) else None
    if type(number) is not int or not 0 <= number < len(configs):
        raise ValueError("it names no configuration")
    return number


# ------------------------------------------------------------------ measuring


def _measured(
    configs: Sequence[Any], device: torch.device, run: Callable[[Any], Launch]
) -> tuple[list[float], list[RuntimeError]]:
    """Return the milliseconds of each configuration, infinite if it fails, and the errors."""
    times, problems = [], []
    for candidate in configs:
        try:
            times.append(_milliseconds(run, candidate, device))
        except (CompilerNotFound, TargetError, CacheError):
            raise  # no configuration can be compiled
        except RuntimeError as e:
            _log.info("leaving out configuration %s, which does not run: %s", candidate, e)
            problems.append(e)
            times.append(float("inf"))
    return times, problems


def _milliseconds(run: Callable[[Any], Launch], candidate: Any, device: torch.device) -> float:
    """Return the median time of a few launches, in milliseconds."""
    launch = run(candidate)
    for _ in range(WARM_UPS):
        launch()
    clock = _on_a_gpu if device.type == "cuda" else _on_the_cpu
    return sorted(clock(launch, device) for _ in range(REPEATS))[REPEATS // 2]


def _on_a_gpu(launch: Launch, device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        start.record()
        launch()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end))


def _on_the_cpu(launch: Launch, _: torch.device) -> float:
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1000


def copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a value with its tensors copied, strides and alignment kept.

    copies: the copies by the ids of their tensors, so that a tensor given twice is copied once.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = _copy(value)
        return copies[id(value)]
    return [copied(item, copies) for item in value] if isinstance(value, (list, tuple)) else value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
    span = span if tensor.numel() else 0
    offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
    memory = torch.empty(offset + span, dtype=tensor.dtype, device=tensor.device)
    memory[offset:].copy_(tensor.detach().as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), offset)
