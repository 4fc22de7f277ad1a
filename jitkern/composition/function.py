"""A pointwise function: the op that it is, its gradient, and its calls."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Generic

import torch

from jitkern.composition import expression, registration
from jitkern.composition.backward import Backward
from jitkern.composition.definition import Definition, FormulaParameter, bound, numbered
from jitkern.composition.expression import CONST, INPUT, node, plain, replaced
from jitkern.composition.reference import evaluated
from jitkern.errors import DeclarationError
from jitkern.op.declaration import DEVICES
from jitkern.op.op import Op, Result
from jitkern.source.dtypes import codes_of_torch

KINDS: dict[Any, str] = {float: "float", int: "int", bool: "bool"}
OF_KIND: dict[str, Any] = {"tensor": torch.Tensor, **{name: kind for kind, name in KINDS.items()}}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_KNOWN = _TENSORS.union(KINDS)
_EITHER_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_is_compiling = torch.compiler.is_compiling
Place = tuple[str, str, int]  # the module, the file and the line


class Pointwise(Definition, Generic[Result]):
    """A function of single elements: called with tensors, it is one kernel.

    It promotes, broadcasts and keeps strides as Torch does, computes in float32 (float64 for
    float64) and rounds once. `f >> g` applies g to f's outputs in one kernel. They are g's first
    arguments. The other arguments of g follow f's arguments in the composition.
    """

    def __init__(self, name: str, *formula: Any, **rest: Any) -> None:
        super().__init__(name, *formula, **rest)
        self._op: Op[Result] | None = None
        self._derived: dict[Any, Pointwise] = {}
        self.__name__ = self.__qualname__ = name
        self.__module__ = self.module
        self.__doc__ = inspect.getdoc(self.function) if self.function else None
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    p.name, _EITHER_WAY, default=p.named[1], annotation=OF_KIND[p.kind]
                )
                for p in _ordered(self.parameters)
            ]
        )

    @property
    def op(self) -> Op[Result]:
        """The registered op, declared at its first use."""
        if self._op is None:
            self._op = registration.op_of(self, self.gradient, self.cost)
        return self._op

    def __call__(self, /, *args: Any, **named: Any) -> Result:
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
        """Whether a number is passed where the function has a tensor."""
        return any(i < len(args) and type(args[i]) in KINDS for i in self.tensors)

    def _traced(self, args: Sequence[Any]) -> Result:
        """Do what a call does, in steps that Dynamo can follow."""
        if self._misplaced(args):
            return self._of_numbers(args)(*args)
        assert self._is_declared()
        return self._op.overload(*args)  # type: ignore[union-attr, no-any-return]

    def _is_declared(self) -> bool:
        """Declare the op while Dynamo traces a call: it runs this as it stands, for a constant."""
        return self.op is not None

    _is_declared._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        names = [parameter.name for parameter in self.parameters]
        return f"<pointwise {self.name}({', '.join(names)}) = {', '.join(self.formulas())}>"

    def __deepcopy__(self, _: Any) -> Pointwise:
        return self

    def __reduce__(self) -> str:
        """Pickle the function as the name that its module has for it."""
        module = sys.modules.get(self.module)
        for name, value in vars(module).items() if module else ():
            if value is self:
                return name
        raise DeclarationError(
            f"{self.name}: a pointwise function is pickled by its name, and the module "
            f"`{self.module}` has no name for it: assign the function to a name there"
        )

    def source(self, device: str = "cuda", dtypes: Any = None) -> str:
        """Return the text of the kernels for "cuda" or "cpu".

        dtypes: dtypes of the tensors, as `"bf16,f32"` or a list of Torch's; the text then begins
            with the template arguments of a call with tensors of these dtypes.
        """
        if device not in DEVICES:
            raise DeclarationError(f"source({device!r:.80}): it is 'cuda' or 'cpu'")
        text = registration.text_of(self, device)
        if dtypes is None:
            return text
        listed: list[Any] = dtypes.split(",") if isinstance(dtypes, str) else list(dtypes)
        codes = codes_of_torch()
        named = {code: dtype for dtype, code in codes.items()}
        listed = [named.get(d.strip(), d) if isinstance(d, str) else d for d in listed]
        for unknown in [d for d in listed if d not in [*codes]]:
            raise DeclarationError(
                f"source(): no kernel knows `{unknown}`; dtypes are {', '.join(named)}"
            )
        if len(listed) != len(self.tensors):
            raise ValueError(
                f"{self.name} takes {len(self.tensors)} tensors, got {len(listed)} dtypes"
            )
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
        metas = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
        result = self.op.declaration.fake(*metas)  # type: ignore[misc]
        results = result if isinstance(result, tuple) else (result,)
        read = {(t.data_ptr(), t.shape, t.stride()): _distinct(t) for t in tensors}
        steps = [one for one in expression.ordered(self.outputs) if one.args]
        return (
            sum(read.values()) + sum(int(r.nbytes) for r in results),
            len(steps) * max(int(r.numel()) for r in results),
        )

    def _bound(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in order, with defaults. Raises TypeError as a call does."""
        return bound(self.name, [p.named for p in self.parameters], args, named)

    def _of_numbers(self, args: Sequence[Any]) -> Pointwise[Result]:
        """Specialise the function for arguments that are Python numbers."""
        given = [type(args[i]) if i < len(args) else None for i in self.tensors]
        kinds = tuple([KINDS.get(kind, "") for kind in given])
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
                f"{self.name} has no tensor argument `{unknown[0]}`; it has: {', '.join(known)}"
            )
        found = self.gradient.expressions([known[name] for name in names or known])
        found = {i: one for i, one in found.items() if one.op != CONST}
        missing = [name for name in names or () if known[name] not in found]
        if missing or not found:
            raise ValueError(
                f"{self.name} has no derivative but zero by {', '.join(missing) or 'any argument'}"
            )
        return self.gradient.function_of(found)[0]

    @functools.cached_property
    def gradient(self) -> Backward[Pointwise]:
        """The gradients of the function by its arguments."""
        return Backward(self)

    # ------------------------------------------------------------------ composition

    def __rshift__(self, then: Any) -> Any:
        if not isinstance(then, Pointwise):
            return NotImplemented
        return self.followed_by(then, place_of(sys._getframe(1)))

    def followed_by(self, then: Pointwise, place: Place) -> Pointwise:
        """Return `then` of the outputs of this function. Raises TypeError if they do not fit."""
        count, expected = len(self.outputs), len(then.parameters)
        fed = then.parameters[:count]
        if count > expected or any(parameter.kind != "tensor" for parameter in fed):
            names = ", ".join(f"{p.name}: {p.kind}" for p in then.parameters)
            raise TypeError(
                f"{self.name} >> {then.name}: {self.name} gives {count} value{'s' * (count > 1)}, "
                f"and {then.name} takes ({names}): its first arguments must be tensors for them"
            )
        offset = len(self.parameters)
        values = dict(enumerate(self.outputs))
        taken = {parameter.name for parameter in self.parameters}
        parameters = [*self.parameters]
        for i, parameter in enumerate(then.parameters[count:], count):
            values[i] = node(INPUT, value=(offset + i - count, parameter.kind))
            parameters.append(parameter._replace(name=numbered(parameter.name, taken)))
        made = type(self)(
            f"{self.name}_{then.name}", replaced(then.outputs, values), _ordered(parameters),
            module=place[0], place=place[1:], results=then.results,
            dtypes=self.dtypes,
        )  # fmt: skip
        registration.announce(made)
        return made


def _distinct(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor, those of an expanded dimension once."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride()) if step or not size)
    return int(math.prod(sizes)) * tensor.element_size()


def place_of(frame: Any) -> Place:
    """Return the module, the file and the line that a frame runs."""
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename, frame.f_lineno


def _ordered(parameters: Sequence[FormulaParameter]) -> list[FormulaParameter]:
    """Return the parameters, without defaults before one that has none."""
    found: list[FormulaParameter] = []
    required = False
    for parameter in reversed(parameters):
        required = required or parameter.default is None
        found.append(parameter._replace(default=None) if required else parameter)
    return found[::-1]
