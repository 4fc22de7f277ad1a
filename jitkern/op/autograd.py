"""The function of an op at its Autograd key, which records a call only if a gradient needs it.

The function is registered at declaration and never replaced; `Op.backward` adds the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitkern import op as op_room
from jitkern.op import recording
from jitkern.op.recording import RECORDED, plainly_on

if TYPE_CHECKING:
    from jitkern.op.declaration import DeclaredOp
    from jitkern.op.gradient import Gradient


class Autograd:
    """The function that Torch calls for an op at its Autograd key.

    A call that needs no gradient goes on to the backend. For one that needs a gradient
    `autograd_functions` has

    1. the reference, for forward-mode differentiation;
    2. the gradient that `Op.backward` declared;
    3. the reference again, where a backward is itself differentiated;
    4. a node that raises when a backward pass comes to it.

    slot: the op's slot in the launch runtime at this key; None if Python serves all calls.
    """

    def __init__(self, op: DeclaredOp) -> None:
        self.op = op
        self.slot: int | None = None

    def follow(self, gradient: Gradient | None) -> None:
        """Let C++ record calls with this gradient from now on; None: leave them to Python."""
        if self.slot is not None:
            recording.GRADIENTS[self.slot] = gradient
            if recording.cpp:
                op_room.recorder.follow(recording.cpp, self.slot)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = "" if kwargs else plainly_on(args)
        if device and device is not RECORDED:
            with torch._C._AutoDispatchBelowAutograd():
                return self.op.backends[device](*args)
        while True:
            declaration = self.op.declaration
            gradient = declaration.gradient
            if device and gradient is not None and gradient.order:
                complete, _ = self.op.signature.complete(args, {})
                result = op_room.autograd_functions.record(self.op, gradient, *complete)
                op_room.recorder.count(self.slot, gradient)
            else:
                result = op_room.autograd_functions.apply(self.op, args, kwargs)
            if gradient is None or self.op.declaration is declaration:
                return result  # else it is of two declarations; the op changes no argument
