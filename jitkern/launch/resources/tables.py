"""Tables of tensors: the addresses and sizes of lists of tensors as an argument of one launch.

A table is passed by value, as ATen's `multi_tensor_apply` passes its lists: a CUDA kernel takes it
as `jitkern::Table<T, N>` (`tensor_table.h`), a function in C or C++ as `T *const *data, const long
*numel, long count`. N, the capacity, is a template argument, so it has few values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from jitkern.errors import LaunchError
from jitkern.launch.call import is_lazy
from jitkern.launch.flat import address_of
from jitkern.launch.symbols import Unsupported, running
from jitkern.source.dtypes import table_of

CAPACITIES = (32, 128, 512, 1024)
STEP, LISTS = 32, 8  # `most` is a multiple of STEP; LISTS of program.c
_CHUNKS = 2**31  # of a table, as of a grid
Tables = list[Any]  # of a Table, or of a tuple of one for each list


class Table:
    """The tensors of one dtype in a list, up to `capacity` of them.

    chunks: the number of pieces of `chunk` elements that the tensors have, each its own ones: the
    `grid` of a kernel that does one of them in a block.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], capacity: int, chunk: int, *, dense: bool
    ) -> None:
        self._tensors, self._chunk, self._dense = tensors, chunk, dense
        self.dtype = tensors[0].dtype
        self.capacity = capacity
        self.count = len(tensors)

    @property
    def chunks(self) -> Any:
        """The number of chunks."""
        return sum(-(-tensor.numel() // self._chunk) for tensor in self._tensors)

    def aligned(self, bytes: int) -> bool:  # noqa: A002
        """Whether the addresses of all tensors are multiples of a power of 2, in bytes."""
        return all(address_of(tensor) % power_of_two(bytes) == 0 for tensor in self._tensors)

    def check(self, device: torch.device) -> None:
        """Raise LaunchError for tensors that no kernel takes; of symbolic sizes the launch does."""
        numbers = (n for tensor in self._tensors for n in (*tensor.shape, *tensor.stride()))
        if all(type(n) is int for n in numbers) and (fault := self.fault(device)):
            raise LaunchError(f"a table of k.tables() cannot be passed: {fault}")

    def fault(self, device: torch.device) -> str:
        """Return why a kernel on a device cannot take the table, or ""."""
        for i, tensor in enumerate(self._tensors):
            place = tensor.device
            other = place.type != device.type or device.index not in (None, place.index)
            if other and not tensor.is_meta:  # which stands for one of the device, in a prewarm
                return f"tensor {i} is on {place}"
            if not (is_dense if self._dense else torch.Tensor.is_contiguous)(tensor):
                wanted = "has gaps" if self._dense else "is not contiguous"
                return f"tensor {i}, of strides {tensor.stride()}, {wanted}: pass a contiguous()"
            if is_lazy(tensor):
                return f"tensor {i} is a lazy conj() or imag: pass x.resolve_conj().resolve_neg()"
        return "" if self.chunks < _CHUNKS else f"it has {self.chunks} chunks: use larger ones"

    def packed(self, code: str) -> bytes:
        """Return the parameter of this code (see `dtypes.table_of`) as C passes it."""
        found = table_of(code)
        assert found
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if code[0] == "&":
            return struct.pack(f"{len(addresses)}Q", *addresses).ljust(found[2], b"\0")
        room, first = self.capacity - self.count, [0]
        for tensor in self._tensors:
            first.append(first[-1] - (-tensor.numel() // self._chunk))
        return b"".join((
            struct.pack(f"{self.count}Q{8 * room}x", *addresses),
            struct.pack(f"{self.count}q{8 * room}x", *(t.numel() for t in self._tensors)),
            struct.pack(f"{self.count + 1}i{4 * room}xi", *first, self.count),
        ))  # fmt: skip

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return the addresses and sizes, as tensors of int64, and the count, for C and C++.

        Raises LaunchError for tensors that no table takes.
        """
        self.check(torch.device("cpu"))
        addresses = [address_of(tensor) for tensor in self._tensors]
        numel = [tensor.numel() for tensor in self._tensors]
        return torch.tensor(addresses), torch.tensor(numel), self.count


def tables_of(
    lists: Sequence[Sequence[torch.Tensor]], chunk: int, most: int, *, dense: bool
) -> Tables:
    """Return the tables of lists; see `Kernels.tables`."""
    if not 1 <= len(lists) <= LISTS or not all(hasattr(items, "__len__") for items in lists):
        raise LaunchError(f"k.tables() takes 1 to {LISTS} lists of tensors, got {len(lists)}")
    if type(chunk) is not int or chunk < 1:
        raise LaunchError(f"k.tables(): chunk must be a whole number from 1 up, got {chunk!r}")
    if type(most) is not int or most < 1 or most % STEP:
        raise LaunchError(f"k.tables(): most must be a positive multiple of {STEP}, got {most!r}")
    for items in lists:
        if hasattr(type(items), "tables"):  # `trace.lists.TensorList`
            made: Any = items
            return made.tables(lists, chunk, most, dense=dense)  # type: ignore[no-any-return]
    if running.facts is not None and any(map(len, lists)):
        raise Unsupported("k.tables() of anything but an argument cannot be traced")
    check_alike([[tensor.numel() for tensor in items] for items in lists])
    tables = [
        tuple(Table([items[i] for i in part], capacity, chunk, dense=dense) for items in lists)
        for _, part, capacity, _ in parts([[t.dtype for t in items] for items in lists], most)
    ]
    return [of_list for (of_list,) in tables] if len(lists) == 1 else [*tables]


def check_alike(sizes: Sequence[Sequence[int]]) -> None:
    """Raise LaunchError unless the i-th tensors of all lists have one number of elements."""
    if len({len(numels) for numels in sizes}) > 1:
        raise LaunchError(f"k.tables(): the lists have {[*map(len, sizes)]} tensors: pass as many")
    for i, numels in enumerate(zip(*sizes)):
        if len(numels) > 1 and any(numel != numels[0] for numel in numels[1:]):
            raise LaunchError(f"k.tables(): the tensors {i} of the lists have {numels} elements")


def parts(
    dtypes: Sequence[Sequence[Any]], most: int
) -> list[tuple[tuple[Any, ...], list[int], int, int]]:
    """Return for each table its dtypes, positions, capacity, and the least count of this capacity.

    dtypes: of the tensors, for each list. Groups of dtypes come in the order of their first
    tensors; all tables of a group but the last are full.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, group in enumerate(zip(*dtypes)):
        groups.setdefault(group, []).append(i)
    result = []
    for group, positions in groups.items():
        for start in range(0, len(positions), most):
            part = positions[start : start + most]
            capacity = next((c for c in CAPACITIES if len(part) <= c < most), most)
            least = max((c for c in CAPACITIES if c < capacity), default=0) + 1
            result.append((group, part, capacity, least))
    return result


def power_of_two(number: int) -> int:
    """Return the number. Raises LaunchError unless it is a power of 2."""
    if type(number) is not int or number < 1 or number & (number - 1):
        raise LaunchError(f"aligned() takes a power of 2, got {number!r}")
    return number


def is_dense(tensor: Any) -> bool:
    """Whether a tensor, or a `TensorMetadata`, has its elements without gaps, in some order."""
    strides = tensor.strides if hasattr(tensor, "strides") else tensor.stride()
    sizes = [(stride, size) for stride, size in zip(strides, tensor.shape) if size != 1]
    expected = 1
    for stride, size in sorted(sizes):
        if stride != expected:
            return 0 in tensor.shape
        expected *= size
    return True


def spread(args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a function in C or C++, with three for each table."""
    return [one for arg in args for one in (arg.arrays() if isinstance(arg, Table) else (arg,))]
