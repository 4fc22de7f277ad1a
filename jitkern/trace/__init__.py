"""The launch function as C: what it reads, the run that notes what it does, the text of a stub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.trace import (
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

__getattr__ = on_first_use(__name__)
