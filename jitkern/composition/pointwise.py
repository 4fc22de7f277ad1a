"""`pointwise`: one formula in Python, and with it a kernel, its gradient and its compositions."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch

from jitkern.composition import (
    functions as _functions,  # noqa: F401  of Torch, for symbols
    registration,
    triton_functions,
)
from jitkern.composition.definition import SAMPLED, FormulaParameter
from jitkern.composition.expression import INPUT, inputs_of, node, plain
from jitkern.composition.function import KINDS, OF_KIND, Pointwise, place_of
from jitkern.composition.symbol import Element, named
from jitkern.errors import DeclarationError
from jitkern.op.op import Result
from jitkern.source.dtypes import codes_of_torch

_ANNOTATED = KINDS | {kind: kind for kind in KINDS.values()}


def compose(*parts: Any) -> Any:
    """Compose several functions into one: `compose(f, g)` is `f >> g`, f runs first.

    parts: pointwise functions, or `@triton.jit` functions of values, of which an op is made.

    Raises TypeError or DeclarationError for parts that do not fit.
    """
    place = place_of(sys._getframe(1))
    if parts and all(hasattr(part, "fn") for part in parts):
        return triton_functions.composed(parts, place)
    if not parts or not all(isinstance(part, Pointwise) for part in parts):
        raise TypeError(
            f"compose() takes pointwise functions, or `@triton.jit` functions, got {parts!r:.200}"
        )
    return functools.reduce(lambda first, then: first.followed_by(then, place), parts)


@overload
def pointwise(
    function: Callable[..., Result],
    /,
    *,
    samples: Callable[[str], Iterator[Any]] | None = ...,
    dtypes: Sequence[torch.dtype] = ...,
) -> Pointwise[Result]: ...


@overload
def pointwise(
    *,
    samples: Callable[[str], Iterator[Any]] | None = ...,
    dtypes: Sequence[torch.dtype] = ...,
) -> Callable[[Callable[..., Result]], Pointwise[Result]]: ...


def pointwise(
    function: Any = None,
    /,
    *,
    samples: Callable[[str], Iterator[Any]] | None = None,
    dtypes: Sequence[torch.dtype] = SAMPLED,
) -> Any:
    """Make a kernel of a function of single elements, written in plain PyTorch.

    The function runs once, on symbols. Its parameters are tensors. Those annotated `float`, `int`
    or `bool`, or with such a default, are numbers: other values need no other kernel.

    samples: `f(device)` yields argument tuples for tests and prewarm; by default tensors of
        `dtypes`.
    Raises DeclarationError or TypeError for a function that cannot be followed.
    """
    codes = codes_of_torch()
    for unknown in [dtype for dtype in dtypes if dtype not in [*codes]]:
        raise DeclarationError(
            f"pointwise(dtypes=[{unknown!r}]): they are dtypes of Torch that kernels know, as "
            f"{', '.join(map(str, codes))}"
        )
    if function is None:
        return functools.partial(_traced, samples=samples, dtypes=dtypes)
    return _traced(function, samples=samples, dtypes=dtypes)


def _traced(function: Callable[..., Any], *, samples: Any, dtypes: Any) -> Pointwise:
    code = getattr(function, "__code__", None)
    if code is None:
        raise DeclarationError(f"pointwise takes a Python function, got {function!r:.200}")
    name = function.__name__ if function.__name__.isidentifier() else "formula"  # of a lambda
    given = inspect.signature(function).parameters.values()
    parameters = [_parameter(name, p) for p in given]
    symbols = [Element(node(INPUT, value=(i, p.kind))) for i, p in enumerate(parameters)]
    keywords = {p.name: symbol for p, symbol in zip(given, symbols) if p.kind == p.KEYWORD_ONLY}
    with named([parameter.name for parameter in parameters]):
        result = function(*symbols[: len(symbols) - len(keywords)], **keywords)
    if isinstance(result, (tuple, list)) and len(result) == 1:
        kind = type(result).__name__
        raise DeclarationError(f"{name}: an op returns no {kind} of one: return the value itself")
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for output in outputs or [None]:
        known = isinstance(output, Element) and inputs_of(output.node)
        if not known or all(parameters[i].kind != "tensor" for i in inputs_of(output.node)):
            raise DeclarationError(
                f"{name}: a pointwise function returns values that depend on its tensors, got "
                f"{output!r:.80}"
            )
    made = Pointwise(
        name, [output.node for output in outputs], parameters, module=function.__module__ or "",
        place=(code.co_filename, code.co_firstlineno), function=function,
        samples=samples, dtypes=dtypes,
    )  # fmt: skip
    registration.announce(made)
    return made


def _parameter(function: str, parameter: inspect.Parameter) -> FormulaParameter:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise DeclarationError(f"{function}: a pointwise function takes no *{parameter.name}")
    default = None if parameter.default is parameter.empty else plain(parameter.default)
    kind = _ANNOTATED.get(parameter.annotation) or KINDS.get(type(default), "tensor")
    if default is not None and (kind == "tensor" or type(default) not in KINDS):
        raise DeclarationError(
            f"{function}: the parameter `{parameter.name}` has the default {default!r:.80}, which "
            "is not a number"
        )
    if default is not None and type(default) is not OF_KIND[kind]:
        own = OF_KIND[kind](default) if math.isfinite(default) else default
        if own != default or type(own) is not OF_KIND[kind]:
            raise DeclarationError(
                f"{function}: the parameter `{parameter.name}` is annotated {kind} and has the "
                f"default {default!r:.80}, which is no {kind}: annotate it "
                f"{type(default).__name__}, or change the default"
            )
        default = own
    return FormulaParameter(parameter.name, kind, default)
