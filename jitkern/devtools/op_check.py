"""A row of what `check` finds: without Torch, as its crash must not end who prints it."""

from __future__ import annotations

from jitkern.named_tuple import NamedTuple


class OpCheck(NamedTuple):
    """A row of results: `ok` is True or False, or None for what cannot be tried here.

    note: the reason, or a remark.
    source: the kind of source, or "" for a check of the op as a whole.
    """

    op: str
    device: str
    source: str
    check: str
    ok: bool | None
    note: str
