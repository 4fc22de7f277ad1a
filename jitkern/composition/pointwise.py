"""`pointwise`: one formula in Python, and with it a kernel, its gradient and its compositions."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch

from jitkern.composition import (
    expression,
    functions as _functions,  # noqa: F401  of Torch, for symbols
    kernels,
    registration,
)
from jitkern.composition.backward import Backward
from jitkern.composition.expression import (
    CONST,
    INPUT,
    FormulaParameter,
    Node,
    canonical,
    inputs_of,
    node,
    plain,
    replaced,
    with_reciprocals,
)
from jitkern.composition.reference import evaluated
from jitkern.composition.symbol import Element, named
from jitkern.errors import DeclarationError
from jitkern.op.op import Op
from jitkern.source.dtypes import DTYPES, codes_of_torch

_KINDS: dict[Any, str] = {float: "float", int: "int", bool: "bool"}
_OF_KIND: dict[str, Any] = {name: kind for kind, name in _KINDS.items()}
_ANNOTATED = _KINDS | {kind: kind for kind in _KINDS.values()}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_KNOWN = _TENSORS.union(_KINDS)
_is_compiling = torch.compiler.is_compiling
_SAMPLED = (torch.bfloat16, torch.float16, torch.float32)


class Pointwise:
    """A function of single elements: called with tensors, it is one kernel.

    It promotes, broadcasts and keeps strides as Torch does, computes in float32 (float64 for
    float64) and rounds once. `f >> g` is g of f's outputs in one kernel: they are g's first
    arguments, and what else g takes becomes arguments of the composition, after f's.
    """

    def __init__(
        self,
        name: str,
        outputs: Sequence[Node],
        parameters: Sequence[FormulaParameter],
        *,
        module: str,
        place: tuple[str, int],
        eager: bool = False,
        results: Sequence[str] = (),
        likes: Sequence[int] = (),
        function: Callable[..., Any] | None = None,
        samples: Callable[[str], Iterator[Any]] | None = None,
        dtypes: Sequence[torch.dtype] = _SAMPLED,
    ) -> None:
        self.name, self.parameters = name, tuple(parameters)
        self.outputs = with_reciprocals(outputs) if eager else tuple(outputs)
        self.module, self.place, self.eager, self.function = module, place, eager, function
        self.results = tuple(results) or ("",) * len(self.outputs)
        self.likes = tuple(likes) or (-1,) * len(self.outputs)
        self.samples, self.dtypes = samples, tuple(dtypes)
        self.tensors = [i for i, p in enumerate(self.parameters) if p.kind == "tensor"]
        self.least = _least(self.parameters)
        self._op: Op | None = None
        self._derived: dict[Any, Pointwise] = {}
        self.__name__ = self.__qualname__ = name
        self.__module__ = module
        self.__doc__ = inspect.getdoc(function) if function else None

    @property
    def identity(self) -> tuple[Any, ...]:
        """All that tells the op of this function from others of its name."""
        parameters = [tuple(parameter) for parameter in self.parameters]
        return canonical(self.outputs), parameters, self.eager, self.results, self.likes

    @property
    def op(self) -> Op:
        """The registered op, which is declared when it is first asked for."""
        if self._op is None:
            self._op = registration.declared(self)
        return self._op

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if named or len(args) < self.least:
            args = self._bound(args, named)
        if _is_compiling():
            return self._traced(args)
        if not _TENSORS.issuperset(map(type, args)):
            if not _KNOWN.issuperset(map(type, args)):
                args = tuple(plain(arg, operand=i in self.tensors) for i, arg in enumerate(args))
            if self._misplaced(args):
                return self._of_numbers(args)(*args)
        return (self._op or self.op)(*args)

    def _misplaced(self, args: Sequence[Any]) -> bool:
        """Whether a number stands where the function has a tensor."""
        return any(i < len(args) and type(args[i]) in _KINDS for i in self.tensors)

    def _traced(self, args: Sequence[Any]) -> Any:
        """Do what a call does, in steps that Dynamo can follow."""
        for i in self.tensors:
            if i < len(args) and type(args[i]) in _KINDS:
                return self._of_numbers(args)(*args)
        assert self._is_declared()
        return self._op.overload(*args)  # type: ignore[union-attr]

    def _is_declared(self) -> bool:
        """Declare the op while Dynamo traces a call: it runs this as it stands, for a constant."""
        return self.op is not None

    _is_declared._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __rshift__(self, then: Any) -> Any:
        return _joined(self, then, place_of(sys._getframe(1)))

    def __rrshift__(self, first: Any) -> Any:
        return _joined(first, self, place_of(sys._getframe(1)))

    def __repr__(self) -> str:
        names = [parameter.name for parameter in self.parameters]
        return f"<pointwise {self.name}({', '.join(names)}) = {', '.join(self.formulas())}>"

    def __deepcopy__(self, _: Any) -> Pointwise:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function as the name that its module has for it."""
        module = sys.modules.get(self.module)
        for name, value in vars(module).items() if module else ():
            if value is self:
                return _named, (self.module, name)
        raise DeclarationError(
            f"{self.name}: a pointwise function is pickled by its name, and the module "
            f"`{self.module}` has no name for it: assign the function to a name there"
        )

    def formulas(self) -> list[str]:
        """Return the formula of each output, for people."""
        names = [parameter.name for parameter in self.parameters]
        return [expression.spelled(output, names) for output in self.outputs]

    def source(self, device: str = "cuda", dtypes: Any = None) -> str:
        """Return the text of the kernels for "cuda" or "cpu".

        dtypes: dtypes of the tensors, as `"bf16,f32"` or a list of Torch's; the text then begins
        with the template arguments of a call with tensors of these dtypes.
        """
        text = registration.text_of(self, device)
        if dtypes is None:
            return text
        listed: list[Any] = dtypes.split(",") if isinstance(dtypes, str) else list(dtypes)
        listed = [
            getattr(torch, DTYPES[d.strip()].torch) if isinstance(d, str) else d for d in listed
        ]
        if len(listed) != len(self.tensors):
            raise ValueError(
                f"{self.name} takes {len(self.tensors)} tensors, got {len(listed)} dtypes"
            )
        codes = codes_of_torch()
        template = registration.template_of(self, listed)
        return f"// {', '.join(f'{name} = {codes[d]}' for name, d in template.items())}\n{text}"

    def in_torch(self, /, *args: Any, **named: Any) -> Any:
        """Compute with Torch, operation by operation, as the function is written."""
        found = evaluated(self.outputs, self._bound(args, named))
        return found[0] if len(found) == 1 else tuple(found)

    def bytes(self, /, *args: Any, **named: Any) -> int:
        """Return the bytes that a call must move: each element of an operand and a result once."""
        return self.cost(*self._bound(args, named))[0]

    def cost(self, *args: Any) -> tuple[int, int]:
        """Return the bytes that a call must move, and how many operations it computes."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        result = self.op.declaration.fake(*[_meta(a) for a in args])  # type: ignore[misc]
        results = result if isinstance(result, tuple) else (result,)
        read = {(t.data_ptr(), t.shape, t.stride()): _distinct(t) for t in tensors}
        steps = [one for one in expression.ordered(self.outputs) if one.args]
        return (
            sum(read.values()) + sum(int(r.nbytes) for r in results),
            len(steps) * max(int(r.numel()) for r in results),
        )

    def _bound(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in order, with defaults. Raises TypeError as a call does."""
        return expression.bound(self.name, [p.named for p in self.parameters], args, named)

    def _of_numbers(self, args: Sequence[Any]) -> Pointwise:
        """Return the function whose parameters are numbers where these arguments are."""
        given = [type(args[i]) if i < len(args) else None for i in self.tensors]
        kinds = tuple([_KINDS.get(kind, "") for kind in given])
        if all(kinds):
            raise TypeError(f"{self.name}() takes tensors, and got numbers alone")
        assert self._is_derived(kinds)
        return self._derived[kinds]

    def _is_derived(self, kinds: tuple[str, ...]) -> bool:
        """Make the function that has numbers of these kinds, or "", in place of its tensors."""
        if kinds not in self._derived:
            changed = {i: kind for i, kind in zip(self.tensors, kinds) if kind}
            values = {i: node(INPUT, value=(i, kind)) for i, kind in changed.items()}
            parameters = [
                p._replace(kind=changed.get(i, p.kind)) for i, p in enumerate(self.parameters)
            ]
            likes = [-1 if like in changed else like for like in self.likes]
            outputs = replaced(self.outputs, values)
            self._derived[kinds] = self.like(self.name, outputs, parameters, likes=likes)
        return True

    _is_derived._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as _is_declared

    def like(
        self,
        name: str,
        outputs: Sequence[Node],
        parameters: Sequence[FormulaParameter],
        **rest: Any,
    ) -> Pointwise:
        own = {"eager": self.eager, "results": self.results, "likes": self.likes, **rest}
        return Pointwise(
            name, outputs, parameters, module=self.module, place=self.place, dtypes=self.dtypes,
            function=self.function, **own,
        )  # fmt: skip

    # ------------------------------------------------------------------ gradients

    def grad(self, wrt: Any = None) -> Pointwise:
        """Return the function of the gradients: of the outputs' gradients, then the arguments used.

        wrt: names of tensor arguments, or one; by default all that have a gradient.
        """
        names = [wrt] if isinstance(wrt, str) else wrt
        known = {self.parameters[i].name: i for i in self.tensors}
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise ValueError(
                f"{self.name} has no tensor argument `{unknown[0]}`: {', '.join(known)}"
            )
        found = self.gradient.expressions([known[name] for name in names or known])
        found = {i: one for i, one in found.items() if one.op != CONST}
        missing = [name for name in names or () if known[name] not in found]
        if missing or not found:
            raise ValueError(
                f"{self.name} has no derivative but zero by {', '.join(missing) or 'any argument'}"
            )
        return self.gradient.function_of(found)

    def gradients(self) -> list[Pointwise]:
        """Return the functions that the backward of the op calls."""
        return self.gradient.functions()

    @functools.cached_property
    def gradient(self) -> Backward:
        """The gradients of the function by its arguments."""
        return Backward(self)


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _distinct(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor, those of an expanded dimension once."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride()) if step or not size)
    return int(math.prod(sizes)) * tensor.element_size()


def place_of(frame: Any) -> tuple[str, str, int]:
    """Return the module, the file and the line that a frame runs."""
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename, frame.f_lineno


def composed(first: Pointwise, then: Pointwise, place: tuple[str, str, int]) -> Pointwise:
    """Return `then` of the outputs of `first`. Raises TypeError if they do not fit."""
    count, expected = len(first.outputs), len(then.parameters)
    fed = then.parameters[:count]
    if count > expected or any(parameter.kind != "tensor" for parameter in fed):
        names = ", ".join(f"{p.name}: {p.kind}" for p in then.parameters)
        raise TypeError(
            f"{first.name} >> {then.name}: {first.name} gives {count} value{'s' * (count > 1)}, "
            f"and {then.name} takes ({names}): its first arguments must be tensors for them"
        )
    if first.eager != then.eager:
        raise TypeError(
            f"{first.name} >> {then.name}: one rounds once and the other as eager does; declare "
            "both with the same round="
        )
    offset = len(first.parameters)
    values = dict(enumerate(first.outputs))
    taken = {parameter.name for parameter in first.parameters}
    parameters = [*first.parameters]
    for i, parameter in enumerate(then.parameters[count:], count):
        values[i] = node(INPUT, value=(offset + i - count, parameter.kind))
        parameters.append(parameter._replace(name=numbered(parameter.name, taken)))
    return _announced(
        Pointwise(
            f"{first.name}_{then.name}",
            replaced(then.outputs, values),
            _ordered(parameters),
            module=place[0],
            place=place[1:],
            eager=first.eager,
            results=then.results,
            dtypes=first.dtypes,
        )
    )


def _ordered(parameters: Sequence[FormulaParameter]) -> list[FormulaParameter]:
    """Return the parameters, without defaults before one that has none."""
    found: list[FormulaParameter] = []
    required = False
    for parameter in reversed(parameters):
        required = required or parameter.default is None
        found.append(parameter._replace(default=None) if required else parameter)
    return found[::-1]


def numbered(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is taken, and take it."""
    number = 0
    own = name
    while own in taken:
        number += 1
        own = f"{name}_{number}"
    taken.add(own)
    return own


def _announced(function: Pointwise) -> Pointwise:
    registration.announce(function)
    return function


def _joined(first: Any, then: Any, place: tuple[str, str, int]) -> Any:
    """Return `first >> then`, of pointwise functions, and of ops whose kernels take them."""
    if isinstance(first, Pointwise) and isinstance(then, Pointwise):
        return composed(first, then, place)
    if not all(isinstance(p, (Pointwise, Op, kernels.fused.Fused)) for p in (first, then)):
        return NotImplemented
    return kernels.fused.joined(first, then, place)


def compose(*parts: Any) -> Any:
    """Return one function of several: `compose(f, g)` is `f >> g`, f first.

    parts: pointwise functions, and an op whose kernel takes them around it, if any (see
        docs/pointwise.md); or `@triton.jit` functions of values, of which an op is made.

    Raises TypeError or DeclarationError for parts that do not fit.
    """
    place = place_of(sys._getframe(1))
    if parts and all(hasattr(part, "fn") for part in parts):
        return kernels.triton_functions.composed(parts, place)
    known = all(isinstance(p, (Pointwise, Op, kernels.fused.Fused)) for p in parts)
    if not parts or not known:
        raise TypeError(
            f"compose() takes pointwise functions and ops, or `@triton.jit` functions, got "
            f"{parts!r:.200}"
        )
    return functools.reduce(lambda first, then: _joined(first, then, place), parts)


@overload
def pointwise(function: Callable[..., Any], /) -> Pointwise: ...


@overload
def pointwise(
    *,
    round: str = ...,
    samples: Callable[[str], Iterator[Any]] | None = ...,
    dtypes: Sequence[torch.dtype] = ...,
) -> Callable[[Callable[..., Any]], Pointwise]: ...


def pointwise(
    function: Any = None,
    /,
    *,
    round: str = "once",  # noqa: A002  as the issue and the docs call it
    samples: Callable[[str], Iterator[Any]] | None = None,
    dtypes: Sequence[torch.dtype] = _SAMPLED,
) -> Any:
    """Make a kernel of a function of single elements, written in plain PyTorch.

    The function runs once, on symbols. Its parameters are tensors, but those annotated `float`,
    `int` or `bool`, or with such a default, which are numbers: other values need no other kernel.

    round: "once", at the end; or "eager", to the dtype of each operation's result, as PyTorch does.
    samples: `f(device)` yields argument tuples for tests and prewarm; by default tensors of
        `dtypes`.
    Raises DeclarationError or TypeError for a function that cannot be followed.
    """
    if round not in ("once", "eager"):
        raise DeclarationError(f"pointwise(round={round!r}): it is 'once' or 'eager'")
    if function is None:
        return functools.partial(_traced, eager=round == "eager", samples=samples, dtypes=dtypes)
    return _traced(function, eager=round == "eager", samples=samples, dtypes=dtypes)


def _traced(function: Callable[..., Any], *, eager: bool, samples: Any, dtypes: Any) -> Pointwise:
    code = getattr(function, "__code__", None)
    if code is None:
        raise DeclarationError(f"pointwise takes a Python function, got {function!r:.200}")
    name = function.__name__ if function.__name__.isidentifier() else "formula"  # of a lambda
    parameters = [_parameter(name, p) for p in inspect.signature(function).parameters.values()]
    symbols = [Element(node(INPUT, value=(i, p.kind))) for i, p in enumerate(parameters)]
    keywords = {
        p.name: symbol
        for p, symbol in zip(inspect.signature(function).parameters.values(), symbols)
        if p.kind == p.KEYWORD_ONLY
    }
    with named([parameter.name for parameter in parameters]):
        result = function(*symbols[: len(symbols) - len(keywords)], **keywords)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for output in outputs or [None]:
        known = isinstance(output, Element) and inputs_of(output.node)
        if not known or all(parameters[i].kind != "tensor" for i in inputs_of(output.node)):
            raise DeclarationError(
                f"{name}: a pointwise function returns values that depend on its tensors, got "
                f"{output!r:.80}"
            )
    return _announced(
        Pointwise(
            name,
            [output.node for output in outputs],
            parameters,
            module=function.__module__ or "",
            place=(code.co_filename, code.co_firstlineno),
            eager=eager,
            function=function,
            samples=samples,
            dtypes=dtypes,
        )
    )


def _parameter(function: str, parameter: inspect.Parameter) -> FormulaParameter:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise DeclarationError(f"{function}: a pointwise function takes no *{parameter.name}")
    default = None if parameter.default is parameter.empty else plain(parameter.default)
    kind = _ANNOTATED.get(parameter.annotation) or _KINDS.get(type(default), "tensor")
    if default is not None and (kind == "tensor" or type(default) not in _KINDS):
        raise DeclarationError(
            f"{function}: the parameter `{parameter.name}` has the default {default!r:.80}, which "
            "is no number"
        )
    if default is not None and type(default) is not _OF_KIND[kind]:
        own = _OF_KIND[kind](default) if math.isfinite(default) else default
        if own != default or type(own) is not _OF_KIND[kind]:
            raise DeclarationError(
                f"{function}: the parameter `{parameter.name}` is annotated {kind} and has the "
                f"default {default!r:.80}, which is no {kind}: annotate it "
                f"{type(default).__name__}, or change the default"
            )
        default = own
    return FormulaParameter(parameter.name, kind, default)


def _least(parameters: Sequence[FormulaParameter]) -> int:
    """Return how many arguments the op needs: schemas have no default of infinity or NaN."""
    found = 0
    for i, parameter in enumerate(parameters, 1):
        if parameter.default is None or not math.isfinite(parameter.default):
            found = i
    return found
