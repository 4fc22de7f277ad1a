"""State of recording for Autograd: depth of this thread, and the C++ recorder once it is loaded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from jitkern.named_tuple import NamedTuple
from jitkern.runtime.symbols import symbols

if TYPE_CHECKING:
    from jitkern.op.gradient import Gradient


class CppRecorder(NamedTuple):
    """The functions of the loaded node, `recorder.cpp`.

    record: the address of its C++ function. recording: whether this thread is inside the forward of
    a call that it records. gradient: returns the address of a gradient as C++ has it.
    """

    record: int
    recording: Callable[[], bool]
    gradient: Callable[..., int]


class _RecordingDepth(threading.local):
    """The number of recorded calls that this thread is inside of."""

    value = 0


DEPTH = _RecordingDepth()
cpp: CppRecorder | None = None  # which records calls in place of Python, once it is loaded
GRADIENTS: dict[int, Gradient | None] = {}  # by the ops' slots at the Autograd key
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OTHERS = (torch.Tensor, list, tuple)  # a list may hold tensors
RECORDED = "recorded"
_keys = torch._C._dispatch_keys
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._is_tracing
_profiling = torch._C._autograd._profiler_enabled
_gradients_enabled = torch.is_grad_enabled


def recording() -> bool:
    """Whether this thread is inside the forward of an op whose gradient is recorded."""
    return DEPTH.value > 0 or (cpp is not None and cpp.recording())


@functools.cache
def _other_keys() -> int:
    """Return the dispatch keys of tensors that others see than Autograd and a backend."""
    return ~symbols().plain_keys


def plainly_on(args: Sequence[Any]) -> str:
    """Return the device type of a call that only a backend must see, or "" for another call.

    RECORDED for a call that Autograd must see, and nothing else above it.
    """
    if (
        forward_ad._current_level >= 0
        or _transforms_active()
        or _dispatch_modes()
        or _function_modes()
        or _tracing()
        or _profiling()
    ):
        return ""
    needed, device, other = False, "", _other_keys()
    for arg in args:
        if type(arg) in _PLAIN:
            if _keys(arg).raw_repr() & other:
                return ""
            needed = needed or arg.requires_grad
            device = "cuda" if arg.is_cuda else device or "cpu"
        elif isinstance(arg, _OTHERS):
            return ""
    return RECORDED if needed and _gradients_enabled() else device
