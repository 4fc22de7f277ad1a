"""C in this process: trampolines, programs, records, and the build of the launch runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.runtime import (
        binding as binding,
        code_page as code_page,
        code_version as code_version,
        freshness as freshness,
        guards as guards,
        programs as programs,
        records as records,
        specializer as specializer,
        symbols as symbols,
        trampoline as trampoline,
    )
else:
    __getattr__ = on_first_use(__name__)
