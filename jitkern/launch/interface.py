"""What C is told of a launch: the arguments of the schema, and the values held for constant."""

from __future__ import annotations

from typing import Any

from jitkern.named_tuple import NamedTuple


class Parameter(NamedTuple):
    """One argument of an op's schema: its name, and its kind as `runtime.c` letters them."""

    name: str
    kind: str


class Frozen(NamedTuple):
    """A value that a variant holds for constant, and what it is the value of."""

    what: str
    value: Any
