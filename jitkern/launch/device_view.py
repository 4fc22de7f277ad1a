"""The device of a launch function as `k` shows it: its facts, and memory that it keeps."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from jitkern import launch
from jitkern.launch.device_facts import present, usual
from jitkern.target import EXAMPLE, Target


class Device(Protocol):
    """What a launch function may ask for beside launches."""

    def fact(self, name: str) -> Any:
        """Return a fact of the device, by its name in `device_facts.FACTS`. Raises LaunchError."""

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> Any:
        """Return `size` bytes of the workspace, from `start` on. Raises LaunchError."""


class PresentDevice:
    """A device of this machine."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self._target = target
        self._device = device

    def fact(self, name: str) -> Any:
        return present(name, self._target, self._device.index)

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> torch.Tensor:
        launch.workspaces.checked_count(size, dtype)
        memory = launch.workspaces.memory_of(self._device, start + size, zeroed=zeroed)
        return memory[start : start + size].view(dtype)


class AbsentDevice:
    """A device as fakes and prewarms see it, which launch nothing.

    target: by default that of an H100. index: the number of a GPU whose facts may be asked.
    """

    def __init__(self, target: Target | None = None, index: int | None = None) -> None:
        self._target = target or Target.parse(EXAMPLE)
        self._index = index

    def fact(self, name: str) -> Any:
        if self._index is None:
            return usual(name, self._target)
        return present(name, self._target, self._index)

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(size // dtype.itemsize, dtype=dtype, device="meta")


def faked(device: str, place: torch.device) -> AbsentDevice:
    """Return the device for a fake of a launch function: `place`, if its facts can be asked now.

    device: the type of device that the launch function is for. place: where the tensors are.
    """
    if device != "cuda":
        return AbsentDevice(Target.current())
    if place.type != "cuda" or not torch.cuda.is_initialized():
        return AbsentDevice()
    return AbsentDevice(Target.current("cuda", place.index), place.index or 0)
