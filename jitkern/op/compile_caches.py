"""Torch's compile caches, told what our ops are made of.

They key a compiled graph by the names of the ops in it (pytorch#144344): a graph with the backward,
the fake or the reference of an op as it was before an edit would be served after it. So the digest
of all declared ops becomes a part of `torch.compiler.config.cache_key_tag`, which is in the keys of
all of them. It is computed when a graph is compiled, and not before; a tag of the user's is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitkern import op as room


def install(ops: Mapping[str, Any]) -> None:
    """Fold the ops of this registry, whatever they are by then, into the keys of Torch's caches."""
    settings = torch.compiler.config
    kind: Any = type(settings)  # a class of this module alone
    if "cache_key_tag" not in getattr(settings, "_config", {}):
        return  # a Torch that has no such tag
    before = kind.__dict__.get("cache_key_tag")

    def tag(self: Any) -> str:
        value = before.fget(self) if before else self.__getattr__("cache_key_tag")
        return f"{value}:{room.compile_cache_key.digest(ops)}" if ops else str(value)

    kind.cache_key_tag = property(tag)
