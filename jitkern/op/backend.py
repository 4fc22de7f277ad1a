"""The functions of an op on a device type, and on all others; no kernel is launched here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import after_fork, op as room
from jitkern.calls.signature import tensors_in

if TYPE_CHECKING:
    from jitkern.op.dispatch import Implementation
    from jitkern.op.op import Op

_making = threading.Lock()
after_fork(_making)
_KEYS = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    "meta": torch._C.DispatchKeySet(torch._C.DispatchKey.Meta),
}


class Backend:
    """The function that is registered once per op and device type, and never replaced.

    Its implementation is imported at the first call.
    number: the op's slot in the launch runtime; None if Python serves all calls. launches: whether
    the op has kernels that stubs could launch, on a system that allows trampolines.
    """

    def __init__(self, op: Op, device: str, *, launches: bool) -> None:
        self.op = op
        self.device = device
        self.number: int | None = None
        self.launches = launches
        self._implementation: Implementation | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._implementation or self.implementation)(*args, **kwargs)

    @property
    def implementation(self) -> room.dispatch.Implementation:
        """The implementation, which runs the op."""
        with _making:
            if self._implementation is None:
                self._implementation = room.dispatch.Implementation(self)
        return self._implementation

    def forget(self) -> None:
        """Forget all that was made from an earlier launch function."""
        if self._implementation:
            self._implementation.forget()


class Elsewhere:
    """The reference on all other devices, and the choice of a device for calls without tensors.

    A call without tensors runs on

    1. the device of its `Device` argument;
    2. the only device that the op has kernels for, if this machine has it;
    3. Torch's default device (`torch.set_default_device`), else the CPU.
    """

    def __init__(self, op: Op, implementations: Mapping[str, Callable[..., Any]]) -> None:
        self.op = op
        self.implementations = implementations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.op.signature.complete(args, kwargs)
        arguments = (*args, *kwargs.values())
        if tensors_in(arguments):
            return self.op.run_reference(*args, **kwargs)
        device = self._device(arguments)
        if device in _KEYS:
            return self.op.overload.redispatch(_KEYS[device], *args, **kwargs)
        if device in self.implementations:  # C takes the index of a CUDA device from tensors
            return self.implementations[device](*args, **kwargs)
        return self.op.run_reference(*args, **kwargs)

    def _device(self, arguments: Sequence[Any]) -> str:
        for value in arguments:
            if isinstance(value, torch.device):
                return value.type
        able = [device for device, sources in self.op.sources.items() if sources]
        if len(able) == 1 and (able[0] == "cpu" or torch.cuda.is_available()):
            return able[0]
        # Torch disables the mode of a default device during a call, so its getter returns "cpu".
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return context.device.type if context else "cpu"


def meta_result(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of the op's fake for these arguments, all of them on the meta device."""
    return op.overload.redispatch(_KEYS["meta"], *args, **kwargs)
