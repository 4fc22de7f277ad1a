"""Lists of tensors as a launch function sees them while it is traced, and tables made of them.

The length is guarded when it is asked for, and a tensor when it is taken out: a launch function
that only passes the list to `k.tables` has a program that serves lists of other lengths, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from jitkern.launch.resources.tables import Table, check_alike, is_dense, parts, power_of_two
from jitkern.launch.symbols import Symbol, Unsupported
from jitkern.trace.program import TABLE
from jitkern.trace.program_builder import DTYPE_CODES, is_contiguous
from jitkern.trace.tensor_proxy import Memory, TensorProxy
from jitkern.trace.tracer import TensorMetadata, Tracer, table_words

_MOST_WORDS = 1 << 17  # of eight bytes, of all tables of a program


class TensorList:
    """The list of tensors at one place among the arguments."""

    def __init__(
        self, tracer: Tracer, place: int, label: str, metadata: Sequence[TensorMetadata],
        *, changes: bool,
    ) -> None:  # fmt: skip
        self._tracer = tracer
        self._place = place
        self._label = label
        self._metadata = metadata
        self._changes = changes
        self._proxies: dict[int, TensorProxy] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return list

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of its tensors; without a guard, as those that are used have one each."""
        return [tensor.dtype for tensor in self._metadata]

    def _is(self, name: str, operand: int, *, answer: bool = True) -> None:
        """Guard the answer to a comparison of a number with the length: `operand < length`."""
        facts = self._tracer.facts
        facts.guard(name, facts.constant(operand), facts.value("COUNT", self._place), int(answer))

    def __len__(self) -> int:
        self._is("EQUAL", len(self._metadata))
        return len(self._metadata)

    def __bool__(self) -> bool:
        some = bool(self._metadata)
        self._is("EQUAL", 0, answer=not some)
        return some

    def __iter__(self) -> Iterator[TensorProxy]:
        return iter([self._tensor(i) for i in range(len(self))])

    def __reversed__(self) -> Iterator[TensorProxy]:
        yield from reversed([*self])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [*self][index]
        if type(index) is int and 0 <= index < len(self._metadata):
            self._is("LESS", index)
            return self._tensor(index)
        return self._tensor(range(len(self))[index])

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"`{name}` of a list of tensors cannot be traced")

    def _refuse(self, *_: object) -> Any:
        raise Unsupported(
            f"the list `{self._label}` can be asked for its length and its tensors; a change, a "
            "comparison or the text of the list cannot be traced"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = __mul__ = __rmul__ = __repr__ = _refuse

    def _tensor(self, index: int) -> TensorProxy:
        """Return a tensor of the list, which is long enough by a guard."""
        if index not in self._proxies:
            number = self._tracer.tensors
            self._tracer.tensors += 1
            self._tracer.facts.guard("LISTED", number, self._place, index)
            self._proxies[index] = self._tracer.tensor(
                number, f"{self._label}[{index}]", self._metadata[index], changes=self._changes
            )
        return self._proxies[index]

    def tables(self, lists: Sequence[Any], chunk: int, most: int, *, dense: bool) -> list[Any]:
        """Return the tables of these lists; this one is the first that is an argument."""
        if any(type(items) is not TensorList for items in lists):
            raise Unsupported("k.tables() of anything but an argument cannot be traced")
        metadata = [items._metadata for items in lists]
        for tensor in (tensor for tensors in metadata for tensor in tensors):
            if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_CODES:
                raise Unsupported(f"a table of {tensor.layout} {tensor.dtype} cannot be traced")
            if not _is_packable(tensor, dense=dense):
                raise Unsupported("a table of tensors with gaps cannot be traced")
        check_alike([[_numel(tensor) for tensor in tensors] for tensors in metadata])
        listed = parts([[tensor.dtype for tensor in tensors] for tensors in metadata], most)
        if not listed:
            for items in lists:
                bool(items)  # guarded to be empty
            return []
        words = sum(table_words(capacity) for *_, capacity, _ in listed) * len(lists)
        self._tracer.table_words += words
        if self._tracer.table_words > _MOST_WORDS:
            raise Unsupported("tables of more than a megabyte cannot be traced")
        first, places = self._tracer.tabulate(
            [items._place for items in lists], listed, chunk, dense=dense
        )
        made = []
        for i, ((_, part, capacity, _), words) in enumerate(zip(listed, places)):
            tables = []
            for place, tensors in enumerate(metadata):
                own = [tensors[j] for j in part]
                where = (first + i * TABLE, place, words + place * table_words(capacity))
                tables.append(_TracedTable(self._tracer, where, own, capacity, chunk))
            made.append(tuple(tables))
        return [tables[0] for tables in made] if len(lists) == 1 else [*made]


class _TracedTable(Table):
    """A table that each call fills.

    where: the place of the table in memory, the number of its list, and the place of its words.
    """

    def __init__(
        self, tracer: Tracer, where: tuple[int, int, int], metadata: Sequence[TensorMetadata],
        capacity: int, chunk: int,
    ) -> None:  # fmt: skip
        self._tracer = tracer
        self._metadata = metadata
        self._table, self._list, self._words = where
        self._chunk = chunk
        self.dtype = metadata[0].dtype
        self.capacity = capacity
        self.count: Any = self._symbol("count", 2, len(metadata))

    def _symbol(self, name: str, field: int, hint: int) -> Symbol:
        at = self._tracer.facts.value("FIELD", self._table + field)
        return self._tracer.symbol(at, hint, f"`{name}` of a table", natural=True)

    @property
    def chunks(self) -> Any:
        """The number of chunks."""
        return self._symbol("chunks", 1, sum(-(-_numel(t) // self._chunk) for t in self._metadata))

    def aligned(self, bytes: int) -> bool:  # noqa: A002
        """Whether the addresses of all tensors are multiples of a power of 2, in bytes."""
        mask = power_of_two(bytes) - 1
        answer = all(tensor.address & mask == 0 for tensor in self._metadata)
        facts = self._tracer.facts
        bits = facts.value("FIELD", self._table + 3 + self._list)
        facts.guard("MASKED", bits, facts.constant(mask), int(not answer))
        return answer

    def fault(self, _: torch.device) -> str:
        """Return "": the program looks at all tensors itself."""
        return ""

    def parameter(self) -> int:
        """Return the register of the address of a CUDA kernel's parameter."""
        return self._tracer.facts.value("MEMORY", self._words)

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return the addresses, the sizes and the count, for C and C++."""
        facts = self._tracer.facts
        addresses = [
            facts.value("MEMORY", place) for place in (self._words, self._words + self.capacity)
        ]
        pointers = [
            TensorProxy(
                self._tracer, Memory(None, address, None), torch.int64, (self.capacity,), (1,),
                contiguous=True,
            )
            for address in addresses
        ]  # fmt: skip
        return pointers[0], pointers[1], self.count


def _numel(tensor: TensorMetadata) -> int:
    return math.prod(tensor.shape)


def _is_packable(tensor: TensorMetadata, *, dense: bool) -> bool:
    return is_dense(tensor) if dense else is_contiguous(tensor.shape, tensor.strides)
