"""Expressions: equal nodes are one object, so common subexpressions are computed once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

# The operations that are not rows of the table. A call is that of a function of Torch, which is
# computed by others: its first operand is what they compute, the rest are the function's.
INPUT, CONST, TO, CALL = "input", "const", "to", "call"
FLOATS = ("f16", "bf16", "f32", "f64")  # the codes of dtypes of floating-point numbers


class Node:
    """An operation and its operands.

    op: the name of a row of the table; or `input`, whose value is its position and its kind (see
    `FormulaParameter`), `const`, whose value is a number, `to`, whose value is the code of a dtype,
    or `call`, whose value is the name of a function and its parameters, see `symbol.called`.
    """

    __slots__ = ("__weakref__", "args", "op", "value")

    def __init__(self, op: str, args: tuple[Node, ...], value: Any) -> None:
        self.op, self.args, self.value = op, args, value

    def __repr__(self) -> str:
        return as_python(self)


_known: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()


def node(op: str, *args: Node, value: Any = None) -> Node:
    """Return the node of this operation; equal ones are one object."""
    key = op, args, type(value), repr(value)  # -0.0 is not 0.0, and 1 is not True
    made = Node(op, args, value)
    return _known.setdefault(key, made)


def plain(value: Any, *, operand: bool = False) -> Any:
    """Return the Python number of a scalar of NumPy; other values unchanged.

    operand: whether it is combined with tensors, for which Torch makes a bool of NumPy a float.
    """
    kind = type(value)
    if kind.__module__ != "numpy" or hasattr(kind, "__setitem__"):  # which an array has
        return value
    number = value.item()
    return float(number) if operand and isinstance(number, bool) else number


def eager_operands(one: Node) -> tuple[Node, ...]:
    """Return the operands of what a formula calls."""
    return one.args[1:] if one.op == CALL else one.args


def ordered(
    outputs: Iterable[Node], operands: Callable[[Node], tuple[Node, ...]] = attrgetter("args")
) -> list[Node]:
    """Return every node once, operands first."""
    found: dict[Node, None] = {}
    stack = [(output, False) for output in reversed([*outputs])]
    while stack:
        one, complete = stack.pop()
        if one in found:
            continue
        if complete:
            found[one] = None
        else:
            stack.append((one, True))
            stack += [(arg, False) for arg in reversed(operands(one)) if arg not in found]
    return list(found)


def inputs_of(output: Node) -> list[int]:
    """Return the positions of the inputs that an expression depends on."""
    return sorted(one.value[0] for one in ordered([output]) if one.op == INPUT)


def of_tensors(one: Node) -> bool:
    """Whether an expression depends on tensors, not only on numbers."""
    return any(part.op == INPUT and part.value[1] == "tensor" for part in ordered([one]))


def replaced(outputs: Sequence[Node], values: Mapping[int, Node]) -> tuple[Node, ...]:
    """Return the expressions with other nodes for the inputs at these positions."""
    new: dict[Node, Node] = {}
    for one in ordered(outputs):
        if one.op == INPUT:
            new[one] = values.get(one.value[0], one)
        else:
            new[one] = node(one.op, *(new[arg] for arg in one.args), value=one.value)
    return tuple(new[output] for output in outputs)


def canonical(outputs: Sequence[Node]) -> str:
    """Return a text that is equal for equal expressions, whatever their inputs are called."""
    numbers: dict[Node, int] = {}
    lines = []
    for one in ordered(outputs):
        numbers[one] = len(numbers)
        value = "" if one.value is None else f" {type(one.value).__name__} {one.value!r}"
        lines.append(f"{one.op}{value} {' '.join(str(numbers[arg]) for arg in one.args)}".strip())
    return "\n".join([*lines, " ".join(str(numbers[output]) for output in outputs)])


_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip
_LONGEST = 400


def as_python(one: Node, names: Sequence[str] = ()) -> str:
    """Return the expression as Python writes it, for people; cut short where it is long."""
    texts: dict[Node, str] = {}
    for part in ordered([one]):
        args = [texts[arg] for arg in part.args]
        if part.op == INPUT:
            position = part.value[0]
            text = names[position] if names else f"x{position}"
        elif part.op == CONST:
            text = repr(part.value)
        elif part.op == CALL:
            text = args[0]
        elif part.op in _SIGNS:
            text = f"({args[0]} {_SIGNS[part.op]} {args[1]})"
        else:
            text = f"{part.op}({', '.join([*args, *([part.value] if part.op == TO else [])])})"
        texts[part] = text if len(text) <= _LONGEST else "(...)"
    text = texts[one]
    one = one.args[0] if one.op == CALL else one
    return text[1:-1] if text.startswith("(") and one.op in _SIGNS else text
