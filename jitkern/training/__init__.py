"""Numbers of a training loop that reach the host without making it wait for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.training import (
        async_scalar as async_scalar,
        cross_entropy as cross_entropy,
        loss_meter as loss_meter,
    )
else:
    __getattr__ = on_first_use(__name__)
