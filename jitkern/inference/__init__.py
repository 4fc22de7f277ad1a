"""What a model that generates text needs beside its ops: caches and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.inference import (
        converters as converters,
        int4 as int4,
        linears as linears,
        paged_cache as paged_cache,
        pages as pages,
    )
else:
    __getattr__ = on_first_use(__name__)
