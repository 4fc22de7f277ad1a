"""The devices that the kernels of an op run on: their targets and Runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import launch
from jitkern.calls.signature import tensors_in
from jitkern.source.kinds import Source
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.launch.runner import Runner

_CPU = torch.device("cpu")


class Devices:
    """The devices of one type, for the kernels of one op.

    op: its name in messages. target: the target to compile for, by default that of each device.
    """

    def __init__(self, op: str, type: str, target: Target | None = None) -> None:  # noqa: A002
        self.op = op
        self.type = type
        self._targets: dict[int | None, Target] = {}
        self._only = target
        self._runners: dict[tuple[int, int | None], Runner] = {}  # by the ids of sources

    def device_of(self, args: Sequence[Any]) -> torch.device:
        """Return the device that a call with these arguments runs on."""
        if self.type == "cpu":
            return _CPU
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.is_cuda:
                return arg.device
        devices = [tensor.device for tensor in tensors_in(args)]  # of lists too
        devices += [arg for arg in args if isinstance(arg, torch.device) and arg.index is not None]
        for device in devices:
            if device.type == self.type:
                return device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda")

    def target(self, index: int | None = None) -> Target:
        """Return the target of the device with this index. Raises TargetError."""
        if self._only:
            return self._only
        if index not in self._targets:
            self._targets[index] = Target.current(self.type, index)
        return self._targets[index]

    def runner(self, source: Source, device: torch.device) -> Runner:
        """Return the Runner of a source on a device. Raises TargetError."""
        key = (id(source), device.index)
        runner = self._runners.get(key)
        if runner is None:
            new = launch.runner.Runner(self.op, source, self.target(device.index), device)
            runner = self._runners.setdefault(key, new)
        return runner
