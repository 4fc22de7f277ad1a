"""Autocast: disabled for kernels and references, and followed by layers as in Torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from jitkern.calls.signature import tensors_in

_DEVICES = ("cpu", "cuda")  # that there are kernels for


def off(arguments: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the device of the arguments."""
    for tensor in tensors_in(arguments)[:1]:
        if _is_on(tensor.device.type):
            return torch.autocast(tensor.device.type, enabled=False)
    return contextlib.nullcontext()


def cast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the tensors; under autocast for the device of x, floats are cast to its dtype.

    Torch casts so what it gives to `linear` and `scaled_dot_product_attention`; float64 stays.
    """
    if not _is_on(x.device.type):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, *others)
    )


def _is_on(device: str) -> bool:
    return device in _DEVICES and torch.is_autocast_enabled(device)
