"""The launch function as C: its world, its trace, and the text of its stub."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.trace import (
        copying as copying,
        description as description,
        lists as lists,
        quick as quick,
        reads as reads,
        recorder as recorder,
        seen as seen,
        stub_text as stub_text,
        tensor_proxy as tensor_proxy,
        trace as trace,
        values as values,
        world as world,
    )
else:
    __getattr__ = on_first_use(__name__)


@functools.cache
def shim() -> str:
    """Return the C text above the runtime and every stub, which declares the table of addresses."""
    return Path(__file__).with_name("shim.h").read_text(encoding="utf-8")
