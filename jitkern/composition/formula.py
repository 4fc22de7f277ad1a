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
from jitkern.composition.expression import CONST, FLOATS, INPUT, TO, Node
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
    """

    name: str
    dtype: str
    function: str
    infinity: str
    nan: str


CUDA = Language(
    "cuda", "cuda", "__device__ __forceinline__ void",
    "__int_as_float(0x7f800000)", "__int_as_float(0x7fc00000)",
)  # fmt: skip
CPP = Language("cpp", "host", "inline void", "__builtin_inff()", '__builtin_nanf("")')


class Formula(NamedTuple):
    """A formula as a function in C++.

    name: of the formula. inputs, outputs: the names of its parameters, in order.
    types: the template parameters that a call chooses dtypes for, beside `A`: the name, and the
    steps of the program whose dtypes are promoted to it. A floating-point one becomes `A`.
    lines: the statements.
    fast: whether the function takes the template parameter FAST. text: the whole function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...]
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
) -> Formula:
    """Return the function of these expressions.

    inputs, results: names in C of the inputs and the outputs.
    """
    writer = _Writer(inputs, language, steps=expression.ordered(outputs))
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

    def __init__(self, inputs: Sequence[str], language: Language, *, steps: list[Node]) -> None:
        self.lines: list[str] = []
        self.types: dict[Any, tuple[str, tuple[int, ...]]] = {}
        self.headers: dict[str, None] = {}
        self.steps = steps
        self._inputs, self._language = inputs, language
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
        if floating:
            return "A"
        if _are_conditions(sources):
            return "bool"
        if leaves not in self.types:
            steps = tuple(self._number[one] for one in promoted)
            self.types[leaves] = f"P{len(self.types)}", steps
        return self.types[leaves][0]

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
        operands = [self._as(arg, common) for arg in one.args]
        if row.rule == "where":
            operands[0] = self._as(one.args[0], "bool")
        text = getattr(row, self._language.name) or row.cuda
        if row.wraps and common[0] == "P":
            operands = [f"wrap_({operand})" for operand in operands]
            text = f"held_({text})"
        text = text.format(*operands)
        if is_condition:
            return text
        return f"{kind}({text})" if row.wraps and kind[0] == "P" else text

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
