"""The tracer of a trace, which notes allocations, launches and results as steps of a program."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jitkern.launch import autotune
from jitkern.launch.arguments import checked
from jitkern.launch.call import Call, address_of, declared_in, expanded
from jitkern.launch.geometry import Compiled, geometry_of
from jitkern.launch.resources.device_facts import ATTRIBUTES, constant
from jitkern.launch.resources.tensor_maps import TensorMap, layout_of, options_of
from jitkern.launch.resources.workspaces import checked_count
from jitkern.launch.runner import CachedKernels, Runner, arguments_of
from jitkern.launch.symbols import (
    Facts,
    Instruction,
    Symbol,
    Unsupported,
    concrete,
    is_symbol,
    operand_of,
)
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.source import triton_decorators, triton_text
from jitkern.source.dtypes import DTYPES, TENSOR_MAP, codes_of_torch, table_of
from jitkern.trace.program import FLOAT, LINE, POINTED, TABLE, WORD
from jitkern.trace.tensor_proxy import Memory, TensorProxy

# Torch's numbers for dtypes (of complex ones a launch passes views) and devices.
DTYPE_CODES = {dtype: DTYPES[code].number for dtype, code in codes_of_torch().items()} | {
    torch.complex32: 8, torch.complex64: 9, torch.complex128: 10,
}  # fmt: skip

_active = threading.local()  # the tracer of this thread's trace


@contextlib.contextmanager
def recording(tracer: Tracer) -> Iterator[None]:
    """Note the allocations of this thread in `tracer` while the block runs."""
    before, _active.tracer = getattr(_active, "tracer", None), tracer
    try:
        yield
    finally:
        _active.tracer = before


def allocated(name: str, *args: Any, **kwargs: Any) -> TensorProxy:
    """Return the proxy that torch.empty, torch.zeros_like and the like make in a trace."""
    tracer: Tracer = _active.tracer
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if name.endswith("_like"):
        proxy = tracer.like(*args, **kwargs)
    elif "size" in kwargs:
        proxy = tracer.empty(kwargs.pop("size"), *args, **kwargs)
    else:
        allocate = tracer.empty_strided if name == "empty_strided" else tracer.empty
        proxy = allocate(*args, **kwargs)
    return proxy.zero_() if name.startswith("zeros") else proxy


def default_dtype() -> torch.dtype:
    """Return the default dtype, which the trace of this thread depends on from now on."""
    tracer: Tracer = _active.tracer
    return tracer.default_dtype()


def is_proxy(value: object) -> bool:
    """Whether `value` is a TensorProxy, whose `__class__` is torch.Tensor."""
    return type(value) is TensorProxy


class Described(NamedTuple):
    """All that a trace needs of a tensor argument: everything but its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        """Describe a tensor."""
        if tensor.layout is not torch.strided:
            return cls(tensor.dtype, (), (), 0, tensor.layout)
        shape, address = tuple(tensor.shape), address_of(tensor)
        return cls(tensor.dtype, shape, tensor.stride(), address, tensor.layout)


