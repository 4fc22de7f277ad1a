"""What the calls of an op are, told without a run of the functions that make them where possible.

Two processes that are told the same make the same calls ready. None stands for what cannot be told.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

import jitkern
from jitkern.prewarming.tasks import Group
from jitkern.trace.world import world_of

_TORCH = (  # of torch: the dtype and the shape of a meta tensor, alike in every process
    "add", "arange", "cat", "eye", "full", "full_like", "linspace", "manual_seed", "matmul", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "sigmoid", "softmax", "stack", "tanh", "tensor",
)  # fmt: skip
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_FAMILIES = {".py", ".c", ".h"}


@functools.cache
def code_of_jitkern() -> str:
    """The SHA-256 of jitkern's own files: any of them may have a part in what a call needs."""
    found = hashlib.sha256()
    root = Path(jitkern.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in _FAMILIES):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(root)} {content}\n".encode())
    return found.hexdigest()


def calls_of(group: Group) -> list[str] | None:
    """What stands for the calls that are to be made ready."""
    op = group.op
    if group.wanted.calls is None and (op._samples or op._prewarm):
        drawn = _function(op._samples) if op._samples else []
        if drawn is not None and (listed := outline(list(op._prewarm))) is not None:
            return [*drawn, listed]
    samples = group.samples
    outlines = [outline(sample.args) for sample in samples if not sample.problem]
    if len(outlines) < len(samples) or None in outlines:
        return None
    return [text for text in outlines if text is not None]


def outline(value: Any) -> str | None:
    """An argument of a call, as far as it can matter for what the call needs."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout is torch.strided and value.is_meta
        if not plain or value.is_conj() or value.is_neg():
            return None
        where = (*value.shape, "at", *value.stride(), "from", value.storage_offset())
        return f"{value.dtype}{where}{value.requires_grad:d}"
    if isinstance(value, (tuple, list)):
        inside = [outline(item) for item in value]
        twins = [next(i for i, other in enumerate(value) if other is item) for item in value]
        return None if None in inside else f"{type(value).__name__}{twins}{inside}"
    if value is None or type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    return None


def _function(function: Any) -> list[str] | None:
    """A function of samples: its code, and what it and the functions that it calls read."""
    world = world_of((function,))
    return [world.identity] if world.closed(_harmless()) else None


@functools.cache
def _harmless() -> list[object]:
    return [getattr(torch, name) for name in _TORCH]
