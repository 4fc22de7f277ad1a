"""C and C++ for the CPU, and the launch runtime, by the system's C and C++ compilers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.compilers.cpp import (
        cc as cc,
        cc_build as cc_build,
        functions as functions,
        generated as generated,
        parameter_types as parameter_types,
    )
else:
    __getattr__ = on_first_use(__name__)
