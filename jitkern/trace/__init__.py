"""The launch function as a program: its scope and its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.trace import (
        copying as copying,
        fast_check as fast_check,
        lists as lists,
        program as program,
        program_builder as program_builder,
        scope as scope,
        stand_ins as stand_ins,
        tensor_proxy as tensor_proxy,
        trace as trace,
        tracer as tracer,
        values as values,
    )
else:
    __getattr__ = on_first_use(__name__)
