"""The launch function in Python: the object `k`, arguments, geometry and configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.launch import (
        arguments as arguments,
        autotune as autotune,
        call as call,
        device_facts as device_facts,
        device_view as device_view,
        devices as devices,
        kernels as kernels,
        measure as measure,
        packing as packing,
        parameters as parameters,
        symbols as symbols,
        tables as tables,
        tensor_maps as tensor_maps,
        tuned as tuned,
        workspaces as workspaces,
    )
else:
    __getattr__ = on_first_use(__name__)
