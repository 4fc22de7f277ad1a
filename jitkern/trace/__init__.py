"""The launch function as C: its world, its trace, and the text of its stub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.trace import (
        lists as lists,
        quick as quick,
        reads as reads,
        recorder as recorder,
        seen as seen,
        shim as shim,
        stub_text as stub_text,
        tensor_proxy as tensor_proxy,
        trace as trace,
        world as world,
    )
else:
    __getattr__ = on_first_use(__name__)
