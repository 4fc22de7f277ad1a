"""The functions of an op on a device type, and on all others; no kernel is launched here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import after_fork, config, op as room, runtime
from jitkern.calls.signature import tensors_in
from jitkern.source.kinds import ITSELF

if TYPE_CHECKING:
    from jitkern.op.dispatch import Implementation
    from jitkern.op.op import Op

_CPU = torch.device("cpu")
_making = threading.Lock()
after_fork(_making)
_KEYS = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    "meta": torch._C.DispatchKeySet(torch._C.DispatchKey.Meta),
}


class Backend:
    """The function that is registered once per op and device type, and never replaced.

    Its implementation is imported at the first call that no receipt serves.
    number: the op's slot in the launch runtime; None if Python serves all calls. launches: whether
    the op has kernels that stubs could launch, on a system that allows trampolines.
    """

    def __init__(self, op: Op, device: str, *, launches: bool) -> None:
        self.op = op
        self.device = device
        self.number: int | None = None
        self.launches = launches
        self._implementation: Implementation | None = None
        self._slot: runtime.slot.Slot | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        implementation = self._implementation
        if implementation is None:
            args, kwargs = self.op.signature.complete(args, kwargs)
            if self._recalled(args, kwargs):
                with torch._C._AutoDispatchBelowAutograd():
                    return self.op.overload(*args, **kwargs)  # comes here again on another miss
            implementation = self.implementation
        return implementation(*args, **kwargs)

    def _recalled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a receipt had a variant for calls like this one."""
        declaration = self.op.declaration
        sources = declaration.sources.get(self.device, ())
        if not self.slot or not sources or declaration.tunings:
            return False
        preferred = config.preferred()
        source = min(sources, key=lambda source: source.kind != preferred)
        launchers = declaration.launchers
        function = launchers.get(source.kind) or launchers.get(self.device)
        ordered = self.op.signature.in_order(args, kwargs)
        devices = [t.device for t in tensors_in(ordered) if t.device.type == self.device]
        if source.runs == ITSELF or function is None or not devices:
            return False
        device = _CPU if self.device == "cpu" else devices[0]
        calls = self.slot.calls(source, device, ordered)
        if self.op.declaration is not declaration:
            return False  # a later declaration forgets `calls`, and this one came before them
        return runtime.recall.recall(self.slot, calls, source, function, device, ordered)

    @property
    def slot(self) -> runtime.slot.Slot | None:
        """The op's place in the launch runtime; None if no stub can launch its kernels."""
        if self._slot is None and self.number is not None:
            with _making:
                if self._slot is None:
                    self._slot = runtime.slot.Slot(self.number, self.op.signature)
        return self._slot

    @property
    def implementation(self) -> room.dispatch.Implementation:
        """The implementation, which runs the op."""
        slot = self.slot
        with _making:
            if self._implementation is None:
                self._implementation = room.dispatch.Implementation(self, slot)
        return self._implementation

    def forget(self) -> None:
        """Forget all that was made from an earlier launch function."""
        if self._implementation:
            self._implementation.forget()
        if self._slot:
            self._slot.forget()


class Elsewhere:
    """The reference on all other devices, and the choice of a device for calls without tensors.

    A call without tensors runs on

    1. the device of its `Device` argument;
    2. the only device that the op has kernels for, if this machine has it;
    3. Torch's default device (`torch.set_default_device`), else the CPU.
    """

    def __init__(self, op: Op) -> None:
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.op.signature.complete(args, kwargs)
        arguments = (*args, *kwargs.values())
        if tensors_in(arguments):
            return self.op.run_reference(*args, **kwargs)
        device = self._device(arguments)
        if device in _KEYS:
            return self.op.overload.redispatch(_KEYS[device], *args, **kwargs)
        if device in self.op.backends:  # C takes the index of a CUDA device from tensors
            return self.op.backends[device](*args, **kwargs)
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
