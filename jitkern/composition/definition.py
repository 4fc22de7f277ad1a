"""A pointwise function as data: its formula, its parameters, and their names in an op."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern.composition import expression
from jitkern.composition.derivative import depending
from jitkern.composition.expression import Node
from jitkern.named_tuple import NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

REQUIRED: Any = inspect.Parameter.empty  # in place of a default, for none
SAMPLED = (torch.bfloat16, torch.float16, torch.float32)


class FormulaParameter(NamedTuple):
    """A parameter of a pointwise function; its kind is "tensor", "float", "int" or "bool"."""

    name: str
    kind: str
    default: Any = None  # no default

    @property
    def named(self) -> tuple[str, Any]:
        """The name and the default, as `bound` takes them."""
        return self.name, REQUIRED if self.default is None else self.default


class Definition:
    """The formula of each output, the parameters, and the place of the function.

    results: the names of the outputs, or "". likes: for each output the position of the argument
    that gives its dtype, or -1. least: how many arguments the op needs. defaults: of the others.
    """

    def __init__(
        self,
        name: str,
        outputs: Sequence[Node],
        parameters: Sequence[FormulaParameter],
        *,
        module: str,
        place: tuple[str, int],
        results: Sequence[str] = (),
        likes: Sequence[int] = (),
        function: Callable[..., Any] | None = None,
        samples: Callable[[str], Iterator[Any]] | None = None,
        dtypes: Sequence[torch.dtype] = SAMPLED,
    ) -> None:
        self.name, self.parameters = name, tuple(parameters)
        self.outputs = tuple(outputs)
        self.module, self.place, self.function = module, place, function
        self.results = tuple(results) or ("",) * len(self.outputs)
        self.likes = tuple(likes) or (-1,) * len(self.outputs)
        self.samples, self.dtypes = samples, tuple(dtypes)
        self.kinds = tuple(parameter.kind for parameter in self.parameters)
        self.tensors = tuple(i for i, kind in enumerate(self.kinds) if kind == "tensor")
        self.least = _least(self.parameters)
        self.defaults = tuple(parameter.default for parameter in self.parameters[self.least :])

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Compute the outputs of tensors and numbers."""
        raise NotImplementedError

    @property
    def identity(self) -> tuple[Any, ...]:
        """All that tells the op of this function from others of its name."""
        parameters = [tuple(parameter) for parameter in self.parameters]
        formulas = expression.canonical(self.outputs)
        return formulas, parameters, self.results, self.likes

    def like(
        self,
        name: str,
        outputs: Sequence[Node],
        parameters: Sequence[FormulaParameter],
        **rest: Any,
    ) -> Self:
        """Return another function of this place, by default with the same results."""
        own = {"results": self.results, "likes": self.likes, **rest}
        return type(self)(
            name, outputs, parameters, module=self.module, place=self.place, dtypes=self.dtypes,
            function=self.function, **own,
        )  # fmt: skip

    def formulas(self) -> list[str]:
        """Return the formula of each output, for people."""
        names = [parameter.name for parameter in self.parameters]
        return [expression.as_python(output, names) for output in self.outputs]

    @functools.cached_property
    def differentiable(self) -> list[bool]:
        """Whether each output depends on a tensor by way of operations with a derivative."""
        found = depending(expression.ordered(self.outputs), self.tensors)
        return [output in found for output in self.outputs]

    @functools.cached_property
    def result_names(self) -> list[str]:
        """The names that the results have for the backward of the op."""
        if len(self.results) == 1:
            return [self.results[0] or "out"]
        return [name or f"out{i}" for i, name in enumerate(self.results)]

    @functools.cached_property
    def gradient_names(self) -> list[str]:
        """The names that the gradients of the results have for the backward of the op."""
        alone, sole = len(self.results) == 1, sum(self.differentiable) == 1
        return [
            "grad" if alone or (sole and has_one) else f"grad_{name}"
            for name, has_one in zip(self.result_names, self.differentiable)
        ]

    @functools.cached_property
    def argument_names(self) -> list[str]:
        """The names that the parameters have in the schema of the op.

        They are ASCII, and none that a backward uses for something else, see
        `jitkern.op.gradient.Gradient`.
        """
        names = [parameter.name for parameter in self.parameters]
        taken = {"needs", *self.result_names, *self.gradient_names}
        taken.add("NoneType")  # a word of schemas
        free = {name for name in names if name.isascii()} - taken  # these keep their names
        others = [name if name.isascii() else f"x{i}" for i, name in enumerate(names)]
        return [n if n in free else numbered(o, taken | free) for n, o in zip(names, others)]


def _least(parameters: Sequence[FormulaParameter]) -> int:
    """Return how many arguments the op needs: schemas have no default of infinity or NaN."""
    found = 0
    for i, parameter in enumerate(parameters, 1):
        if parameter.default is None or not math.isfinite(parameter.default):
            found = i
    return found


def in_ascii(name: str) -> str:
    """Return a name for a formula, a parameter or a result that C++ and Torch accept."""
    return name if name.isascii() else "formula"


def numbered(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is taken, and take it."""
    numbers = itertools.count(1)
    own = name
    while own in taken:
        own = f"{name}_{next(numbers)}"
    taken.add(own)
    return own


def bound(
    name: str, parameters: Sequence[tuple[str, Any]], args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a function in order, with defaults.

    parameters: their names and defaults; REQUIRED for none. Raises TypeError as a call does.
    """
    values, more = [*args], {**named}
    for parameter, default in parameters[len(args) :]:
        values.append(more.pop(parameter, default))
        if values[-1] is REQUIRED:
            raise TypeError(f"{name}() misses the argument `{parameter}`")
    if more or len(values) > len(parameters):
        known = ", ".join(parameter for parameter, _ in parameters)
        by_name = f" and {', '.join(f'`{word}`' for word in more)} by name" if more else ""
        raise TypeError(f"{name}() takes ({known}), got {len(args)} by position{by_name}")
    return tuple(values)
