"""Guard bytes around the tensors of a call, which tell of a kernel that writes outside of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern.named_tuple import NamedTuple

_BYTES = 4096  # on each side: a multiple of every alignment
_ALIGNMENT = 256  # of an address, which a copy keeps
# Large numbers in every dtype, so that what is read outside spoils a result. Each buffer has a
# different one: a kernel that copies what it reads beyond a tensor is seen to write beyond another.
_FILLS = range(0x74, 0x7C)


class GuardedTensor(NamedTuple):
    """A tensor inside a buffer: its bytes are those from `first` to `last`, the others `fill`."""

    what: str
    tensor: torch.Tensor
    buffer: torch.Tensor
    first: int
    last: int
    fill: int


class GuardBytes(TorchDispatchMode):
    """A mode in which each tensor that PyTorch allocates lies between guard bytes.

    It sees the functions of ATen that a launch function calls, and returns copies of new tensors;
    those without values, as of `torch.empty`, are filled like the guard bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guarded: list[GuardedTensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        shares = torch._C._any_output_is_alias_to_input_or_output
        if type(result) is not torch.Tensor or shares(args, kwargs, (result,)):
            return result
        return self.around(result, "a tensor of the launch function", copy="empty" not in str(func))

    def around(self, tensor: torch.Tensor, what: str, *, copy: bool = True) -> torch.Tensor:
        """Return a copy of a tensor between guard bytes, its strides and alignment kept."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return tensor
        shape, strides = tensor.shape, tensor.stride()
        span = sum((n - 1) * s for n, s in zip(shape, strides)) + 1 if tensor.numel() else 0
        first = _BYTES + tensor.data_ptr() % _ALIGNMENT
        last = first + span * tensor.element_size()
        fill = _FILLS[len(self._guarded) % len(_FILLS)]
        buffer = torch.full((last + _BYTES,), fill, dtype=torch.uint8, device=tensor.device)
        inside = buffer[first:last].view(tensor.dtype)
        if copy:
            inside.copy_(tensor.detach().as_strided((span,), (1,)))
        inside = inside.as_strided(shape, strides, inside.storage_offset())
        self._guarded.append(GuardedTensor(what, inside, buffer, first, last, fill))
        return inside

    def check(self, results: Mapping[str, torch.Tensor]) -> None:
        """Raise AssertionError for guard bytes that were written, with the name of the tensor."""
        names = {t.untyped_storage().data_ptr(): f"result `{n}`" for n, t in results.items()}
        for what, tensor, buffer, first, last, fill in self._guarded:
            size = tensor.element_size()
            sides = ("before its beginning", 0, first), ("after its end", last, len(buffer))
            for side, start, stop in sides:
                bytes_ = (buffer[start:stop] != fill).nonzero() + start - first
                written = (bytes_ // size).unique()  # some bytes of an element may be as before
                if not len(written):
                    continue
                name = names.get(buffer.untyped_storage().data_ptr(), what)
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise AssertionError(
                    f"{name}, {dtype}{[*tensor.shape]} of {last - first} bytes: the kernel wrote "
                    f"{side}, {len(written) * size} bytes from byte {int(written[0]) * size} on"
                )
