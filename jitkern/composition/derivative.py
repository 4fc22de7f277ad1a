"""Derivatives of expressions, as expressions: reverse accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitkern.composition.expression import CALL, FLOATS, INPUT, TO, Node, ordered
from jitkern.composition.symbol import Element, node_of
from jitkern.composition.table import TABLE


def gradients(
    outputs: Sequence[Node], seeds: Sequence[Node], wrt: Sequence[int]
) -> list[Node | None]:
    """Return the gradients of inputs: that of the sum of each output times its seed.

    wrt: the positions of the inputs. A gradient is None where no output depends on the input by
    way of operations that have a derivative, and the constant 0 where all such ways are flat.
    """
    found: dict[Node, Any] = {}
    parts: dict[Node, Any] = {}
    steps = ordered(outputs)
    wanted = depending(steps, wrt)
    for output, seed in zip(outputs, seeds):
        _give(parts, output, Element(seed))
    for one in reversed(steps):
        if one not in parts or one not in wanted:
            continue
        g = parts.pop(one)
        if one.op == INPUT:
            found[one] = g
        elif one.op in (CALL, TO):
            _give(parts, one.args[0], g)
        else:
            gradient: Any = TABLE[one.op].gradient
            flat = not isinstance(g, Element)
            own = Element(node_of(g)) if flat else g
            for arg, part in zip(one.args, gradient(own, *map(Element, one.args), Element(one))):
                if part is not None and arg in wanted:
                    _give(parts, arg, 0 if flat or not isinstance(part, Element) else part)
    by_position = {one.value[0]: node_of(g) for one, g in found.items()}
    return [by_position.get(position) for position in wrt]


def depending(steps: Sequence[Node], wrt: Sequence[int]) -> set[Node]:
    """Return the nodes that depend on inputs by way of operations with a derivative.

    steps: all nodes, operands first. wrt: the positions of the inputs.
    """
    found: set[Node] = set()
    for one in steps:
        if one.op == INPUT:
            depends = one.value[0] in wrt
        elif one.op in (CALL, TO):  # Torch has no gradient of integers and bools
            depends = one.args[0] in found and (one.op == CALL or one.value in FLOATS)
        else:
            row = TABLE.get(one.op)
            operands = one.args[1:] if row and row.rule == "where" else one.args
            depends = bool(row and row.gradient) and not found.isdisjoint(operands)
        if depends:
            found.add(one)
    return found


def _give(parts: dict[Node, Any], one: Node, part: Any) -> None:
    """Add a part of the gradient of a node: a symbol, or the number 0."""
    if isinstance(part, Element) and isinstance(parts.get(one), Element):
        parts[one] = parts[one] + part
    elif isinstance(part, Element) or one not in parts:
        parts[one] = part
