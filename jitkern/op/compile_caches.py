"""A digest of all declared ops in the keys of Torch's compile caches.

These caches key a compiled graph by the names of the ops in it (pytorch#144344): after an edit they
would serve a graph with the old backward, fake or reference of an op. So the digest of all declared
ops becomes a part of `torch.compiler.config.cache_key_tag`, which is in the keys of all graphs. The
digest is computed when a graph is compiled, and not before; a tag of the user's is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitkern import op as room


def install(ops: Mapping[str, Any]) -> None:
    """Add the ops of this registry, as they are when a graph is compiled, to the keys of Torch."""
    settings = torch.compiler.config
    kind: Any = type(settings)  # a class of this one module
    if "cache_key_tag" not in getattr(settings, "_config", {}):
        return  # a Torch that has no such tag
    before = kind.__dict__.get("cache_key_tag")

    def tag(self: Any) -> str:
        value = before.fget(self) if before else self.__getattr__("cache_key_tag")
        return f"{value}:{room.compile_cache_key.digest(ops)}" if ops else str(value)

    kind.cache_key_tag = property(tag)
