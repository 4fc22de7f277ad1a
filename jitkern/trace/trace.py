"""Trace a launch function: run it once with proxies of tensors and numbers.

Its comparisons become guards, its allocations and launches become actions, and both together make a
program (`program.py`). A construct that C cannot follow is Unsupported, with the line, and the op
stays on the Python launcher. All that it reads besides its arguments is a `Scope`, also guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.calls.signature import Parameter, Signature, example_of, fixed_of
from jitkern.errors import CacheError, CompilerNotFound, LoadError, TargetError, error_site
from jitkern.launch.geometry import Compiled
from jitkern.launch.kernels import Kernels
from jitkern.launch.symbols import READS, Instruction, Specialized, Unsupported, line_in, running
from jitkern.launch.tuned import parts_of
from jitkern.named_tuple import NamedTuple
from jitkern.trace.lists import TensorList
from jitkern.trace.program import REGISTERS, Program, encoded, operands_of
from jitkern.trace.scope import Scope, scope_of
from jitkern.trace.stand_ins import traceable
from jitkern.trace.tensor_proxy import recording
from jitkern.trace.tracer import Provider, Tracer, metadata_of

_LISTS = frozenset("LVndzNDZsS")  # kinds of lists and strings, see `runtime.c`


class Traced(NamedTuple):
    """The trace of a launch function.

    steps: those of the program. kernels: the variants it launches. frozen: the values it holds for
    constant. model: the device model whose choice of a configuration it follows; "" if there was
    nothing to choose, None if no configuration was measured. scope: the values that it read besides
    its arguments. fixed, example: of its arguments, see `calls.signature`.
    """

    program: Program
    steps: list[Instruction]
    kernels: list[Compiled]
    frozen: list[Specialized]
    model: str | None
    scope: Scope
    fixed: str
    example: str


def trace(
    signature: Signature,
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: frozenset[str],
    device: torch.device,
    kernels_of: Provider,
) -> Traced:
    """Trace `function(k, *args)`, for any arguments that satisfy the same guards.

    args: real tensors (or meta tensors that stand for some on `device`) and numbers, by position.
    keywords: names of the arguments that are passed by name.
    Raises Unsupported, with the line.
    """
    assert signature.parameters is not None
    parameters = signature.parameters
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    scope = scope_of(parts_of(function))
    if refusal := scope.refusal or scope.handler:
        raise Unsupported(refusal)
    if scope.compares and scope.tensors:
        raise Unsupported(scope.compares)
    tracer = Tracer(device, kernels_of, line_in(code), len(parameters))
    outer = running.facts, running.problem
    running.facts, running.problem = tracer.facts, None
    try:
        proxies = _arguments(tracer, parameters, metadata_of(args), compares=bool(scope.compares))
        named = {p.name: proxy for p, proxy in zip(parameters, proxies)}
        with recording(tracer):
            result = traceable(function, scope)(
                Kernels(tracer.start, tracer.choose, tracer),
                *(proxy for name, proxy in named.items() if name not in keywords),
                **{name: proxy for name, proxy in named.items() if name in keywords},
            )
        tracer.finish(result, signature.results)
        if running.problem:  # a function that was called has caught the error
            raise running.problem  # noqa: TRY301
    except (CompilerNotFound, TargetError, CacheError, LoadError):
        raise  # a kernel is not available now
    except Exception as e:
        raise Unsupported(f"{error_site(e, function)}{_reason_of(e)}") from e
    finally:
        running.facts, running.problem = outer
    steps = _needed([*tracer.facts.instructions, *tracer.actions])
    program = encoded(steps, [*tracer.facts.constants], [*tracer.texts], tracer.memory)
    frozen, fixed, example = tracer.facts.frozen, fixed_of(args), example_of(args)
    return Traced(program, steps, tracer.kernels, frozen, tracer.model, scope, fixed, example)


def _needed(steps: Sequence[Instruction]) -> list[Instruction]:
    """Return the steps without the reads whose value nothing uses."""
    used: set[int] = set()
    kept = []
    for step in reversed(steps):
        if step.name not in READS or step.operands[0] in used:
            used.update(operand for kind, operand in operands_of(step) if kind in REGISTERS)
            kept.append(step)
    return kept[::-1]


def _arguments(
    tracer: Tracer, parameters: Sequence[Parameter], args: Sequence[Any], *, compares: bool
) -> list[Any]:
    """Return the proxies of the arguments.

    compares: whether the launch function asks which arguments are one object, so that guards must.
    """
    proxies: list[Any] = []
    tensors: list[int] = []
    for i, (parameter, value) in enumerate(zip(parameters, args)):
        if parameter.kind in _LISTS:
            if compares and parameter.kind in "LV" and value:
                raise Unsupported("`is` cannot be traced beside a list of tensors")
            proxies.append(_list(tracer, parameter, i, value))
            continue
        if parameter.kind not in "TtWw":
            proxies.append(_number(tracer, parameter, i, value))
            continue
        tensors.append(i)
        if value is None:
            tracer.facts.guard("NO_TENSOR", i)
            proxies.append(None)
            continue
        twin = next((j for j, other in enumerate(args[:i]) if other is value), None)
        if twin is not None and compares:
            tracer.facts.guard("IDENTICAL", twin, i, 1)
            proxies.append(proxies[twin])
            continue
        for j in tensors[:-1]:
            if compares and args[j] is not None:
                tracer.facts.guard("IDENTICAL", j, i, 0)
        changes = parameter.kind in "Ww"
        proxies.append(tracer.tensor(i, parameter.name, value, changes=changes))
    return proxies


def _number(tracer: Tracer, parameter: Parameter, place: int, value: Any) -> Any:
    """Return the stand-in for a number, a bool or None."""
    kind, facts = parameter.kind, tracer.facts
    if kind.isupper():
        facts.guard("GIVEN", place, int(value is not None))
    if value is None:
        return None
    at = facts.value("OPTIONAL" if kind.isupper() else "NUMBER", place)
    if kind in "bB":  # a real bool: `is` and `not` cannot be intercepted
        facts.guard("TRUTH", at, int(value))
        return value
    number = float(value) if kind in "fF" else int(value)
    return tracer.symbol(at, number, f"`{parameter.name}`")


def _list(tracer: Tracer, parameter: Parameter, place: int, value: Any) -> Any:
    """Return the stand-in for a list or a string; strings, bools and lengths are guarded."""
    facts, name = tracer.facts, parameter.name
    if parameter.kind in "LV":
        return TensorList(tracer, place, name, value, changes=parameter.kind == "V")
    if isinstance(value, str):
        value.encode()  # or this raises
        facts.guard("SPELLS", place, tracer.text(value))
        return value
    count = -1 if value is None else len(value)
    facts.guard("EQUAL", facts.value("COUNT", place), facts.constant(count), 1)
    if value is None:
        return None
    items: list[Any] = []
    for i, item in enumerate(value):
        at, label = facts.value("ITEM", place, i), f"`{name}[{i}]`"
        if parameter.kind in "zZ":
            facts.guard("TRUTH", at, int(item))
            items.append(item)
        else:
            kind = float if parameter.kind in "dD" else int
            items.append(tracer.symbol(at, kind(item), label))
    return items


def _reason_of(e: BaseException) -> str:
    return str(e) if isinstance(e, Unsupported) else f"tracing raised {type(e).__name__}: {e}"
