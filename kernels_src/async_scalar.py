"""Asynchronous copies of tensors from a device to the host."""

from __future__ import annotations

from typing import Any

import torch

from jitkern.named_tuple import NamedTuple


class _Copy(NamedTuple):
    """A copy under way: its memory, the event behind it in its stream, and its number."""

    host: torch.Tensor
    done: torch.cuda.Event
    number: int


class AsyncScalar:
    """The newest value of a tensor that has reached the host.

    `.put(tensor)` begins a copy, `.poll()` returns the newest value whose copy has ended. Neither
    waits for the device, as `tensor.item()` does, so a polled value is a few steps old. A value is
    a number for a tensor of one element, else a list, as from `Tensor.tolist`. The value of a CPU
    tensor is available at once.

    number: which `put` the value of the last `poll` or `wait` comes from, counted from 1; 0 before
        there is a value.

    Use an object in one thread only. During the capture of a CUDA graph `put` is not possible: put
    after each replay.
    """

    def __init__(self) -> None:
        self.number = 0
        self._puts = 0
        self._value: Any = None
        self.under_way: list[_Copy] = []  # the oldest first

    def put(self, tensor: torch.Tensor) -> None:
        """Begin to copy the value that a tensor has at this point of the current stream.

        Later changes of the tensor do not matter. Never waits, but that the first copies allocate
        pinned memory, for which CUDA may wait.
        """
        self._puts += 1
        tensor = tensor.detach()
        if not tensor.is_cuda:
            self.under_way.clear()
            self._take(tensor, self._puts)
            return
        with torch.cuda.device(tensor.device):
            # Torch keeps pinned memory, and uses it again once the copies into it have ended.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.under_way.append(_Copy(host, done, self._puts))

    def poll(self) -> Any:
        """Return the newest value that has reached the host, or None if none has; never wait.

        The same value is returned until a newer one is there.
        """
        for place in reversed(range(len(self.under_way))):
            copy = self.under_way[place]
            if copy.done.query():
                del self.under_way[: place + 1]
                self._take(copy.host, copy.number)
                break
        return self._value

    def wait(self) -> Any:
        """Return the value that was put last, waiting for it; None if none was put."""
        if self.under_way:
            self.under_way[-1].done.synchronize()
        return self.poll()

    def _take(self, host: torch.Tensor, number: int) -> None:
        self._value = (host.reshape(()) if host.numel() == 1 else host).tolist()
        self.number = number
