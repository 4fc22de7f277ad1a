"""The settings of the user: read once, frozen, and validated whatever their origin."""

from __future__ import annotations

from jitkern import on_first_use
from jitkern.config.settings import (
    BUILD_VARIABLES,
    PREFERENCES,
    SEARCHED,
    SETTINGS,
    Config,
    cuda_arch_list,
    current,
    duration_of,
    follow_preferences,
    preferences,
    renew,
    size_of,
    using,
)

__all__ = [
    "BUILD_VARIABLES", "PREFERENCES", "SEARCHED", "SETTINGS", "Config", "cuda_arch_list",
    "current", "duration_of", "follow_preferences", "preferences", "renew", "size_of", "using",
]  # fmt: skip
__getattr__ = on_first_use(__name__)  # the module `file`, needed only if a settings file exists
