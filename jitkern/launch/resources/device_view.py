"""The device of a launch function as `k` shows it: its facts, and memory that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from jitkern import launch, loading
from jitkern.errors import LaunchError
from jitkern.launch.call import checked_address
from jitkern.launch.resources.device_facts import present, usual
from jitkern.launch.resources.tensor_maps import TensorMap, layout_of, options_of
from jitkern.target import EXAMPLE, Target


class Device(Protocol):
    """Protocol of a device: its facts and resources, beside launches."""

    def fact(self, name: str) -> Any:
        """Return a fact of the device, by its name in `device_facts.FACTS`. Raises LaunchError."""

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> Any:
        """Return `size` bytes of the workspace, from `start` on. Raises LaunchError."""

    def tensor_map(
        self, x: Any, box: Sequence[Any], swizzle: str, l2_promotion: str, oob_fill: str
    ) -> TensorMap:
        """Return a map of a tensor: see `Kernels.tensor_map`. Raises LaunchError."""


class PresentDevice:
    """A device of this machine."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self._target = target
        self._device = device

    def fact(self, name: str) -> Any:
        return present(name, self._target, self._device.index)

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> torch.Tensor:
        launch.resources.workspaces.checked_count(size, dtype)
        memory = launch.resources.workspaces.memory_of(self._device, start + size, zeroed=zeroed)
        return memory[start : start + size].view(dtype)

    def tensor_map(
        self, x: Any, box: Sequence[Any], swizzle: str, l2_promotion: str, oob_fill: str
    ) -> TensorMap:
        options = options_of(self._target, x, box, swizzle, l2_promotion, oob_fill)
        if x.device != self._device:
            raise LaunchError(f"k.tensor_map(): x must be on {self._device}, and is on {x.device}")
        address, layout = checked_address("k.tensor_map()", x), layout_of(x)
        encoded = loading.cuda_driver.encoded_map(
            options, address, layout.sizes, layout.strides, tuple(reversed(box))
        )
        return TensorMap(x, encoded)


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

    def tensor_map(
        self, x: Any, box: Sequence[Any], swizzle: str, l2_promotion: str, oob_fill: str
    ) -> TensorMap:
        options_of(self._target, x, box, swizzle, l2_promotion, oob_fill)
        return TensorMap(x, None)  # whose sizes may be symbols of torch.compile


def faked(device: str, place: torch.device) -> AbsentDevice:
    """Return the device for a fake of a launch function: `place`, if its facts are available.

    device: the type of device that the launch function is for. place: where the tensors are.
    """
    if device != "cuda":
        return AbsentDevice(Target.current())
    if place.type != "cuda" or not torch.cuda.is_initialized():
        return AbsentDevice()
    return AbsentDevice(Target.current("cuda", place.index), place.index or 0)
