"""The text of a formula as a function in C++, the same for CUDA and for the CPU.

The type of a value is known up to the call: `bool`; `A`, the type that floating-point numbers are
computed in (float or double); or `P0`, `P1`, …, one for each value that may be an integer, which a
call makes `A` where it is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jitkern.composition import expression
from jitkern.composition.expression import CALL, CONST, FLOATS, INPUT, TO, Node
from jitkern.composition.table import TABLE
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES

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
    nodes that are promoted to it. A floating-point one becomes `A`.
    floats: the nodes that are computed in `A`.
    lines: the statements.
    fast: whether the function takes the template parameter FAST. text: the whole function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[tuple[str, tuple[Node, ...]], ...]
    floats: tuple[Node, ...]
    lines: tuple[str, ...]
    headers: tuple[str, ...]
    fast: bool
    text: str

    def call(self, inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """Return the statement that computes the outputs from these inputs."""
        own = ", ".join([*(["FAST"] if self.fast else []), "A", *(name for name, *_ in self.types)])
        return f"one_{self.name}<{own}>({', '.join([*inputs, *outputs])});"


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
    writer = _Writer(inputs, language)
    for one in expression.ordered(outputs):
        writer.write(one)
    for i, (one, result) in enumerate(zip(outputs, results)):
        writer.lines.append(f"{result} = Out{i}({writer.own(one)});")
    fast = any("FAST" in line for line in writer.lines)
    types = tuple((kind, nodes) for nodes, kind in writer.types.items())
    floats = tuple(one for one, kind in writer.fixed.items() if kind == "A")
    own = [*(["bool FAST"] if fast else []), "typename A", *(f"typename {t}" for t, *_ in types)]
    parameters = [f"const In{i} {n}" for i, n in enumerate(inputs)]
    parameters += [f"Out{i}& {n}" for i, n in enumerate(results)]
    template = [*own, *(f"typename In{i}" for i in range(len(inputs)))]
    template += [f"typename Out{i}" for i in range(len(results))]
    body = "".join(f"  {line}\n" for line in writer.lines)
    spelled = [
        f"// {result} = {expression.as_python(one, inputs)}\n"
        for one, result in zip(outputs, results)
    ]
    text = (
        f"{''.join(spelled)}template <{', '.join(template)}>\n"
        f"{language.function} one_{name}({', '.join(parameters)}) {{\n{body}}}\n"
    )  # no macro has such a name
    return Formula(
        name, tuple(inputs), tuple(results), types, floats, tuple(writer.lines),
        tuple(writer.headers), fast, text,
    )  # fmt: skip


class _Writer:
    """The statements of a formula."""

    def __init__(self, inputs: Sequence[str], language: Language) -> None:
        self.lines: list[str] = []
        self.types: dict[tuple[Node, ...], str] = {}
        self.headers: dict[str, None] = {}
        self._inputs, self._language = inputs, language
        self._names: dict[Node, str] = {}
        self._casts: dict[tuple[Node, str], str] = {}
        self.fixed: dict[Node, str] = {}

    def write(self, one: Node) -> None:
        """Add the statement of a node, whose operands are written already."""
        if one.op == INPUT:
            self._names[one] = self._inputs[one.value[0]]
        elif one.op == CALL and self._fixed(one):
            self._names[one] = self._names[one.args[0]]
        elif one.op != CONST:
            self._names[one] = name = f"v{len(self._names)}"
            kind = self._type(one)
            self.lines.append(f"const {kind} {name} = {self._text(one, kind)};")

    def own(self, one: Node) -> str:
        """Return the text of a node's value in its own type."""
        return self._as(one, self._type(one))

    def _type(self, one: Node) -> str:
        """Return the type that a value is computed in."""
        return self._fixed(one) or self._parameter(one)

    def _fixed(self, one: Node) -> str:
        """Return the type of a value if it is the same in all calls, else ""."""
        if one not in self.fixed:
            row = TABLE.get(one.op)
            if row:
                places = row.deciding or range(row.arity)
                kind, deciding = row.rule, tuple(one.args[i] for i in places)
            elif one.op == CALL:
                kind, deciding = "", one.args[:1]
            else:
                kinds = {CONST: type(one.value).__name__, TO: one.value}
                kind, deciding = kinds.get(one.op) or one.value[1], ()
            if kind == "bool":
                self.fixed[one] = "bool" * (one.op != INPUT)
            else:
                floating = kind in (*FLOATS, "float") or "A" in map(self._fixed, deciding)
                self.fixed[one] = "A" * floating
        return self.fixed[one]

    def _parameter(self, *nodes: Node) -> str:
        """Return the template parameter for what these nodes are promoted to."""
        return self.types.setdefault(nodes, f"P{len(self.types)}")

    def _common(self, operands: Sequence[Node]) -> str:
        """Return the type that operands are compared in."""
        kinds = {self._fixed(one) for one in operands}
        if "A" in kinds:
            return "A"
        return "bool" if kinds == {"bool"} else self._parameter(*operands)

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
        if one.op == CALL:
            return self._as(one.args[0], kind)
        row = TABLE[one.op]
        is_condition = row.rule == "bool"
        common = self._common(one.args) if is_condition else kind
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
