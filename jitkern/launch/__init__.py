"""The launch function in Python: the object `k`, arguments, geometry and configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.launch import (
        arguments as arguments,
        autotune as autotune,
        call as call,
        declared as declared,
        devices as devices,
        flat as flat,
        geometry as geometry,
        kernels as kernels,
        launched as launched,
        measure as measure,
        packing as packing,
        parameters as parameters,
        resources as resources,
        runner as runner,
        symbols as symbols,
        tuned as tuned,
    )
else:
    __getattr__ = on_first_use(__name__)