def described(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with a `Described` for each tensor, the same one for the same tensor."""
    known: dict[int, Described] = {}

    def one(arg: Any) -> Any:
        if type(arg) in (list, tuple):  # a Described is a tuple, too
            return [one(item) for item in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        return known.setdefault(id(arg), Described.of(arg))

    return [one(arg) for arg in args]


Provider = Runner | CachedKernels  # of a trace's kernels; the latter only reads the cache


class Tracer:
    """The tracer that the proxies of one trace share."""

    def __init__(
        self, device: torch.device, kernels_of: Provider, line: Callable[[], int], arguments: int
    ) -> None:
        self.device = device
        self.facts = Facts(line)
        self.actions: list[Instruction] = []
        self.owned: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []  # sizes and strides
        self.tensors = arguments  # the number of the next tensor of a list
        self.memory = 0  # words
        self.table_words = 0  # of the memory
        self.texts: dict[str, int] = {}
        self.kernels: list[Compiled] = []
        self.model: str | None = ""
        self._kernels_of = kernels_of

    def act(self, name: str, *operands: int) -> None:
        """Add a step that acts, after all earlier ones."""
        self.actions.append(self.facts.instruction(name, *operands))

    def text(self, text: str) -> int:
        """Return a text as an operand."""
        return self.texts.setdefault(text, len(self.texts))

    def reserve(self, words: int) -> int:
        """Return the place of new words in the memory of the program."""
        at = -(-self.memory // LINE) * LINE
        self.memory = at + words
        return at

    def symbol(self, register: int, hint: Any, what: str, *, natural: bool = False) -> Symbol:
        """Return a Symbol for a number that each call brings."""
        return Symbol(self.facts, register, hint, what, natural=natural)

    def operand(self, value: Any) -> int:
        """Return a number or Symbol as an operand."""
        return operand_of(value, self.facts)

    def operands(self, values: Sequence[Any]) -> list[int]:
        return [self.operand(value) for value in values]

    def tensor(self, number: int, label: str, value: Described) -> TensorProxy:
        """Return the proxy of an argument or of a list's tensor, and guard dtype, rank, device."""
        if value.layout is not torch.strided or value.dtype not in DTYPE_CODES:
            raise Unsupported(f"argument `{label}` cannot be traced: {value.layout} {value.dtype}")
        facts = self.facts
        facts.guard("TENSOR", number, DTYPE_CODES[value.dtype], len(value.shape))
        sizes, strides = (
            [
                self.symbol(
                    facts.value(name, number, d), hint, f"{name.lower()}({d}) of `{label}`",
                    natural=name == "SIZE",
                )
                for d, hint in enumerate(hints)
            ]
            for name, hints in (("SIZE", value.shape), ("STRIDE", value.strides))
        )  # fmt: skip
        data = facts.value("DATA", number)
        address = self.symbol(data, value.address, f"the address of `{label}`")
        memory = Memory(number, data, address)
        return TensorProxy(self, memory, value.dtype, sizes, strides, argument=number)

    def tabulate(
        self, places: Sequence[int],
        tables: Sequence[tuple[tuple[torch.dtype, ...], Any, int, int]], chunk: int, *, dense: bool,
    ) -> tuple[int, list[int]]:  # fmt: skip
        """Add the step that fills tables of the lists at these places (see `tables.parts`).

        Returns the places in memory of the tables, one after the other, and of the words of each,
        which has as many for each list.
        """
        facts = self.facts
        groups = list(dict.fromkeys(dtypes for dtypes, *_ in tables))
        codes = [DTYPE_CODES[dtype] for dtypes in groups for dtype in dtypes]
        at = self.reserve(TABLE * len(tables))
        words = [self.reserve(len(places) * table_words(capacity)) for *_, capacity, _ in tables]
        of_tables = [
            number
            for (dtypes, _, capacity, least), place in zip(tables, words)
            for number in (groups.index(dtypes), capacity, least, place)
        ]
        numbers = (len(tables), *places, *of_tables, *codes)
        facts.guard(
            "TABULATE", at, facts.constant(chunk), int(dense), len(places),
            *map(facts.constant, numbers),
        )  # fmt: skip
        return at, words

    # ------------------------------------------------------------------ allocation

    def dense(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the strides of contiguous memory, for which Torch counts a size of 0 as 1."""
        strides: list[Any] = []
        step: Any = 1
        for size in reversed(shape):
            strides.append(step)
            step = step * (
                size.made(max(size.hint, 1), "MAX1", size.register)
                if is_symbol(size)
                else max(size, 1)
            )
        return tuple(reversed(strides))

    def allocate(
        self,
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
        steps = self.dense(shape) if strides is None else tuple(strides)
        number = len(self.owned)
        self.owned.append((shape, steps))
        data = self.facts.register()
        self.act("ALLOCATE", data, number, DTYPE_CODES[dtype], *self.operands((*shape, *steps)))
        memory = Memory(~number, data, None)
        return TensorProxy(
            self, memory, dtype, shape, steps, contiguous=contiguous or strides is None
        )

    def empty(
        self, *shape: Any, dtype: torch.dtype | None = None, device: Any = None, **rest: Any
    ) -> TensorProxy:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self.allocate(sizes, None, self._options(dtype, device, rest))

    def empty_strided(
        self,
        shape: Any,
        strides: Any,
        dtype: torch.dtype | None = None,
        device: Any = None,
        **rest: Any,
    ) -> TensorProxy:
        return self.allocate(shape, strides, self._options(dtype, device, rest))

    def like(
        self,
        model: TensorProxy,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        memory_format: Any = torch.preserve_format,
        **rest: Any,
    ) -> TensorProxy:
        """Allocate as torch.empty_like does: a dense model's strides are kept."""
        if not is_proxy(model):
            raise Unsupported("empty_like() of no tensor of this call cannot be traced")
        chosen = self._options(dtype or model.dtype, device or self.device, rest)
        if memory_format is torch.contiguous_format:
            return self.allocate(model.shape, None, chosen)
        if memory_format is not torch.preserve_format:
            raise Unsupported(f"an allocation in {memory_format} cannot be traced")
        dense = model.is_contiguous()
        if not dense:
            expected: Any = 1
            for d in sorted(range(model.ndim), key=lambda d: _stride_hints(model, d)):
                if model.shape[d] == 1:
                    continue
                if not model._strides[d] == expected:
                    raise Unsupported("empty_like() of gaps or overlaps cannot be traced")
                expected = expected * model.shape[d]
        return self.allocate(model.shape, model._strides, chosen, contiguous=dense)

    def _options(self, dtype: torch.dtype | None, device: Any, rest: dict[str, Any]) -> torch.dtype:
        place = torch.device(device if device is not None else "cpu")
        index = place.index if place.index is not None else self.device.index
        if place.type != self.device.type or index != self.device.index:
            raise Unsupported(f"an allocation on {place} cannot be traced: not {self.device}")
        unknown = [k for k, v in rest.items() if v and not (k == "layout" and v is torch.strided)]
        if unknown:
            raise Unsupported(f"an allocation with {unknown[0]}= cannot be traced")
        self.facts.guard("UNFILLED")
        return self.default_dtype() if dtype is None else dtype

    def default_dtype(self) -> torch.dtype:
        """Return the dtype that PyTorch takes where none is given, guarded."""
        default = torch.get_default_dtype()
        self.facts.guard("DEFAULT_DTYPE", DTYPE_CODES[default])
        return default

    def handle(self, tensor: TensorProxy) -> int:
        """Return a tensor's handle as an operand; for a view, make a new handle."""
        handle = tensor._memory.handle
        if handle is None:
            raise Unsupported("a workspace other than as an argument of a kernel cannot be traced")
        if tensor._argument is not None or self._whole(tensor):
            return handle
        number = len(self.owned)
        self.owned.append(((), ()))
        numbers = (*tensor.shape, *tensor._strides, tensor._offset)
        self.act("VIEW", number, handle, *self.operands(numbers))
        return ~number

    def _whole(self, tensor: TensorProxy) -> bool:
        """Whether the tensor is an allocation with its first sizes and strides."""
        handle = tensor._memory.handle
        if handle is None or handle >= 0 or not _same(tensor._offset, 0):
            return False
        allocation = self.owned[~handle]
        return all(
            len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
            for a, b in zip(allocation, (tensor.shape, tensor._strides))
        )

    # ------------------------------------------------------------------ the device

    def fact(self, name: str) -> Any:
        """Return a fact of the device, which the program asks for when it runs."""
        value = self._kernels_of.present.fact(name)
        if constant(name, self._kernels_of.target) is not None:
            return value
        at = self.facts.value("ATTRIBUTE", ATTRIBUTES[name])
        return self.symbol(at, value, f"`k.{name}`", natural=True)

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> TensorProxy:
        """Return the proxy of a workspace; a program misses where there is none of that size."""
        count = checked_count(size, dtype)
        base = self.facts.value("WORKSPACE", self.operand(start + size), int(zeroed))
        memory = Memory(None, base, self.symbol(base, 0, "the address of a workspace"))
        offset = start // dtype.itemsize
        return TensorProxy(self, memory, dtype, (count,), (1,), offset=offset, contiguous=True)

    def tensor_map(
        self, x: TensorProxy, box: Sequence[Any], swizzle: str, l2_promotion: str, oob_fill: str
    ) -> TensorMap:
        """Return a tensor map that the program makes."""
        options = options_of(self._kernels_of.target, x, box, swizzle, l2_promotion, oob_fill)
        layout = layout_of(x)
        at = self.reserve(LINE)
        numbers = (*layout.sizes, *layout.strides, *reversed(box))
        self.act("TENSOR_MAP", at, *options, self._address(x), *self.operands(numbers))
        return TensorMap(x, self.facts.value("MEMORY", at))

    # ------------------------------------------------------------------ launches and results

    def start(self, call: Call) -> None:
        """Record a launch: get the kernel and check its arguments now; the program launches."""
        choose = functools.partial(self._autotuned, call.function)
        where, source = self._kernels_of.where, self._kernels_of.source
        if source.in_python and (why := declared_in(where, source, call.function).unread):
            raise Unsupported(
                f"the decorators of `{call.function}` follow from more than the text of its file, "
                f"and a program cannot tell when they change: {why}"
            )
        call = expanded(where, self._kernels_of.source, call, choose)
        call = call._replace(template=tuple((n, concrete(value)) for n, value in call.template))
        compiled = self._kernels_of.compiled(call)
        number = len(self.kernels)
        self.kernels.append(compiled)
        what = f"`{call.function}` of {where}"
        passed = arguments_of(compiled, call.args)
        if any(isinstance(a, torch.Tensor) and not is_proxy(a) for a in passed):
            raise Unsupported("a tensor not made by empty or zeros cannot be traced")
        args = checked(what, compiled.parameters, passed, self.device, compiled.written)
        given = [self._passed(*both) for both in zip(compiled.parameters, args)]
        if self.device.type == "cpu":
            for kind, operand in given:
                self.act("PASS", kind, operand)
            self.act("CALL", number)
            return
        shape = geometry_of(what, compiled, call.keywords)
        given += [(WORD, operand) for operand in self._scratch(compiled, shape.grid)]
        carveout = 0 if shape.carveout is None else shape.carveout + 1
        cluster = shape.cluster or (0, 0, 0)
        options = (*cluster, int(shape.cooperative), int(shape.pdl), carveout)
        numbers = self.operands((*shape.grid, *shape.block, shape.smem, *options))
        for kind, operand in given:
            self.act("PASS", kind, operand)
        self.act("LAUNCH", number, self.text(what), *numbers)

    def _passed(self, code: str, value: Any) -> tuple[int, int]:
        """Return the kind of a kernel's argument (see `program.WORD`), and its register."""
        if table_of(code):
            return POINTED, value.parameter()
        if code == TENSOR_MAP:
            return POINTED, value.encoded
        if value is None:
            return WORD, self.facts.constant(0)
        if type(value) is TensorProxy:
            return WORD, self._address(value)
        if code in ("f32", "f64") and not isinstance(value, float):
            value = value.as_real() if is_symbol(value) else float(value)
        return FLOAT if code == "f32" else WORD, self.operand(value)

    def _address(self, tensor: TensorProxy) -> int:
        """Return the register of the address of a tensor's first element."""
        if _same(tensor._offset, 0):
            return tensor._memory.data
        if tensor.numel() == 0:
            return self.facts.constant(0)
        at = self.facts.register()
        distance = self.operand(tensor._offset * tensor.itemsize)
        self.act("ADDRESS", at, tensor._memory.data, distance)
        return at

    def choose(
        self, tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the configuration of `.tune`, and guard all that the choice depends on."""
        configs = autotune.configs_of(tuned, args, kwargs)
        situation = autotune.tuning_key_of_call(tuned, args, kwargs)
        return configs[self._choice(autotune.Question("", configs, situation))]

    def _autotuned(
        self, function: str, declared: triton_text.TritonFunction, named: dict[str, Any]
    ) -> triton_decorators.TritonConfig:
        situation = autotune.tuning_key_of(declared, named)
        question = autotune.Question(function, declared.configs, situation)
        return declared.configs[self._choice(question)]

    def _choice(self, question: autotune.Question) -> int:
        number, model = self._kernels_of.chosen(question)
        if model != "" and self.model is not None:
            self.model = model
        return number

    def _scratch(self, compiled: Compiled, grid: Sequence[Any]) -> Iterator[int]:
        """Yield the arguments for Triton's trailing parameters: memory that its programs share."""
        for size in compiled.meta.get("scratch", ()):
            if size:
                yield self.allocate((math.prod(grid) * size,), None, torch.uint8)._memory.data
            else:
                yield self.facts.constant(0)

    def finish(self, result: Any, kinds: str) -> None:
        """Record the results, with which the program ends. kinds: see `Signature.results`."""
        nothing = result is None and not kinds
        results = result if isinstance(result, (tuple, list)) else () if nothing else (result,)
        if len(results) != len(kinds):
            raise Unsupported(f"it returns {len(results)} values, and its schema says {len(kinds)}")
        handles_seen: set[int | None] = set()
        handles: list[int | None] = []
        for tensor, kind in zip(results, kinds):
            if tensor is None and kind == "t":
                handles.append(None)
                continue
            if type(tensor) is not TensorProxy:
                raise Unsupported(f"a result of type {type(tensor).__name__} cannot be traced")
            if tensor._memory.address is not None or tensor._memory.handle in handles_seen:
                raise Unsupported("a result that is an argument or another result cannot be traced")
            handles_seen.add(tensor._memory.handle)
            handles.append(self.handle(tensor))
        for i, handle in enumerate(handles):  # after all that can fail
            if handle is None:
                self.act("RETURN_NONE", i)
            else:
                self.act("RETURN", i, handle)


def table_words(capacity: int) -> int:
    """Return the words of a list in a table: WORDS in program.c."""
    return capacity // 2 * 5 + 1


def _stride_hints(tensor: TensorProxy, d: int) -> tuple[Any, Any]:
    """Return a key that orders dimensions; the order only decides which guards are tried."""
    stride, size = tensor._strides[d], tensor.shape[d]
    return (
        stride.hint if is_symbol(stride) else stride,
        size.hint if is_symbol(size) else size,
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two numbers are one expression."""
    return (
        a is b
        or (is_symbol(a) and is_symbol(b) and a.register == b.register)
        or (not is_symbol(a) and not is_symbol(b) and a == b)
    )
