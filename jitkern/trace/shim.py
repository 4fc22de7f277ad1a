"""The C declarations that the launch runtime and every stub begin with."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def shim() -> str:
    """The text above the runtime and every stub, whose table the addresses are for."""
    path = Path(__file__).with_name("shim.h")
    return path.read_text(encoding="utf-8")
