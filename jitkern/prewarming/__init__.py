"""Build all that calls need ahead of the first call, for any target; nothing here prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.prewarming import (
        api as api,
        builder as builder,
        call_traces as call_traces,
        executors as executors,
        jobs as jobs,
        op_calls as op_calls,
        shards as shards,
        tasks as tasks,
        workers as workers,
    )
else:
    __getattr__ = on_first_use(__name__)
