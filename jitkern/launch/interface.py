"""Types that describe a launch to C: the schema's arguments, and the values held for constant."""

from __future__ import annotations

from typing import Any

from jitkern.named_tuple import NamedTuple


class Parameter(NamedTuple):
    """One argument of an op's schema: its name, and its kind as a letter (see `runtime.c`)."""

    name: str
    kind: str


class Frozen(NamedTuple):
    """A value that a variant holds for constant, and a description of its origin."""

    what: str
    value: Any
