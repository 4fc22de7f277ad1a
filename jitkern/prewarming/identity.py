"""The identity of an op's calls, found without running the functions of samples if possible.

Two processes with equal identities prewarm the same calls. None stands for an unknown identity.
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

_TORCH = (  # of torch: functions whose meta tensors are the same in every process
    "add", "arange", "cat", "eye", "full", "full_like", "linspace", "manual_seed", "matmul", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "sigmoid", "softmax", "stack", "tanh", "tensor",
)  # fmt: skip
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_FAMILIES = {".py", ".c", ".cpp", ".h"}


@functools.cache
def code_of_jitkern() -> str:
    """Return the SHA-256 of jitkern's own files, which all may affect the kernels of a call."""
    digest = hashlib.sha256()
    root = Path(jitkern.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in _FAMILIES):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)} {content}\n".encode())
    return digest.hexdigest()


def calls_of(group: Group) -> list[str] | None:
    """Return texts that identify the calls to prewarm, or None if that is not possible."""
    declared = group.op.declaration
    if group.wanted.calls is None and (declared.samples or declared.prewarm):
        samples_world = _function(declared.samples) if declared.samples else []
        if samples_world is not None and (listed := outline(list(declared.prewarm))) is not None:
            return [*samples_world, listed]
    samples = group.samples
    outlines = [outline(sample.args) for sample in samples if not sample.problem]
    if len(outlines) < len(samples) or None in outlines:
        return None
    return [text for text in outlines if text is not None]


def outline(value: Any) -> str | None:
    """Return a text of all that matters in an argument of a call; None if there is none."""
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
    """Return the identity of a function of samples and all that it reads; None if it is open."""
    world = world_of((function,))
    return [world.identity] if world.closed(lambda value: id(value) in _harmless()) else None


@functools.cache
def _harmless() -> set[int]:
    return {id(getattr(torch, name)) for name in _TORCH}
