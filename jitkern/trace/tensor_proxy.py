"""Tensors as a launch function sees them while it is traced.

A `TensorProxy` has the dtype, the rank and the device of the present call, and sizes, strides and
an address that stand for those of any later call. A launch function can ask for these, view the
tensor, allocate one like it and copy it; anything else is Unsupported.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from jitkern.launch.arguments import ALIGNMENT
from jitkern.launch.symbols import Unsupported, concrete, is_symbol
from jitkern.named_tuple import NamedTuple
from jitkern.trace.program_builder import DTYPE_CODES, ProgramBuilder, dense_strides, is_contiguous

_active = threading.local()  # `program`: that of this thread's trace


class Shape(tuple[Any, ...]):
    """A shape like torch.Size, which may hold Symbols."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Size

    def __repr__(self) -> str:
        return f"torch.Size({list(self)!r})"

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, item: Any) -> Any:
        sizes = super().__getitem__(concrete(item))
        return Shape(sizes) if isinstance(item, slice) else sizes

    def __add__(self, other: Any) -> Any:
        return Shape((*self, *other)) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Shape((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return Shape(super().__mul__(concrete(times)))

    __rmul__ = __mul__


class Memory(NamedTuple):
    """The memory of a tensor: an argument's, or an allocation of this call."""

    handle: int | None  # as an operand; None: there is none
    data: int  # the register of its address
    address: Any  # a Symbol for an argument; None for an allocation, which is always aligned


class Address:
    """The data_ptr() of an allocation, of which only the alignment is known."""

    def __init__(self, offset: Any) -> None:
        self._offset = offset

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __mod__(self, other: Any) -> Any:
        if type(other) is int and 0 < other <= ALIGNMENT and ALIGNMENT % other == 0:
            return self._offset % other
        raise Unsupported(f"the address of an allocation modulo {other} cannot be traced")

    def _refuse(self, *_: object) -> Any:
        raise Unsupported("the address of an allocation, beyond its alignment, cannot be traced")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __int__ = __index__ = __repr__ = _refuse


class TensorProxy:
    """A tensor of a launch function that is being traced."""

    dtype: torch.dtype
    device: torch.device
    shape: Shape
    layout: torch.layout
    ndim: int
    itemsize: int
    is_cuda: bool
    is_cpu: bool

    def __init__(
        self,
        program: ProgramBuilder,
        memory: Memory,
        dtype: torch.dtype,
        shape: Sequence[Any],
        strides: Sequence[Any],
        *,
        offset: Any = 0,
        argument: int | None = None,
        contiguous: bool = False,
    ) -> None:
        self._program = program
        self._memory = memory
        self.dtype = dtype
        self.device = program.device
        self.shape = Shape(shape)
        self._strides = tuple(strides)
        self._offset = offset  # in elements
        self._argument = argument  # its number, or None for a view or an allocation
        self._known_contiguous = contiguous
        self.layout = torch.strided
        self.ndim = len(self.shape)
        self.itemsize = dtype.itemsize
        self.is_cuda = self.device.type == "cuda"
        self.is_cpu = self.device.type == "cpu"
        self._traced = True

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Tensor

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"Tensor.{name} cannot be traced")

    def __bool__(self) -> bool:
        raise Unsupported("a tensor's value cannot be traced")

    def __eq__(self, _: object) -> bool:
        raise Unsupported("a comparison of a tensor's values cannot be traced")

    __ne__ = __eq__

    def __hash__(self) -> int:
        raise Unsupported("a tensor as a key cannot be traced")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_traced" in self.__dict__:
            raise Unsupported(f"setting Tensor.{name} cannot be traced")
        self.__dict__[name] = value

    def __len__(self) -> int:
        raise Unsupported("the length of a tensor cannot be traced: use its shape[0]")

    def __repr__(self) -> str:
        raise Unsupported("the text of a tensor cannot be traced")

    # ------------------------------------------------------------------ properties

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[self._position(dim)]

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[self._position(dim)]

    def element_size(self) -> int:
        return self.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def numel(self) -> Any:
        if self._argument is not None:
            return self._program.symbol(
                self._program.facts.value("NUMEL", self._argument),
                math.prod(s.hint for s in self.shape),
                "numel",
                natural=True,
            )
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> Any:
        return self.numel() * self.itemsize

    def data_ptr(self) -> Any:
        if self._argument is None and self.numel() == 0:
            return 0
        offset = self._offset * self.itemsize
        return Address(offset) if self._memory.address is None else self._memory.address + offset

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        if memory_format is not torch.contiguous_format:
            raise Unsupported(f"is_contiguous({memory_format}) cannot be traced")
        if self._known_contiguous:
            return True
        if self._argument is not None:
            answer = is_contiguous([s.hint for s in self.shape], [s.hint for s in self._strides])
            self._program.facts.guard("CONTIGUOUS", self._argument, int(answer))
            self.__dict__["_known_contiguous"] = answer
            return answer
        return all(
            bool(stride == step) or bool(size == 1)
            for size, stride, step in zip(self.shape, self._strides, dense_strides(self.shape))
        ) or bool(self.numel() == 0)

    # ------------------------------------------------------------------ views

    def view(self, *shape: Any) -> TensorProxy:
        dense = dense_strides(self.shape)
        if not all(bool(a == b) for a, b in zip(self._strides, dense)):
            raise Unsupported("a view of a tensor whose strides are not dense cannot be traced")
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        if any(isinstance(size, torch.dtype) for size in sizes):
            raise Unsupported("a view as another dtype cannot be traced")
        holes = [i for i, size in enumerate(sizes) if type(size) is int and size == -1]
        if holes:
            rest = math.prod(size for i, size in enumerate(sizes) if i != holes[0])
            sizes[holes[0]] = self.numel() // rest
        if any(size < 0 for size in sizes) or math.prod(sizes) != self.numel():
            raise Unsupported("a view with another number of elements cannot be traced")
        return self._view(sizes, dense_strides(sizes), contiguous=True)

    def reshape(self, *shape: Any) -> TensorProxy:
        return self.view(*shape)  # a reshape that may copy, of strides not dense, is Unsupported

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> TensorProxy:
        start, end = self._position(start_dim), self._position(end_dim)
        if self.ndim and start == end:
            return self
        if start > end:
            raise Unsupported("flatten() to a dimension before the first one cannot be traced")
        merged = math.prod(self.shape[start : end + 1])
        return self.reshape(*self.shape[:start], merged, *self.shape[end + 1 :])

    def permute(self, *dims: Any) -> TensorProxy:
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        order = [self._position(d) for d in order]
        if sorted(order) != [*range(self.ndim)]:
            raise Unsupported(f"permute() of {self.ndim} dimensions to {order} cannot be traced")
        return self._view([self.shape[d] for d in order], [self._strides[d] for d in order])

    def transpose(self, dim0: int, dim1: int) -> TensorProxy:
        order = list(range(self.ndim))
        a, b = self._position(dim0), self._position(dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def t(self) -> TensorProxy:
        if self.ndim > 2:
            raise Unsupported(f"t() of a tensor of {self.ndim} dimensions cannot be traced")
        return self.permute(list(reversed(range(self.ndim))))

    @property
    def T(self) -> TensorProxy:  # noqa: N802
        return self.permute(list(reversed(range(self.ndim))))

    @property
    def mT(self) -> TensorProxy:  # noqa: N802
        return self.transpose(-2, -1)

    def unsqueeze(self, dim: int) -> TensorProxy:
        at = self._position(dim, self.ndim + 1)
        shape, strides = list(self.shape), list(self._strides)
        inner = shape[at] * strides[at] if at < self.ndim else 1
        shape.insert(at, 1)
        strides.insert(at, inner)
        return self._view(shape, strides)

    def squeeze(self, dim: int) -> TensorProxy:
        at = self._position(dim)
        if not self.ndim or self.shape[at] != 1:
            return self._view(self.shape, self._strides, contiguous=self._known_contiguous)
        keep = [d for d in range(self.ndim) if d != at]
        return self._view([self.shape[d] for d in keep], [self._strides[d] for d in keep])

    def expand(self, *shape: Any) -> TensorProxy:
        target = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(target) < self.ndim:
            raise Unsupported("expand() to fewer dimensions cannot be traced")
        sizes: list[Any] = []
        strides: list[Any] = []
        for back, length in enumerate(reversed(target), 1):
            old = back <= self.ndim
            size = self.shape[-back] if old else 1
            stride = self._strides[-back] if old else sizes[-1] * strides[-1] if sizes else 1
            stride = stride if self.ndim else 0
            if old and type(length) is int and length == -1:
                length = size  # noqa: PLW2901
            if length < 0 or (size != length and size != 1):  # noqa: PLR1714  each is a guard
                raise Unsupported("expand() of a size that is not 1 cannot be traced")
            strides.append(stride if size == length else 0)
            sizes.append(length)
        return self._view(sizes[::-1], strides[::-1])

    def narrow(self, dim: int, start: Any, length: Any) -> TensorProxy:
        at = self._position(dim)
        if start < 0 or length < 0 or start + length > self.shape[at]:
            raise Unsupported("narrow() beyond a tensor's size cannot be traced")
        shape = [length if d == at else size for d, size in enumerate(self.shape)]
        return self._view(shape, self._strides, offset=self._offset + start * self._strides[at])

    def select(self, dim: int, index: Any) -> TensorProxy:
        at = self._position(dim)
        if index < 0:
            index = index + self.shape[at]
        if index < 0 or index >= self.shape[at]:
            raise Unsupported("an index beyond a tensor's size cannot be traced")
        keep = [d for d in range(self.ndim) if d != at]
        return self._view(
            [self.shape[d] for d in keep],
            [self._strides[d] for d in keep],
            offset=self._offset + index * self._strides[at],
        )

    def __getitem__(self, key: Any) -> TensorProxy:
        items = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in [item for item in items if item is Ellipsis]:
            at = next(i for i, item in enumerate(items) if item is Ellipsis)
            count = sum(item is not None and item is not Ellipsis for item in items)
            items[at : at + 1] = [slice(None)] * (self.ndim - count)
        result, dim = self.detach(), 0  # x[...] is not x
        for item in items:
            if item is None:
                result = result.unsqueeze(dim)
            elif isinstance(item, slice):
                result = result._sliced(dim, item)
            elif isinstance(item, int) and not isinstance(item, bool):
                result = result.select(dim, item)
                continue
            else:
                raise Unsupported(f"an index of type {type(item).__name__} cannot be traced")
            dim += 1
        return result

    def _sliced(self, dim: int, item: slice) -> TensorProxy:
        if item.step not in (None, 1):
            raise Unsupported("a slice with a step cannot be traced")
        size = self.shape[dim]
        start, stop = (
            default if bound is None else _clamped(bound, size)
            for bound, default in ((item.start, 0), (item.stop, size))
        )
        return self.narrow(dim, start, max(stop - start, 0))

    def detach(self) -> TensorProxy:
        return self._view(self.shape, self._strides, contiguous=self._known_contiguous)

    def _view(
        self,
        shape: Sequence[Any],
        strides: Sequence[Any],
        *,
        offset: Any = None,
        contiguous: bool = False,
    ) -> TensorProxy:
        return TensorProxy(
            self._program, self._memory, self.dtype, shape, strides,
            offset=self._offset if offset is None else offset, contiguous=contiguous,
        )  # fmt: skip

    def _position(self, dim: Any, count: int = -1) -> int:
        """Return a dimension as a number from 0 to `count`, by default the tensor's rank."""
        dim, count = concrete(dim), max(self.ndim if count < 0 else count, 1)
        if type(dim) is not int or not -count <= dim < count:
            raise Unsupported(f"dimension {dim} of a tensor of {self.ndim} cannot be traced")
        return dim % count

    # ------------------------------------------------------------------ new memory

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> TensorProxy:
        if self.is_contiguous(memory_format):
            return self
        return allocate(self._program, self.shape, None, self.dtype).copy_(self)

    def clone(self, memory_format: Any = torch.preserve_format) -> TensorProxy:
        return like(self._program, self, memory_format=memory_format).copy_(self)

    def to(self, dtype: Any = None, **rest: Any) -> TensorProxy:
        if type(dtype) is TensorProxy:
            dtype = dtype.dtype
        if rest or not isinstance(dtype, torch.dtype):
            raise Unsupported("Tensor.to() with more than a dtype cannot be traced")
        return self if dtype is self.dtype else like(self._program, self, dtype=dtype).copy_(self)

    def float(self) -> TensorProxy:
        return self.to(torch.float32)

    def double(self) -> TensorProxy:
        return self.to(torch.float64)

    def half(self) -> TensorProxy:
        return self.to(torch.float16)

    def bfloat16(self) -> TensorProxy:
        return self.to(torch.bfloat16)

    def new_empty(self, *shape: Any, **options: Any) -> TensorProxy:
        return empty(self._program, *shape, **self._like(options))

    def new_zeros(self, *shape: Any, **options: Any) -> TensorProxy:
        return self.new_empty(*shape, **options).zero_()

    def new_empty_strided(self, shape: Any, strides: Any, **options: Any) -> TensorProxy:
        return empty_strided(self._program, shape, strides, **self._like(options))

    def _like(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of an allocation, by default this tensor's."""
        named = {name: value for name, value in options.items() if value is not None}
        return {"dtype": self.dtype, "device": self.device, **named}

    def copy_(self, source: Any, non_blocking: bool = False) -> TensorProxy:  # noqa: FBT001, FBT002
        if type(source) is not TensorProxy:
            raise Unsupported("copy_() of a tensor from outside this call cannot be traced")
        to, origin = handle_of(self), handle_of(source)
        self._program.act("COPY", to, origin, int(non_blocking))
        self._changed()
        return self

    def zero_(self) -> TensorProxy:
        self._program.act("ZERO", handle_of(self))
        self._changed()
        return self

    def _changed(self) -> None:
        """Note a change of an argument, after which no other launcher may run the call again."""
        if self._memory.handle in self._program.unchanged:
            raise Unsupported("a change of a tensor that the schema has not as changed (`a!`)")
        if self._memory.address is not None:
            self._program.act("CHANGED")


ANSWERED = frozenset((*vars(TensorProxy), *TensorProxy.__annotations__))  # of a tensor


def _clamped(bound: Any, size: Any) -> Any:
    """Return a slice's bound as Python counts bounds, within 0 and `size`."""
    if bound < 0:
        bound = bound + size
    return 0 if bound < 0 else min(bound, size)


def is_proxy(value: object) -> bool:
    """Whether `value` is a TensorProxy, whose `__class__` is torch.Tensor."""
    return type(value) is TensorProxy


def same(a: Any, b: Any) -> bool:
    """Whether two numbers are one expression."""
    return (
        a is b
        or (is_symbol(a) and is_symbol(b) and a.register == b.register)
        or (not is_symbol(a) and not is_symbol(b) and a == b)
    )


@contextlib.contextmanager
def recording(program: ProgramBuilder) -> Iterator[None]:
    """Add the allocations of this thread to a program while the block runs."""
    before, _active.program = getattr(_active, "program", None), program
    try:
        yield
    finally:
        _active.program = before


def allocated(name: str, *args: Any, **kwargs: Any) -> TensorProxy:
    """Return the proxy that torch.empty, torch.zeros_like and the like make in a trace."""
    program: ProgramBuilder = _active.program
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if name.endswith("_like"):
        proxy = like(program, *args, **kwargs)
    elif "size" in kwargs:
        proxy = empty(program, kwargs.pop("size"), *args, **kwargs)
    elif name == "empty_strided":
        proxy = empty_strided(program, *args, **kwargs)
    else:
        proxy = empty(program, *args, **kwargs)
    return proxy.zero_() if name.startswith("zeros") else proxy


def default_dtype() -> torch.dtype:
    """Return the default dtype, which the trace of this thread depends on from now on."""
    program: ProgramBuilder = _active.program
    return program.default_dtype()


def allocate(
    program: ProgramBuilder,
    shape: Sequence[Any],
    strides: Sequence[Any] | None,
    dtype: torch.dtype,
    *,
    contiguous: bool = False,
) -> TensorProxy:
    """Return the proxy of new memory with these sizes and strides (None: contiguous)."""
    if dtype not in DTYPE_CODES:
        raise Unsupported(f"an allocation of {dtype} cannot be traced")
    shape = tuple(shape)
    steps = dense_strides(shape) if strides is None else tuple(strides)
    number = len(program.owned)
    program.owned.append((shape, steps))
    data = program.facts.register()
    program.act("ALLOCATE", data, number, DTYPE_CODES[dtype], *program.operands((*shape, *steps)))
    memory = Memory(~number, data, None)
    return TensorProxy(
        program, memory, dtype, shape, steps, contiguous=contiguous or strides is None
    )


def empty(
    program: ProgramBuilder,
    *shape: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **rest: Any,
) -> TensorProxy:
    """Allocate as torch.empty does."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return allocate(program, sizes, None, _options(program, dtype, device, rest))


def empty_strided(
    program: ProgramBuilder,
    shape: Any,
    strides: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **rest: Any,
) -> TensorProxy:
    """Allocate as torch.empty_strided does."""
    return allocate(program, shape, strides, _options(program, dtype, device, rest))


def like(
    program: ProgramBuilder,
    model: TensorProxy,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    memory_format: Any = torch.preserve_format,
    **rest: Any,
) -> TensorProxy:
    """Allocate as torch.empty_like does: a dense model's strides are kept."""
    if not is_proxy(model):
        raise Unsupported("empty_like() of a tensor from outside this call cannot be traced")
    chosen = _options(program, dtype or model.dtype, device or program.device, rest)
    if memory_format is torch.contiguous_format:
        return allocate(program, model.shape, None, chosen)
    if memory_format is not torch.preserve_format:
        raise Unsupported(f"an allocation in {memory_format} cannot be traced")
    contiguous = model.is_contiguous()
    if not contiguous:
        expected: Any = 1
        for d in sorted(range(model.ndim), key=lambda d: _stride_hints(model, d)):
            if model.shape[d] == 1:
                continue
            if not model._strides[d] == expected:
                raise Unsupported("empty_like() of gaps or overlaps cannot be traced")
            expected = expected * model.shape[d]
    return allocate(program, model.shape, model._strides, chosen, contiguous=contiguous)


def _options(
    program: ProgramBuilder, dtype: torch.dtype | None, device: Any, rest: dict[str, Any]
) -> torch.dtype:
    place = torch.device(device if device is not None else "cpu")
    index = place.index if place.index is not None else program.device.index
    if place.type != program.device.type or index != program.device.index:
        raise Unsupported(f"an allocation on {place} cannot be traced: not {program.device}")
    unknown = [k for k, v in rest.items() if v and not (k == "layout" and v is torch.strided)]
    if unknown:
        raise Unsupported(f"an allocation with {unknown[0]}= cannot be traced")
    program.facts.guard("UNFILLED")
    return program.default_dtype() if dtype is None else dtype


def handle_of(tensor: TensorProxy) -> int:
    """Return a tensor's handle as an operand; for a view, make a new handle."""
    handle = tensor._memory.handle
    if handle is None:
        raise Unsupported("a workspace other than as an argument of a kernel cannot be traced")
    if tensor._argument is not None or _whole(tensor):
        return handle
    program, number = tensor._program, len(tensor._program.owned)
    program.owned.append(((), ()))
    numbers = (*tensor.shape, *tensor._strides, tensor._offset)
    program.act("VIEW", number, handle, *program.operands(numbers))
    return ~number


def _whole(tensor: TensorProxy) -> bool:
    """Whether the tensor is an allocation with its first sizes and strides."""
    handle = tensor._memory.handle
    if handle is None or handle >= 0 or not same(tensor._offset, 0):
        return False
    allocation = tensor._program.owned[~handle]
    return all(
        len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
        for a, b in zip(allocation, (tensor.shape, tensor._strides))
    )


def _stride_hints(tensor: TensorProxy, d: int) -> tuple[Any, Any]:
    """Return a key that orders dimensions; the order only decides which guards are tried."""
    stride, size = tensor._strides[d], tensor.shape[d]
    return (
        stride.hint if is_symbol(stride) else stride,
        size.hint if is_symbol(size) else size,
    )
