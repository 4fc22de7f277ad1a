"""The text of a formula as a function in C++, the same for CUDA and for the CPU.

The type of a value is known up to the call: `bool`; `A`, the type that floating-point numbers are
computed in (float or double); or `P0`, `P1`, …, one for each set of operands that may be integers,
which a call makes `A` where they are not.

A function that rounds as PyTorch does after each operation computes floating-point numbers in
`P0`, … too: float, or double where PyTorch's result is. It has also `R0`, …: the dtype that PyTorch
converts operands to, and rounds the result to. PyTorch keeps a number that it adds or multiplies
by wider in places (see `Language.unrounded`); numbers alone are computed in double, as in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jitkern.composition import expression
from jitkern.composition.expression import CONST, FLOATS, INPUT, TO, Node, of_tensors
from jitkern.composition.table import TABLE
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES

_CONDITION = "condition"
_BY_WAY_OF = {  # by which PyTorch converts floating-point numbers to integers
    "i8": "to_i32_", "i16": "to_i32_", "i32": "to_i32_", "u16": "to_i32_",
    "u8": "to_i64_", "i64": "to_i64_", "u32": "to_i64_",
}  # fmt: skip


class Language(NamedTuple):
    """All in which CUDA and C++ differ.

    name, dtype: the fields to read of a row and of a dtype. function: before that of a formula.
    unrounded: the operations for which PyTorch does not round a number to the dtype of the result
    first. In C++, PyTorch takes a second factor or a divisor without dimensions for a number.
    """

    name: str
    dtype: str
    function: str
    infinity: str
    nan: str
    unrounded: tuple[str, ...]


_SCALED = ("mul", "div")
CUDA = Language(
    "cuda", "cuda", "__device__ __forceinline__ void",
    "__int_as_float(0x7f800000)", "__int_as_float(0x7fc00000)", ("add", "sub", *_SCALED),
)  # fmt: skip
CPP = Language("cpp", "host", "inline void", "__builtin_inff()", '__builtin_nanf("")', _SCALED)


class Formula(NamedTuple):
    """A formula as a function in C++.

    name: of the formula. inputs, outputs: the names of its parameters, in order.
    types: the template parameters that a call chooses dtypes for, beside `A`: the name, the steps
    of the program whose dtypes are promoted to it, and what a floating-point one becomes: `all`,
    the type `A`; `own`, float or double; `same`, itself; `scalar`, as `own` if the last step has
    no dimensions, which does not count otherwise, else as `same`.
    lines: the statements.
    fast: whether the function takes the template parameter FAST. text: the whole function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[tuple[str, tuple[int, ...], str], ...]
    lines: tuple[str, ...]
    headers: tuple[str, ...]
    fast: bool
    text: str

    def call(self, inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """Return the statement that computes the outputs from these inputs."""
        own = ", ".join([*(["FAST"] if self.fast else []), "A", *(name for name, *_ in self.types)])
        return f"{self.function}<{own}>({', '.join([*inputs, *outputs])});"

    @property
    def function(self) -> str:
        """The name of the function in the text, which no macro has."""
        return f"one_{self.name}"


def formula_of(
    name: str,
    outputs: Sequence[Node],
    inputs: Sequence[str],
    results: Sequence[str],
    language: Language,
    *,
    eager: bool = False,
) -> Formula:
    """Return the function of these expressions.

    inputs, results: names in C of the inputs and the outputs. eager: round after each operation.
    """
    writer = _Writer(inputs, language, eager=eager, steps=expression.ordered(outputs))
    for one in writer.steps:
        writer.write(one)
    for i, (one, result) in enumerate(zip(outputs, results)):
        writer.lines.append(f"{result} = Out{i}({writer.own(one)});")
    fast = any("FAST" in line for line in writer.lines)
    types = tuple(writer.types.values())
    own = [*(["bool FAST"] if fast else []), "typename A", *(f"typename {t}" for t, *_ in types)]
    parameters = [f"const In{i} {n}" for i, n in enumerate(inputs)]
    parameters += [f"Out{i}& {n}" for i, n in enumerate(results)]
    template = [*own, *(f"typename In{i}" for i in range(len(inputs)))]
    template += [f"typename Out{i}" for i in range(len(results))]
    body = "".join(f"  {line}\n" for line in writer.lines)
    spelled = [
        f"// {result} = {expression.spelled(one, inputs)}\n"
        for one, result in zip(outputs, results)
    ]
    text = (
        f"{''.join(spelled)}template <{', '.join(template)}>\n"
        f"{language.function} one_{name}({', '.join(parameters)}) {{\n{body}}}\n"
    )
    return Formula(
        name, tuple(inputs), tuple(results), types, tuple(writer.lines),
        tuple(writer.headers), fast, text,
    )  # fmt: skip


class _Writer:
    """The statements of a formula. steps: its nodes, operands first."""

    def __init__(
        self, inputs: Sequence[str], language: Language, *, eager: bool, steps: list[Node]
    ) -> None:
        self.lines: list[str] = []
        self.types: dict[Any, tuple[str, tuple[int, ...], str]] = {}
        self.headers: dict[str, None] = {}
        self.steps = steps
        self._inputs, self._language, self._eager = inputs, language, eager
        self._names: dict[Node, str] = {}
        self._casts: dict[tuple[Node, str], str] = {}
        self._number = {one: number for number, one in enumerate(steps)}
        self._leaves: dict[Node, tuple[bool, frozenset[Any]]] = {}

    def write(self, one: Node) -> None:
        """Add the statement of a node, whose operands are written already."""
        self._leaves[one] = self._sources(one)
        if one.op == INPUT:
            self._names[one] = self._inputs[one.value[0]]
        elif one.op != CONST:
            self._names[one] = name = f"v{len(self._names)}"
            kind = self._type(one)
            self.lines.append(f"const {kind} {name} = {self._text(one, kind)};")

    def own(self, one: Node) -> str:
        """Return the text of a node's value in its own type."""
        return self._as(one, self._type(one))

    def _sources(self, one: Node) -> tuple[bool, frozenset[Any]]:
        """Return whether a value is always floating-point, and what decides on its dtype."""
        if one.op == INPUT:
            position, kind = one.value
            return kind == "float", frozenset([position if kind == "tensor" else kind])
        if one.op == CONST:
            return type(one.value) is float, frozenset([type(one.value).__name__])
        inputs = tuple(expression.inputs_of(one))  # whether these have dimensions decides too
        if one.op == TO:
            return one.value in FLOATS, frozenset([(one.value, inputs)])
        row = TABLE[one.op]
        if row.rule == "bool":
            return False, frozenset([(_CONDITION, inputs)])
        deciding = row.deciding_of(one.args)
        floating, sources = self._union(deciding)
        if {*inputs} - {i for arg in deciding for i in expression.inputs_of(arg)}:
            sources = frozenset([(sources, inputs)])
        if row.rule == "float" and not floating:
            return True, frozenset([(row.rule, sources)])
        return floating, sources

    def _union(self, args: Sequence[Node]) -> tuple[bool, frozenset[Any]]:
        """Return what decides on the dtype of what these operands are promoted to.

        The order of promotions matters, (a + b) + c and (a + c) + b may differ, so what is promoted
        already is a set within the set; but what is promoted again to one of its own changes none.
        """
        floating = any(self._leaves[arg][0] for arg in args)
        every = {self._leaves[arg][1] for arg in args}
        for whole in every:
            if all(s == whole or s in whole or (len(s) == 1 and s <= whole) for s in every):
                return floating, whole
        return floating, frozenset().union(*every) if all(
            len(s) == 1 for s in every
        ) else frozenset(every)

    def _type(self, one: Node) -> str:
        """Return the type that a value is computed in."""
        if _are_conditions(self._leaves[one][1]) or (one.op == TO and one.value == "bool"):
            return "bool"
        return self._computed(self._leaves[one], [one])

    def _computed(self, leaves: tuple[bool, frozenset[Any]], promoted: Sequence[Node]) -> str:
        floating, sources = leaves
        if floating and not self._eager:
            return "A"
        if floating and not any(map(of_tensors, promoted)):
            return "double"
        if _are_conditions(sources):
            return "bool"
        return self._type_name("P", leaves, promoted, "own" if self._eager else "all")

    def _type_name(self, letter: str, leaves: Any, steps: Sequence[Node], becomes: str) -> str:
        key = letter, leaves
        if key not in self.types:
            name = f"{letter}{sum(known == letter for known, _ in self.types)}"
            self.types[key] = name, tuple(self._number[one] for one in steps), becomes
        return self.types[key][0]

    def _as(self, one: Node, kind: str) -> str:
        """Return the text of a node's value as this type."""
        if one.op == CONST:
            return f"{kind}({self._literal(one.value)})"
        name = self._names[one]
        if one.op != INPUT and self._type(one) == kind:
            return name
        if (one, kind) not in self._casts:
            self._casts[one, kind] = f"{name}_{kind}"
            self.lines.append(f"const {kind} {name}_{kind} = {kind}({name});")
        return self._casts[one, kind]

    def _literal(self, value: float) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int):
            return f"{value}" if abs(value) < 2**31 else f"{value}LL"
        if math.isnan(value):
            return self._language.nan
        if math.isinf(value):
            return ("-" if value < 0 else "") + self._language.infinity
        return repr(value)

    def _text(self, one: Node, kind: str) -> str:
        """Return the right-hand side of a node's statement."""
        if one.op == TO:
            return self._converted(one, kind)
        row = TABLE[one.op]
        is_condition = row.rule == "bool"
        leaves = self._union(one.args) if is_condition else self._leaves[one]
        steps = one.args if is_condition else [one]
        common = self._computed(leaves, steps)  # in which operands are computed with
        rounded = ""
        if self._eager and common != "bool" and of_tensors(one):
            rounded = self._type_name("R", leaves, steps, "same")
        operands = [self._as(arg, common) for arg in one.args]
        if row.rule == "where":
            operands[0] = self._as(one.args[0], "bool")
        for place in (row.deciding or range(row.arity)) if rounded else ():
            if own := self._converted_to(one, place, common, rounded):
                operands[place] = f"{common}({own}({operands[place]}))"
        text = getattr(row, self._language.name) or row.cuda
        if rounded and one.op == "div" and self._inverts(one):
            operands[1] = self._as(one.args[1], "double")
            text = f"{{0}} * {common}(1 / {{1}})"
        if row.wraps and common[0] == "P":
            operands = [f"wrap_({operand})" for operand in operands]
            text = f"held_({text})"
        text = text.format(*operands)
        if self._eager:
            text = text.replace("<FAST>", "<false>")
        if is_condition:
            return text
        if rounded:
            return f"{kind}({rounded}({text}))"
        return f"{kind}({text})" if row.wraps and kind[0] == "P" else text

    def _inverts(self, one: Node) -> bool:
        """Return whether PyTorch multiplies a quotient's dividend by the inverse of a number."""
        return self._language is CUDA and of_tensors(one.args[0]) and not of_tensors(one.args[1])

    def _converted_to(self, one: Node, place: int, kind: str, rounded: str) -> str:
        """Return the dtype that PyTorch converts an operand to; "" if that changes nothing.

        kind, rounded: the type of the operation, and the dtype of its operands and its result.
        """
        arg = one.args[place]
        if not of_tensors(arg):
            return "" if one.op in self._language.unrounded else rounded
        if self._type(arg) == kind or not any(of_tensors(a) for a in one.args if a is not arg):
            return ""
        if place == 1 and one.op in _SCALED:
            scalar = self._type_name("S", (self._leaves[one], arg), [one, arg], "scalar")
            return scalar if self._language is CPP else rounded
        return rounded

    def _converted(self, one: Node, kind: str) -> str:
        """Return the text of a conversion, which rounds where the dtype is narrower."""
        (arg,) = one.args
        if one.value in _BY_WAY_OF:
            return f"{kind}({_BY_WAY_OF[one.value]}({self.own(arg)}))"
        if one.value not in FLOATS:
            return self._as(arg, kind)
        dtype = DTYPES[one.value]
        header = dtype.header if self._language.name == "cuda" else dtype.host_header
        if header:
            self.headers[header] = None
        return f"{kind}({getattr(dtype, self._language.dtype)}({self._as(arg, kind)}))"


def _are_conditions(sources: frozenset[Any]) -> bool:
    return all(isinstance(one, tuple) and one[0] == _CONDITION for one in sources)
