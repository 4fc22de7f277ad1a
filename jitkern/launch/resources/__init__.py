"""The attributes of `k` other than launches: device facts, workspaces, maps and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.launch.resources import (
        device_facts as device_facts,
        device_view as device_view,
        tables as tables,
        tensor_maps as tensor_maps,
        workspaces as workspaces,
    )
else:
    __getattr__ = on_first_use(__name__)
