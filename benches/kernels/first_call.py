"""Seconds of a cold first call: of a fresh process with empty caches, see `one_kernel_call`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benches import common
from benches.kernels.subject import Subject


def seconds_of(who: str, subject: Subject, device: str, args: tuple[Any, ...]) -> float:
    """Return the seconds that a contender takes. Raises ChildFailed."""
    positional, by_name = subject.op.signature.split(args)
    call = [[*map(_described, positional)], {n: _described(v) for n, v in by_name.items()}]
    with tempfile.TemporaryDirectory(prefix="benches-", ignore_cleanup_errors=True) as scratch:
        environment = common.private_environment(Path(scratch), JITKERN_FALLBACK="raise")
        arguments = (who, subject.spec, device, json.dumps(call))
        output = common.fresh_process(
            "-m", "benches.one_kernel_call", *arguments, environment=environment
        )
    return float(output["seconds"])


def can_be_found(subject: Subject, args: tuple[Any, ...]) -> str:
    """Return why another process cannot make the call, or ""."""
    plain = (torch.Tensor, int, float, str, bool, type(None))
    if not subject.spec:
        return "no module has the op as an attribute: declare it in one that can be imported"
    if not all(isinstance(value, plain) for value in args):
        return "its arguments are not tensors, numbers or strings"
    return ""


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape]}
