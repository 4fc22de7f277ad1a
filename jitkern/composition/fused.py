"""A pointwise function before or after a hand-written kernel: one kernel, and its gradient.

The kernel includes `epilogue.h`, which defines `EPILOGUE(value, row, column)`, and stores that of
each result; alone, it is the value. For `op >> f`, a header of that name is generated, found before
jitkern's own, and f's further arguments become parameters of the kernel. `prologue.h` and
`f >> op` are the same for the elements that a kernel loads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jitkern.calls.signature import Signature
from jitkern.composition import registration
from jitkern.composition.definition import (
    REQUIRED,
    Definition,
    FormulaParameter,
    bound,
    in_ascii,
    numbered,
)
from jitkern.composition.formula import CPP, CUDA, Language, formula_of
from jitkern.composition.helpers import helpers_for
from jitkern.composition.launch import HALVES
from jitkern.composition.promotion import NUMBER, kinds_of, program_of
from jitkern.declare import registered
from jitkern.errors import DeclarationError
from jitkern.launch.tuned import Tuning
from jitkern.op.declaration import Declaration
from jitkern.op.gradient import spec_of
from jitkern.op.op import OPS, Op
from jitkern.source import cpp_text, texts
from jitkern.source.kinds import Include, Source

if TYPE_CHECKING:
    from jitkern.composition.function import Place, Pointwise

_is_compiling = torch.compiler.is_compiling
_TYPES = {"tensor": "Tensor", "float": "float", "int": "int", "bool": "bool"}
_C = {"float": "double", "int": "long long", "bool": "bool"}
_LANGUAGES = {"nvrtc": CUDA, "cc": CPP}
_HEADER = """// {title}: written by jitkern
#pragma once
{headers}namespace jitkern_{which} {{
{names}{helpers}
{formula}
template <typename T, typename V> {function} applied({parameters}) {{
  V result;
  {call}
  return result;
}}
}}  // namespace jitkern_{which}
#define {macro}_PARAMETERS {declared}
#define {macro}(value, row, column) jitkern_{which}::applied<T>({given})
"""


class Fused:
    """An op whose kernel applies pointwise functions before and after: `f >> op >> g`.

    before, after: pointwise functions, or None. Their first argument is the value; the others are
    arguments of the composition: f's before those of the op, g's after them. Tensors among them
    have the dtype of the value, and hold one value, or one for each column, for each row or for
    each element of the op's first argument (f's) or of its result (g's).
    """

    def __init__(
        self, op: Op, before: Pointwise | None, after: Pointwise | None,
        place: Place,
    ) -> None:  # fmt: skip
        self.base, self.before, self.after = op, before, after
        self.module, *self._place = place
        parts = [before.name if before else "", op.__name__, after.name if after else ""]
        self.__name__ = self.name = "_".join(filter(None, parts))
        self._op: Op | None = None
        self._check()
        self._before = before.parameters if before else ()
        self._after = after.parameters[1:] if after else ()
        self.arguments = self._arguments()
        registration.announce(self)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if named or len(args) != len(self.arguments):
            arguments = [(name, default) for name, _, default in self.arguments]
            args = bound(self.name, arguments, args, named)
        if _is_compiling():
            assert self._is_declared()
            return self._op.overload(*args)  # type: ignore[union-attr]
        return self.op(*args)

    def _is_declared(self) -> bool:
        """Declare the op while Dynamo traces a call, as `Pointwise._is_declared` does."""
        return self.op is not None

    _is_declared._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        parts = [part for part in (self.before, self.base, self.after) if part]
        return f"<{' >> '.join(part.name for part in parts)}>"

    @property
    def op(self) -> Op:
        """The registered op, declared at its first use, and again after `base` was."""
        if self._op and self._is_current(self._op):
            return self._op
        parts = [part and part.identity for part in (self.before, self.after)]
        name = registration.qualified(self.module, self.name, (self.base.name, parts))
        self._op = registration.once(name, lambda: self._declare(name), self._is_current)
        return self._op

    def _is_current(self, op: Op) -> bool:
        """Whether an op was made of what the op inside is now."""
        made_of, base = op.execution, self.base
        return made_of[0] is base.declaration and made_of[1] is base.gradient

    def gradients(self) -> list[Pointwise]:
        """Return the functions that the backward calls, except the op and its backward."""
        return [g for part in (self.before, self.after) if part for g in part.gradients()]

    def _check(self) -> None:
        """Refuse functions and ops that cannot be composed. Raises TypeError."""
        own = self.base.overload._schema
        if [str(r.type) for r in own.returns] != ["Tensor"] or self.base.signature.changed:
            raise TypeError(
                f"{self!r}: a composition is of an op that returns one tensor and changes none"
            )
        if self.before and (not own.arguments or str(own.arguments[0].type) != "Tensor"):
            raise TypeError(f"{self!r}: the first argument of {self.base.name} must be a tensor")
        if any("List" in str(argument.type) for argument in own.arguments):
            raise TypeError(f"{self!r}: a composition is of an op without lists")
        for part in (self.before, self.after):
            if part and (part.eager or len(part.outputs) != 1 or 0 not in part.tensors):
                raise TypeError(
                    f"{self!r}: {part.name} must take a tensor first, return one, and round once"
                )

    # ------------------------------------------------------------------ the declaration

    def _arguments(self) -> list[tuple[str, str, Any]]:
        """Return name, type in the schema and default (or `REQUIRED`) of each argument."""
        schema = self.base.overload._schema.arguments[1 if self.before else 0 :]
        taken = {argument.name for argument in schema}
        own = [
            (a.name, _type_of(a), a.default_value if a.has_default_value() else REQUIRED)
            for a in schema
        ]
        before, after = (
            [(numbered(name, taken), _TYPES[p.kind], p.named[1]) for name, p in parameters]
            for parameters in (_named(self.before), _named(self.after)[1:])
        )
        return [*before, *own, *after]

    def _parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split arguments into those of the prologue, the op and the epilogue.

        Those that come from another part are missing.
        """
        first, end = len(self._before), len(self.arguments) - len(self._after)
        return [*values[:first]], [*values[first:end]], [*values[end:]]

    def _functions(self) -> list[tuple[str, Pointwise]]:
        """Return the macros of the headers to generate, with their functions."""
        every = (("PROLOGUE", self.before), ("EPILOGUE", self.after))
        return [(macro, function) for macro, function in every if function]

    def _declare(self, name: str) -> Op:
        declared, macros = self.base.declaration, [macro for macro, _ in self._functions()]
        sources = {device: self._sources(own) for device, own in declared.sources.items()}
        if not any(sources.values()):
            raise DeclarationError(
                f"{self!r}: no `.cu` or `.cpp` source of {self.base.name} uses "
                f"{' and '.join(macros)}: include `{macros[0].lower()}.h`, and use its macros"
            )
        for function in declared.launchers.values():
            known = inspect.signature(function).parameters
            for missing in {macro.lower() for macro in macros} - {*known}:
                raise DeclarationError(
                    f"{self!r}: the launch function of {self.base.name} has no parameter "
                    f"`{missing}`: write `{missing}=lambda like: ()`, and pass "
                    f"`*{missing}(tensor)` to the kernel last"
                )
        declaration = Declaration(
            sources, module=self.module, place=f"{self._place[0]}:{self._place[1]}: ",
            launchers={k: self._launcher(own) for k, own in declared.launchers.items()},
            tunings={k: self._tuning(own) for k, own in declared.tunings.items()},
            reference=self._reference if declared.reference else None,
            samples=self._samples if declared.samples else None,
        )  # fmt: skip
        schema = ", ".join(f"{kind} {argument}" for argument, kind, _ in self.arguments)
        op = OPS.get(name)
        if op:
            op.declare_again(declaration)
        else:
            op = registered(Signature(f"{name}({schema}) -> Tensor"), declaration)
        op.execution = declared, self.base.gradient
        if self.base.gradient:
            op.backward(self._backward())
        return op

    def _sources(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        """Return the sources that use the macros, with the generated headers before jitkern's."""
        found = []
        for source in sources:
            if source.kind not in _LANGUAGES:
                continue
            text = "".join(cpp_text.read(path) for path in source.paths)
            if all(f"{macro}(" in text for macro, _ in self._functions()):
                headers = [
                    (f"{macro.lower()}.h", _header(macro, function, _LANGUAGES[source.kind]))
                    for macro, function in self._functions()
                ]
                folders = [texts.folder_of({file: text}) for file, text in headers]
                # The folder is of this process, and named after the text, which the key needs.
                own = [Include(folder, version=Path(folder).name) for folder in folders]
                found.append(source.replace(include=(*own, *source.include)))
        return tuple(found)

    def _own_arguments(self) -> Callable[..., Any]:
        """Return a function for launch functions: the arguments of the op, of all arguments."""
        first, end = len(self._before), len(self.arguments) - len(self._after)
        has_before, arguments = self.before is not None, self.base.signature.arguments
        names = tuple(argument.name for argument in arguments if argument.kwarg_only)
        count = len(arguments) - len(names)

        def own(args: Any) -> tuple[Any, dict[str, Any]]:
            found = (args[0], *args[first:end]) if has_before else args[:end]
            named: dict[str, Any] = {}
            for name, value in zip(names, found[count:]):
                named = {**named, name: value}
            return found[:count], named

        return own

    def _launcher(self, function: Callable[..., Any]) -> Callable[..., Any]:
        first, end = len(self._before), len(self.arguments) - len(self._after)
        has_before, has_after = self.before is not None, self.after is not None
        before, after = (program_of(p.outputs) if p else () for p in (self.before, self.after))
        own = self._own_arguments()

        def launch(k: Any, *args: Any) -> Any:
            given, more = own(args)
            if has_before:
                more = {**more, "prologue": lambda like: operands(like, args[1:first], before)}
            if has_after:
                more = {**more, "epilogue": lambda like: operands(like, args[end:], after)}
            return function(k, *given, **more)

        return launch

    def _tuning(self, tuning: Tuning) -> Tuning:
        """Return what the `.tune` of the op declares, measured with the arguments of the call."""
        own = self._own_arguments()

        def of_call(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                given, named = own(args)
                return function(*given, **named)

            return call

        key = tuning.key and of_call(tuning.key)
        return tuning._replace(configurations=of_call(tuning.configurations), key=key, inputs=None)

    def _reference(self, *values: Any) -> Any:
        """Compute in float32 or more, as a kernel does, and round once."""
        before, own, after = self._parts([_widened(value) for value in values])
        if self.before:
            own = [self.before.op.run_reference(*before), *own]
        args, by_name = self.base.signature.split(own)
        out = self.base.run_reference(*args, **by_name)
        if self.after:
            out = self.after.op.run_reference(out, *after)
        dtype = values[0].dtype
        return out.to(dtype) if dtype in HALVES and out.dtype == torch.float32 else out

    def _samples(self, device: str) -> Iterator[tuple[Any, ...]]:
        """Yield the samples of the op, with a value for each column where a function takes more."""
        own = self.base.overload._schema.arguments
        for sample in self.base.each_sample(device):
            row = torch.ones(sample[0].shape[-1:], dtype=sample[0].dtype, device=device)
            further = {"tensor": row, "float": 0.5, "int": 1, "bool": True}
            complete = (*sample, *(a.default_value for a in own[len(sample) :]))
            before = (further[p.kind] for p in self._before[1:])
            yield (complete[0], *before, *complete[1:], *(further[p.kind] for p in self._after))

    def _backward(self) -> Callable[..., Any]:
        """Return the backward: that of each part, over values that are computed again."""
        base, before, after, gradient = self.base, self.before, self.after, self.base.gradient
        assert gradient
        names = [name for name, _, _ in self.arguments]
        tensors = [i for i, (_, kind, _) in enumerate(self.arguments) if kind.startswith("Tensor")]
        inputs = [argument.name for argument in base.signature.arguments]

        def backward(**known: Any) -> Any:
            first, own, last = self._parts([known[name] for name in names])
            need = dict(zip(tensors, known["needs"]))
            needs, own_needs, last_needs = (
                [need[i] for i in part if i in need] for part in self._parts(range(len(names)))
            )
            if before:
                own = [before.op(*first), *own]
                own_needs = [any(needs), *own_needs]
            args, by_name = base.signature.split(own)
            out, grad = base(*args, **by_name), known["grad"]
            of_first: Sequence[Any] = [None] * len(needs)
            of_own: Sequence[Any] = [None] * len(own_needs)
            of_last: Sequence[Any] = ()
            if after:
                every = [any(own_needs), *last_needs]
                grad, *of_last = _pulled_back(after, grad, [out, *last], every)
            if grad is not None:
                named = {**dict(zip(inputs, own)), base.signature.outputs[0]: out}
                of_own = gradient.backward(
                    (grad,), {name: named[name] for name in gradient.asked if name in named},
                    tuple(own_needs),
                    [spec_of(named[name]) for name in gradient.tensors], [spec_of(out)],
                )  # fmt: skip
            if before:
                through, *of_own = of_own
                if through is not None:
                    of_first = _pulled_back(before, through, first, needs)
            return (*of_first, *of_own, *of_last)

        keyword = inspect.Parameter.KEYWORD_ONLY
        asked = [inspect.Parameter(name, keyword) for name in ("grad", "needs", *names)]
        backward.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        return backward


def _named(function: Pointwise | None) -> list[tuple[str, FormulaParameter]]:
    """Return the parameters of a function, with their names in a schema."""
    return list(zip(function.argument_names, function.parameters)) if function else []


PARTS = Definition, Op, Fused  # of a composition


def joined(first: Any, then: Any, place: Place) -> Any:
    """Return `first >> then`, of pointwise functions, and of ops whose kernels take them.

    Raises TypeError for parts that do not fit.
    """
    if not all(isinstance(part, PARTS) for part in (first, then)):
        return NotImplemented
    of_formulas = [isinstance(part, Definition) for part in (first, then)]
    if all(of_formulas):
        return first.followed_by(then, place)
    if not any(of_formulas):
        raise TypeError(f"{first!r} >> {then!r}: one of them must be a pointwise function")
    kernel = then if of_formulas[0] else first
    base, before, after = (
        (kernel.base, kernel.before, kernel.after)
        if isinstance(kernel, Fused) else (kernel, None, None)
    )  # fmt: skip
    if kernel is first:
        after = after.followed_by(then, place) if after else then
    else:
        before = first.followed_by(before, place) if before else first
    return Fused(base, before, after, place)


def operands(like: Any, values: Sequence[Any], program: Sequence[Any]) -> tuple[Any, ...]:
    """Return the kernel arguments for a function's arguments other than the value.

    program: of the function, see `promotion`; all it computes with is of the value's kind, and its
    result of the value's dtype, since a kernel has no other.

    They are numbers as they are, and each tensor with its steps from row to row and from column to
    column of `like`, which is seen as a matrix of its last dimension. Launch functions call this.
    """
    found: list[Any] = []
    for value in values:
        found = [*found, *(_walked(like, value) if isinstance(value, torch.Tensor) else [value])]
    kinds = kinds_of(program, [like, *values])
    floating = like.dtype.is_floating_point
    torch._check(
        kinds[-1][0] == like.dtype
        and all(
            [  # noqa: C419  a trace follows no generator
                dtype == torch.bool or dtype.is_floating_point == floating or weight == NUMBER
                for dtype, weight in kinds
            ]
        ),
        lambda: (
            f"a function around a kernel computes in the dtype of the value, {like.dtype}, and "
            f"this one makes {kinds[-1][0]} of it or converts it on the way: call it by itself"
        ),
    )
    return tuple(found)


def _walked(like: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return a tensor, and its steps from row to row and from column to column of `like`."""
    torch._check(
        value.dtype == like.dtype and value.dim() <= like.dim(),
        lambda: (
            f"a tensor of {value.dtype} with {value.dim()} dimensions does not fit one of "
            f"{like.dtype} with {like.dim()}: convert it"
        ),
    )
    if value.dim() == 0:
        return value, 0, 0
    columns = value.shape[-1]
    torch._check(
        columns == 1 or columns == like.shape[-1],
        lambda: f"{columns} columns do not broadcast to {like.shape[-1]}",
    )
    if all([size == 1 for size in value.shape[:-1]]):  # noqa: C419  a trace follows no generator
        return value, 0, 0 if columns == 1 else value.stride(-1)
    return value.expand(*like.shape[:-1], columns).contiguous(), columns, 0 if columns == 1 else 1


def _pulled_back(
    function: Pointwise, grad: Any, values: Sequence[Any], needs: Sequence[bool]
) -> tuple[Any, ...]:
    """Return the gradients of a function's tensors, from that of its result."""
    own = function.gradient
    named = dict(zip(own.names, (grad, *values)))
    found: tuple[Any, ...] = own.of_op(needs=needs, **named)
    return tuple(
        None if g is None else g.sum_to_size(values[i].shape)
        for i, g in zip(function.tensors, found)
    )


def _header(macro: str, function: Pointwise, language: Language) -> str:
    """Return the header that defines the macros for a function."""
    which = macro.lower()
    inputs = [f"in{i}" for i in range(len(function.parameters))]
    formula = formula_of(in_ascii(function.name), function.outputs, inputs, ["result"], language)
    declared, given, taken, values = [], ["value"], ["V in0"], ["in0"]
    for i, parameter in enumerate(function.parameters[1:], 1):
        name = f"{which}_{i}"
        if parameter.kind == "tensor":
            declared += [f"const T* {name}", f"long long {name}_row", f"long long {name}_column"]
            given.append(f"{name}[(row) * {name}_row + (column) * {name}_column]")
            taken.append(f"const T& in{i}")
            values.append(f"load_(in{i})")
        else:
            declared.append(f"{_C[parameter.kind]} {name}")
            given.append(name)
            taken.append(f"{_C[parameter.kind]} in{i}")
            values.append(f"in{i}")
    headers = [*(("cmath", "cstdint") if language is CPP else ()), *formula.headers]
    types = [*(["sizeof(T) == 2"] if formula.fast else []), "V", *("V" for _ in formula.types)]
    return _HEADER.format(
        title=function.formulas()[0],
        headers="".join(f"#include <{header}>\n" for header in headers),
        which=which,
        names="using namespace std;\n" if language is CPP else "",
        helpers=helpers_for([*formula.lines, *values], language.name),
        formula=formula.text,
        function=language.function.replace("void", "V"),
        parameters=", ".join(taken),
        call=f"{formula.function}<{', '.join(types)}>({', '.join([*values, 'result'])});",
        macro=macro,
        declared="".join(f", {parameter}" for parameter in declared),
        given=", ".join(given),
    )


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value


def _type_of(argument: Any) -> str:
    """Return the type of an argument as a schema has it."""
    text = str(argument.type)
    return f"{text[9:-1]}?" if text.startswith("Optional[") else text
