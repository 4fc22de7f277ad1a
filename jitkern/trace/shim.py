"""The C declarations that the launch runtime and every stub begin with."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def shim() -> str:
    """Return the text above the runtime and every stub, which declares the table of addresses."""
    path = Path(__file__).with_name("shim.h")
    return path.read_text(encoding="utf-8")
