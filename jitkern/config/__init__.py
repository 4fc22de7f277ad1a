"""What the user asked for: read once, frozen, validated however it comes."""

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
__getattr__ = on_first_use(__name__)  # `file`, where there is one to read
