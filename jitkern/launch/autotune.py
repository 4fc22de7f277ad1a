"""Choose among the configurations of `@triton.autotune` or `.tune`, once per device model.

The choice is measured on the device (`measure`) and published like any artifact: keyed by the
source, the configurations, the values of the key, the dtypes and the device's name. A process that
finds a published choice measures nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jitkern import config, jit, launch, source as source_room
from jitkern.cache import records
from jitkern.cache.entry import Entry
from jitkern.cache.key import Key, label_of
from jitkern.errors import CacheError, DeclarationError, JitkernError, LaunchError, defined_at
from jitkern.launch.symbols import concrete
from jitkern.launch.tuned import Launch, Tuned, model_of
from jitkern.named_tuple import NamedTuple
from jitkern.source.closure import closure_of
from jitkern.source.dtypes import codes_of_torch
from jitkern.source.key import source_inputs
from jitkern.source.kinds import Source
from jitkern.source.triton_decorators import TritonConfig, TritonFunction
from jitkern.target import Target

TuningKey = tuple[tuple[str, Any], ...]
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.SymBool, torch.SymInt, torch.SymFloat)
_log = logging.getLogger(__name__)


class Question(NamedTuple):
    """The question that a choice answers: which configuration is the quickest in a situation.

    function: of a Triton source, or "" where `.tune` lists the configurations.
    """

    function: str
    configs: Sequence[Any]
    situation: TuningKey

    def __str__(self) -> str:
        return f"`{self.function}`" if self.function else "its launch function"


class Choice(NamedTuple):
    """A configuration, and the device model that it was chosen on.

    model: "" for a single configuration; None if no configuration was measured.
    """

    config: Any
    model: str | None


# ------------------------------------------------------------------ configurations and situations


def tuning_key_of(declared: TritonFunction, named: dict[str, Any]) -> TuningKey:
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


def question_of(
    source: Source, function: str, declared: TritonFunction, named: dict[str, Any]
) -> Question:
    """Return what a choice of a Triton function answers: among which configurations, for what.

    Each process asks `prune_configs_by`, so no choice is one that it leaves out now. Raises what
    the author's functions raise.
    """
    configs = declared.configs
    if declared.pruned and len(configs) > 1:
        functions = launch.declared.functions_for(source, function)
        left = source_room.triton_decorators.remaining(functions, named)
        configs = tuple(configs[number] for number in left)
    return Question(function, configs, tuning_key_of(declared, named))


def configs_of(
    tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], ...]:
    """Return the configurations that `.tune` lists for a call. Raises DeclarationError."""
    result = tuned.tuning.configurations(*args, **kwargs)
    listed: list[Any] = (
        [] if result is None else [result] if isinstance(result, str) else list(result)
    )
    wrong: list[Any] = [config for config in listed if not isinstance(config, Mapping)]
    configs = [] if wrong else [{n: concrete(v) for n, v in config.items()} for config in listed]
    wrong += [v for config in configs for v in config.values() if not isinstance(v, _CONSTANTS)]
    if wrong or not listed:
        raise DeclarationError(
            f"{defined_at(tuned.tuning.configurations)}`.tune` must list configurations, each a "
            "dict of bools, numbers, strings and dtypes, and gave "
            + (f"`{wrong[0]!r}`" if wrong else "none")
        )
    return tuple(configs)


def tuning_key_of_call(tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TuningKey:
    """Return what a choice of `.tune` is for: dtypes, the value of its key (guarded), `cold`."""
    arguments = (*args, *(value for _, value in sorted(kwargs.items())))
    dtypes = tuple(
        ",".join(sorted({codes_of_torch().get(dtype, str(dtype)) for dtype in found}))
        for value in arguments
        if (found := _dtypes_of(value))
    )
    situation: TuningKey = (("dtypes", dtypes),)
    tuning = tuned.tuning
    if tuning.key is not None:
        situation += (("key", _key_value(tuning.key, tuning.key(*args, **kwargs))),)
    return (*situation, ("cold", True)) if tuning.cold else situation


def _dtypes_of(value: Any) -> Sequence[torch.dtype]:
    """Return the dtypes of a tensor or of a list of tensors."""
    if isinstance(value, torch.Tensor):
        return (value.dtype,)
    if not isinstance(value, (list, tuple)):
        return ()
    traced: Sequence[torch.dtype] | None = getattr(value, "dtypes", None)
    return traced or [item.dtype for item in value if isinstance(item, torch.Tensor)]


def _key_value(key: Callable[..., Any], value: Any) -> Any:
    value = concrete(value)
    if isinstance(value, (tuple, list)):
        return tuple(_key_value(key, item) for item in value)
    if value is not None and not isinstance(value, _CONSTANTS):
        raise DeclarationError(
            f"{defined_at(key)}`key` must return numbers, bools, strings or tuples of them, and "
            f"returned a {type(value).__name__}"
        )
    return value


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
        return not jit.download.fetch(key, op, source.seconds)
    except CacheError:  # nothing can be written
        return False


def published(
    op: str, source: Source, target: Target, model: str, question: Question
) -> Choice | None:
    """Return the cached choice for a device model; a single configuration needs none."""
    if len(question.configs) == 1:
        return Choice(question.configs[0], "")
    return _kept(_key(op, source, target, model, question), question, model)


def _kept(key: Key, question: Question, model: str) -> Choice | None:
    number = records.read(jit.open_cache(), key, lambda content: _number(content, question.configs))
    return None if number is None else Choice(question.configs[number], model)


def choose(
    op: str, source: Source, target: Target, device: torch.device, question: Question,
    run: Callable[[Any], Launch], *, cold: bool = False,
) -> Choice:  # fmt: skip
    """Return the configuration to use: the one published for this model, else the quickest now.

    run: makes a launch of a configuration. cold: whether each run begins with a cache without its
    data. Where nothing may be compiled or measured, takes the first configuration, and says so.
    Raises LaunchError where none runs, with the error of the first; that error itself if the launch
    function raised it.
    """
    configs, situation = question.configs, question.situation
    if len(configs) == 1:
        return Choice(configs[0], "")
    model = model_of(device)
    key = _key(op, source, target, model, question)
    choice = _kept(key, question, model)
    if choice is None and _brought(key, op, source):
        choice = _kept(key, question, model)
    if choice:
        return choice
    if not may_measure():
        _log.warning(
            "%s: no tuned configuration of %s for %s; using the first. Call the op once with "
            "compiling allowed to tune it", op, question, dict(situation),
        )  # fmt: skip
        return Choice(configs[0], None)
    results = launch.measure.measured(configs, device, run, cold=cold)
    times = [result.milliseconds for result in results]
    best = times.index(min(times))
    if times[best] == float("inf"):
        problem = next((result.problem for result in results if result.problem), None)
        if problem and not isinstance(problem, JitkernError):
            raise problem  # an error that the launch function itself raises for its arguments
        why = f": {problem}" if problem else ""
        raise LaunchError(
            f"{op}: none of the {len(configs)} configurations of {question} runs{why}"
        ) from problem
    report = {
        "choice": best,
        "configs": _spelled(configs, source),
        "milliseconds": [t if 0 < t < 1e9 else None for t in times],
        "reasons": [result.reason for result in results],
        "model": model,
        "situation": {name: repr(value) for name, value in situation},
    }
    records.write(jit.open_cache(), key, report, {"name": "autotune", "version": "1"})
    return _kept(key, question, model) or Choice(configs[best], model)


def choices_of(op: str, source: Source, target: Target) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Yield each choice that the cache keeps for an op: the entry, and its content."""
    place = str(target.for_device_code())
    label = label_of(op, "choice", place)
    for entry in records.every(jit.open_cache(), "choice", op, place, label):
        if entry.manifest.inputs.get("source", {}).get("kind") == source.kind:
            with contextlib.suppress(ValueError):
                content = records.content_of(entry)
                if isinstance(content, dict) and isinstance(content.get("model"), str):
                    yield entry, content


def _key(op: str, source: Source, target: Target, model: str, question: Question) -> Key:
    function, configs, situation = question
    inputs = {
        **source_inputs(source, closure_of(source)), "flags": list(source.flags),
        "function": function, "model": model, "configs": _spelled(configs, source),
        "situation": {name: repr(value) for name, value in situation},
    }  # fmt: skip
    place = str(target.for_device_code())
    label = label_of(op, f"choice.{function}" if function else "choice", place)
    return records.record_key("choice", op, place, label, inputs)


def _spelled(configs: Sequence[Any], source: Source) -> list[str]:
    """Return a text of each configuration that is the same in each process."""

    def plain(config: Any) -> Any:
        if not isinstance(config, TritonConfig):
            return config
        pairs = ((n, source_room.constants.encoded(v, source)) for n, v in config.constexprs)
        return config._replace(constexprs=tuple(pairs))

    return [repr(plain(config)) for config in configs]


def _number(content: Any, configs: Sequence[Any]) -> int:
    """Return the number in a record. Raises ValueError if no configuration has it."""
    number = content.get("choice") if isinstance(content, dict) else None
    if type(number) is not int or not 0 <= number < len(configs):
        raise ValueError("it names no configuration")
    return number
