"""Derivatives of expressions, as expressions: reverse accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitkern.composition.expression import FLOATS, INPUT, TO, Node, ordered
from jitkern.composition.symbol import Symbol, node_of
from jitkern.composition.table import TABLE


def gradients(
    outputs: Sequence[Node], seeds: Sequence[Node], wrt: Sequence[int]
) -> list[Node | None]:
    """Return the gradients of inputs: that of the sum of each output times its seed.

    wrt: the positions of the inputs. A gradient is None where no output depends on the input by
    way of operations that have a derivative.
    """
    found: dict[Node, Any] = {}
    parts: dict[Node, Any] = {}
    steps = ordered(outputs)
    wanted = _depending(steps, set(wrt))
    for output, seed in zip(outputs, seeds):
        _give(parts, output, Symbol(seed))
    for one in reversed(steps):
        if one not in parts or one not in wanted:
            continue
        g = parts.pop(one)
        if one.op == INPUT:
            found[one] = g
        elif one.op == TO:
            if one.value in FLOATS:  # Torch has no gradient of integers and bools
                _give(parts, one.args[0], g)
        elif TABLE[one.op].gradient:
            gradient: Any = TABLE[one.op].gradient
            for arg, part in zip(one.args, gradient(g, *map(Symbol, one.args), Symbol(one))):
                if isinstance(part, Symbol) and arg in wanted:  # else None, or the number 0
                    _give(parts, arg, part)
    by_position = {one.value[0]: node_of(g) for one, g in found.items()}
    return [by_position.get(position) for position in wrt]


def _give(parts: dict[Node, Any], one: Node, part: Any) -> None:
    parts[one] = parts[one] + part if one in parts else part


def _depending(steps: Sequence[Node], wrt: set[int]) -> set[Node]:
    """Return the nodes that depend on these inputs."""
    found: set[Node] = set()
    for one in steps:
        own = one.op == INPUT and one.value[0] in wrt
        if own or any(arg in found for arg in one.args):
            found.add(one)
    return found
