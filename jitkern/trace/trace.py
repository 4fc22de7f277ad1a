"""Run a launch function once, with tensors and numbers that stand for those of later calls.

Its comparisons become guards, its allocations and launches become actions, and both together make a
stub (`stub_text.py`). A construct that C cannot follow is Unsupported, with the line, and the op
keeps its Python launcher. All that it reads besides its arguments is a `World`, also guarded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.calls.signature import Parameter, Signature
from jitkern.errors import CacheError, CompilerNotFound, LoadError, TargetError, raised_at
from jitkern.launch.geometry import Compiled
from jitkern.launch.kernels import Kernels
from jitkern.launch.symbols import Frozen, Statement, Unsupported, line_in, running
from jitkern.launch.tuned import parts_of
from jitkern.named_tuple import NamedTuple
from jitkern.trace import shim
from jitkern.trace.lists import TensorList
from jitkern.trace.recorder import Provider, Recorder, described, recording
from jitkern.trace.seen import traceable
from jitkern.trace.world import World, world_of

_LISTS = frozenset("LVndzNDZsS")  # kinds of lists and strings, see `runtime.c`
_KEYWORDS = frozenset((
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else",
    "enum", "extern", "float", "for", "goto", "if", "inline", "int", "long", "register", "restrict",
    "return", "short", "signed", "sizeof", "static", "struct", "switch", "typedef", "union",
    "unsigned", "void", "volatile", "while", "api", "call", "failed", "odd", "owned", "p", "stub",
))  # fmt: skip


@functools.cache
def identifier(name: str) -> str:
    """Return the name of an argument in C."""
    taken = re.fullmatch(r"[amvy]\d+|(table|words)\d+|item\d+_\d+", name) or name in _KEYWORDS
    return f"{name}_" if taken or re.search(rf"\b{name}\b", shim()) else name


class Traced(NamedTuple):
    """The trace of a launch function: all that its stub is made of.

    tensors: C names of the arguments that are tensors, by position. owned: how many tensors it
    makes. kernels: the variants it launches. frozen: the values it holds for constant. model: the
    device model whose choice of a configuration it follows; "" if there was nothing to choose,
    None if no configuration was measured. world: the values that it read besides its arguments.
    """

    tensors: list[tuple[int, str]]
    facts: list[Statement]
    actions: list[Statement]
    owned: int
    kernels: list[Compiled]
    frozen: list[Frozen]
    model: str | None
    world: World


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
    world = world_of(parts_of(function))
    if refusal := world.refusal or world.handler:
        raise Unsupported(refusal)
    if world.compares and world.tensors:
        raise Unsupported(world.compares)
    recorder = Recorder(device, kernels_of, line_in(code))
    outer = running.facts, running.problem
    running.facts, running.problem = recorder.facts, None
    try:
        proxies, tensors = _arguments(
            recorder, parameters, described(args), compares=bool(world.compares)
        )
        named = {p.name: proxy for p, proxy in zip(parameters, proxies)}
        with recording(recorder):
            result = traceable(function, world)(
                Kernels(recorder.start, recorder.choose, recorder),
                *(proxy for name, proxy in named.items() if name not in keywords),
                **{name: proxy for name, proxy in named.items() if name in keywords},
            )
        recorder.finish(result, signature.results)
        if running.problem:  # a function that was called has caught the error
            raise running.problem  # noqa: TRY301
    except (CompilerNotFound, TargetError, CacheError, LoadError):
        raise  # a kernel is not available now
    except Exception as e:
        raise Unsupported(f"{raised_at(e, function)}{_reason_of(e)}") from e
    finally:
        running.facts, running.problem = outer
    return Traced(
        tensors,
        recorder.facts.statements,
        recorder.actions,
        len(recorder.owned),
        recorder.kernels,
        recorder.facts.frozen,
        recorder.model,
        world,
    )


def _identical(a: str, b: str) -> str:
    return f"{a}->handle && {b}->handle && *(void **){a}->handle == *(void **){b}->handle"


def _arguments(
    recorder: Recorder, parameters: Sequence[Parameter], args: Sequence[Any], *, compares: bool
) -> tuple[list[Any], list[tuple[int, str]]]:
    """Return the proxies of the arguments, and the C names of the tensors among them.

    compares: whether the launch function asks which arguments are one object, so that guards must.
    """
    proxies: list[Any] = []
    tensors = []
    for i, (parameter, value) in enumerate(zip(parameters, args)):
        name, kind = identifier(parameter.name), parameter.kind
        stored = f"call->values[{i}]"
        if kind in _LISTS:
            if compares and kind in "LV" and value:
                raise Unsupported("`is` cannot be traced beside a list of tensors")
            proxies.append(_list(recorder, parameter, i, value))
            continue
        if kind in "TtWw":
            tensors.append((i, name))
            twin = next((j for j, other in enumerate(args[:i]) if other is value), None)
            if value is not None and twin is not None and compares:
                recorder.facts.guard(_identical(identifier(parameters[twin].name), name))
                proxies.append(proxies[twin])
                continue
            for j, other in tensors[:-1]:
                if compares and args[j] is not None and value is not None:
                    recorder.facts.guard(f"!({_identical(other, name)})")
            if value is None:
                recorder.facts.guard(f"!{name}->handle")
                proxies.append(None)
            else:
                proxies.append(recorder.tensor(name, parameter.name, value))
            continue
        proxies.append(_number(recorder, parameter, stored, value))
    return proxies, tensors


def _number(recorder: Recorder, parameter: Parameter, stored: str, value: Any) -> Any:
    """Return what stands for a number, a bool or None, `stored` in C."""
    kind = parameter.kind
    if kind.isupper():
        recorder.facts.guard(f"{'!' if value is None else ''}{stored}")
        stored = f"*(const u64 *){stored}"
    if value is None:
        return None
    if kind in "bB":  # a real bool: `is` and `not` cannot be intercepted
        recorder.facts.guard(f"({stored} & 255) == {int(value)}")
        return value
    text = f"real({stored})" if kind in "fF" else f"(i64){stored}"
    number = float(value) if kind in "fF" else int(value)
    name = recorder.facts.value(type(number), text, identifier(parameter.name))
    return recorder.symbol(name, number, f"`{parameter.name}`")


def _list(recorder: Recorder, parameter: Parameter, place: int, value: Any) -> Any:
    """Return what stands for a list or a string; strings, bools and lengths are guarded."""
    given, facts, name = f"call->lists[{place}]", recorder.facts, parameter.name
    if parameter.kind in "LV":
        return TensorList(recorder, place, name, value)
    if value is None:
        facts.guard(f"{given}.count < 0")
        return None
    if isinstance(value, str):
        text = value.encode()
        letters = "".join(f"\\{byte:03o}" for byte in text)
        facts.guard(f'spells(&{given}, "{letters}", {len(text)})')
        return value
    facts.guard(f"{given}.count == {len(value)}")
    items: list[Any] = []
    for i, item in enumerate(value):
        stored, label = f"{given}.values[{i}]", f"`{name}[{i}]`"
        if parameter.kind in "zZ":
            facts.guard(f"({stored} & 255) == {int(item)}")
            items.append(item)
        elif parameter.kind in "dD":
            items.append(recorder.symbol(facts.value(float, f"real({stored})"), float(item), label))
        else:
            items.append(recorder.symbol(facts.value(int, f"(i64){stored}"), int(item), label))
    return items


def _reason_of(e: BaseException) -> str:
    return str(e) if isinstance(e, Unsupported) else f"tracing raised {type(e).__name__}: {e}"
