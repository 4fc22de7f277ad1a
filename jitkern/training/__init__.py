"""What a training loop needs beside its ops: numbers on the host, a loss in place, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.training import (
        async_scalar as async_scalar,
        block_sparse_mask as block_sparse_mask,
        cross_entropy as cross_entropy,
        flash_attention as flash_attention,
        loss_meter as loss_meter,
    )
else:
    __getattr__ = on_first_use(__name__)
