"""What Torch calls for an op: on a device type, and on all other devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, op as op_room, runtime
from jitkern._fork import after_fork
from jitkern.calls.signature import tensors_in
from jitkern.errors import DeclarationError, TargetError
from jitkern.launch.devices import Devices, Launcher
from jitkern.op.declaration import DeclaredOp
from jitkern.source.kinds import ITSELF

if TYPE_CHECKING:
    from jitkern.op.dispatch import Implementation

_making = threading.Lock()
after_fork(_making)
_KEYS = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    "meta": torch._C.DispatchKeySet(torch._C.DispatchKey.Meta),
}


class Backend:
    """The function that is registered once per op and device type, and never replaced.

    Its implementation is imported at the first call that no record serves.
    number: the op's slot in the launch runtime; None if Python serves all calls. launches: whether
    the op has kernels that C could launch, on a system that allows trampolines.
    """

    def __init__(self, op: DeclaredOp, device: str, *, launches: bool) -> None:
        self.op = op
        self.device = device
        self.number: int | None = None
        self.launches = launches
        self.devices = Devices(op.name, device)
        self._implementation: Implementation | None = None
        self._programs: runtime.programs.OpPrograms | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.op.signature.complete(args, kwargs)
        if self.programs and self._recalled(self.programs, args, kwargs):
            with torch._C._AutoDispatchBelowAutograd():
                return self.op.overload(*args, **kwargs)  # comes here again on another miss
        return self.implementation(args, kwargs)

    def _recalled(
        self, programs: runtime.programs.OpPrograms, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Append the next recorded program for such calls; returns whether there was one."""
        op, declaration, made = self.op, self.op.declaration, self._implementation
        if not op.is_settled(declaration):
            return False
        source = next(iter(op.sources_on(self.device)), None)
        if source is None or source.runs == ITSELF or (made and made.pinned):
            return False
        if not config.c_may_serve() or config.current().record is not None:
            return False  # recordings need each call to come here once
        device = self.devices.device_of((*args, *kwargs.values()))
        try:
            function = op.launch_function(source, self.device)
            target = self.devices.target(device.index)
            launcher = Launcher(function, source, target, device)
        except (DeclarationError, TargetError):
            return False  # the implementation will tell
        ordered = op.signature.in_order(args, kwargs)
        state = programs.state_of(source, device, ordered)
        if not op.is_settled(declaration):
            return False  # a later declaration forgets `state`, and this one came before them
        return programs.recall(state, launcher, ordered) and runtime.binding.runtime() is not None

    @property
    def programs(self) -> runtime.programs.OpPrograms | None:
        """The op's programs in the launch runtime; None if C cannot launch its kernels."""
        if self._programs is None and self.number is not None:
            with _making:
                if self._programs is None:
                    self._programs = runtime.programs.OpPrograms(self.number, self.op.signature)
        return self._programs

    @property
    def implementation(self) -> Implementation:
        """The implementation, which runs the op by the declaration that serves this thread."""
        op, declaration, programs = self.op, self.op.declaration, self.programs
        with _making:
            made = self._implementation
            if made is None or made.op.declaration is not declaration:
                if programs is None and self.launches:
                    runtime.binding.say_why_not()
                if made is not None:
                    self.devices = Devices(op.name, self.device)  # whose runners know the sources
                made = op_room.dispatch.Implementation(
                    DeclaredOp(op.signature, declaration), self.devices, programs,
                    lambda: op.is_settled(declaration),
                )  # fmt: skip
                self._implementation = made
            return made

    def forget(self) -> None:
        """Forget all that was made from the declaration, also where it stays the same."""
        with _making:
            self.devices, self._implementation = Devices(self.op.name, self.device), None
        self.stop_programs()

    def stop_programs(self) -> None:
        """Leave all calls to Python until other programs are traced."""
        if self._programs:
            self._programs.forget()


class FallbackKernel:
    """The reference on all other devices, and the choice of a device for calls without tensors.

    A call without tensors runs on

    1. the device of its `Device` argument;
    2. the only device that the op has kernels for, if this machine has it;
    3. Torch's default device (`torch.set_default_device`), else the CPU.
    """

    def __init__(self, op: DeclaredOp) -> None:
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
