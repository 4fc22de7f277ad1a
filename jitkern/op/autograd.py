"""The function of an op at its Autograd key, which records a call only if a gradient needs it.

The function is registered at declaration and never replaced; `Op.backward` adds the gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from jitkern import op as room
from jitkern.runtime.symbols import symbols

if TYPE_CHECKING:
    from jitkern.op.gradient import Gradient
    from jitkern.op.op import Op


class _Depth(threading.local):
    """The number of recorded calls that this thread is inside of."""

    value = 0


class _InC:
    """The C++ that records calls in place of Python, once it is loaded."""

    recorder: room.recorder.Recorder | None = None


DEPTH = _Depth()
IN_C = _InC()
ALL: list[Autograd] = []  # of all ops
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OTHERS = (torch.Tensor, list, tuple)  # a list may hold tensors
RECORDED = "recorded"
_keys = torch._C._dispatch_keys
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_gradients_enabled = torch.is_grad_enabled


def recording() -> bool:
    """Whether this thread is inside the forward of an op whose gradient is recorded."""
    return DEPTH.value > 0 or (IN_C.recorder is not None and IN_C.recorder.recording())


class Autograd:
    """The function that Torch calls for an op at its Autograd key.

    A call that needs no gradient goes on to the backend. For one that needs a gradient `nodes` has

    1. the reference, for forward-mode differentiation;
    2. the gradient that `Op.backward` declared;
    3. the reference again, where a backward is itself differentiated;
    4. a node that raises when a backward pass comes to it.

    slot: the op's slot in the launch runtime at this key; None if Python serves all calls.
    by_c: whether C++ could record calls with the present gradient; None if nobody has asked.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.gradient: Gradient | None = None
        self.slot: int | None = None
        self.by_c: bool | None = None
        ALL.append(self)

    def differentiate(self, gradient: Gradient | None) -> None:
        """Record calls with this gradient from now on."""
        self.gradient, self.by_c = gradient, None
        if IN_C.recorder:
            IN_C.recorder.follow(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and (device := plainly_on(args)):
            if device is not RECORDED:
                with torch._C._AutoDispatchBelowAutograd():
                    return self.op.backends[device](*args)
            gradient = self.gradient
            if gradient is not None and gradient.order:
                room.recorder.count(self)
                args, _ = self.op.signature.complete(args, {})
                return room.nodes.record(self.op, gradient, *args)
        return room.nodes.called(self, args, kwargs)


def plainly_on(args: Sequence[Any]) -> str:
    """Return the device type of arguments that only a backend must see, or "" for others.

    RECORDED for arguments that autograd must see, and nothing else above it.
    """
    if (
        forward_ad._current_level >= 0
        or _transforms_active()
        or _dispatch_modes()
        or _function_modes()
    ):
        return ""
    needed, device, other = False, "", ~symbols().plain_keys
    for arg in args:
        if type(arg) in _PLAIN:
            if _keys(arg).raw_repr() & other:
                return ""
            needed = needed or arg.requires_grad
            device = "cuda" if arg.is_cuda else device or "cpu"
        elif isinstance(arg, _OTHERS):
            return ""
    return RECORDED if needed and _gradients_enabled() else device
