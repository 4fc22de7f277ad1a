"""The recorder of a trace, which notes allocations, launches and results as lines of C."""

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
from jitkern.launch.call import Call, address_of, expanded
from jitkern.launch.geometry import Compiled, geometry_of
from jitkern.launch.resources.device_facts import ATTRIBUTES, constant
from jitkern.launch.resources.tensor_maps import TensorMap, layout_of, options_of
from jitkern.launch.resources.workspaces import checked_count
from jitkern.launch.runner import CachedKernels, Runner, arguments_of
from jitkern.launch.symbols import (
    Facts,
    Statement,
    Symbol,
    Unsupported,
    concrete,
    is_symbol,
    text_of,
)
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.source import triton_decorators, triton_text
from jitkern.source.dtypes import DTYPES, TENSOR_MAP, codes_of_torch, table_of
from jitkern.trace.tensor_proxy import Memory, TensorProxy

# Torch's numbers for dtypes (of complex ones a launch passes views) and devices.
DTYPE_CODES = {dtype: DTYPES[code].number for dtype, code in codes_of_torch().items()} | {
    torch.complex32: 8, torch.complex64: 9, torch.complex128: 10,
}  # fmt: skip
DEVICE_CODES = {"cpu": 0, "cuda": 1}

_active = threading.local()  # the recorder of this thread's trace


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Make `recorder` note the allocations of this thread while the block runs."""
    before, _active.recorder = getattr(_active, "recorder", None), recorder
    try:
        yield
    finally:
        _active.recorder = before


def allocated(name: str, *args: Any, **kwargs: Any) -> TensorProxy:
    """Return the proxy that torch.empty, torch.zeros_like and the like make in a trace."""
    recorder: Recorder = _active.recorder
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if name.endswith("_like"):
        proxy = recorder.like(*args, **kwargs)
    elif "size" in kwargs:
        proxy = recorder.empty(kwargs.pop("size"), *args, **kwargs)
    else:
        allocate = recorder.empty_strided if name == "empty_strided" else recorder.empty
        proxy = allocate(*args, **kwargs)
    return proxy.zero_() if name.startswith("zeros") else proxy


def default_dtype() -> torch.dtype:
    """Return the default dtype, which the trace of this thread depends on from now on."""
    recorder: Recorder = _active.recorder
    return recorder.default_dtype()


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


class Recorder:
    """The recorder that the proxies of one trace share."""

    def __init__(self, device: torch.device, kernels_of: Provider, line: Callable[[], int]) -> None:
        self.device = device
        self.facts = Facts(line)
        self.actions: list[Statement] = []
        self.owned: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []  # sizes and strides
        self.maps = 0
        self.tables = 0
        self.table_words = 0  # of eight bytes, which the tables take
        self.kernels: list[Compiled] = []
        self.model: str | None = ""
        self._kernels_of = kernels_of

    def act(self, text: str) -> None:
        """Add a line of C that acts, after all earlier ones."""
        self.actions.append(self.facts.statement(text))

    def symbol(self, text: str, hint: Any, what: str, *, natural: bool = False) -> Symbol:
        """Return a Symbol for a number that each call brings."""
        return Symbol(self.facts, text, hint, what, natural=natural)

    def tensor(self, name: str, label: str, value: Described) -> TensorProxy:
        """Return the proxy of an argument, and guard its dtype, rank and device."""
        if value.layout is not torch.strided or value.dtype not in DTYPE_CODES:
            raise Unsupported(f"argument `{label}` cannot be traced: {value.layout} {value.dtype}")
        self.facts.guard(
            f"{name}->handle && {name}->dtype == {DTYPE_CODES[value.dtype]} "
            f"&& {name}->dim == {len(value.shape)}"
        )
        self.facts.guard(
            f"{name}->device == {DEVICE_CODES[self.device.type]}"
            + (f" && {name}->index == call->index" if self.device.type == "cuda" else "")
        )
        sizes, strides = (
            [
                self.symbol(
                    f"{name}->{field}[{d}]",
                    hint,
                    f"{field}({d}) of `{label}`",
                    natural=field == "size",
                )
                for d, hint in enumerate(hints)
            ]
            for field, hints in (("size", value.shape), ("stride", value.strides))
        )
        memory = Memory(
            f"{name}->handle",
            f"{name}->data",
            self.symbol(f"(i64){name}->data", value.address, f"the address of `{label}`"),
        )
        return TensorProxy(self, memory, value.dtype, sizes, strides, argument=name)

    def tabulate(
        self, places: Sequence[int],
        tables: Sequence[tuple[tuple[torch.dtype, ...], Any, int, int]], chunk: int, *, dense: bool,
    ) -> int:  # fmt: skip
        """Let the stub fill tables of the lists at these places (see `tables.parts`).

        Returns their number in C: `table<number>` are the tables, over `words<number>`.
        """
        number, self.tables = self.tables, self.tables + 1
        groups = list(dict.fromkeys(dtypes for dtypes, *_ in tables))
        codes = ", ".join(str(DTYPE_CODES[dtype]) for dtypes in groups for dtype in dtypes)
        words: list[str] = []
        texts: list[str] = []
        for dtypes, _, capacity, least in tables:
            texts.append(
                f"{{.words = words{number}{''.join(f' + {w}' for w in words)}, "
                f".group = {groups.index(dtypes)}, .capacity = {capacity}, .least = {least}}}"
            )
            words.append(f"{len(places)} * WORDS({capacity})")
        self.facts.declare(f"u64 words{number}[{' + '.join(words)}];")
        self.facts.declare(f"Table table{number}[] = {{{', '.join(texts)}}};")
        listed = ", ".join(map(str, places))
        self.facts.declare(
            f"if (!api->tabulate(call, (const i32[]){{{listed}}}, (const i32[]){{{codes}}}, "
            f"{len(places)}, table{number}, {len(tables)}, {chunk}LL, {int(dense)})) return MISS;"
        )
        return number

    # ------------------------------------------------------------------ allocation

    def dense(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the strides of contiguous memory, for which Torch counts a size of 0 as 1."""
        strides: list[Any] = []
        step: Any = 1
        for size in reversed(shape):
            strides.append(step)
            step = step * (
                size._made(int, f"max1({size.text})", max(size.hint, 1))
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
        self.act(f"char *y{number};")
        self.act(
            f"if (api->allocate(call, {len(shape)}, {_array(shape)}, {_array(steps)}, "
            f"{DTYPE_CODES[dtype]}, &owned[{number}], &y{number})) goto failed;"
        )
        memory = Memory(f"owned[{number}]", f"y{number}", None)
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
        self.facts.guard("!fills(api)")
        return self.default_dtype() if dtype is None else dtype

    def default_dtype(self) -> torch.dtype:
        """Return the dtype that PyTorch takes where none is given, guarded."""
        default = torch.get_default_dtype()
        self.facts.guard(f"api->default_dtype && api->default_dtype() == {DTYPE_CODES[default]}")
        return default

    def handle(self, tensor: TensorProxy) -> str:
        """Return a tensor's handle in C; for a view, make a new handle."""
        if not tensor._memory.handle:
            raise Unsupported("a workspace other than as an argument of a kernel cannot be traced")
        if tensor._argument or self._whole(tensor):
            return tensor._memory.handle
        number = len(self.owned)
        self.owned.append(((), ()))
        self.act(
            f"if (api->_reinterpret_tensor({tensor._memory.handle}, {tensor.ndim}, "
            f"{_array(tensor.shape)}, {_array(tensor._strides)}, {text_of(tensor._offset)}, "
            f"&owned[{number}])) goto failed;"
        )
        return f"owned[{number}]"

    def _whole(self, tensor: TensorProxy) -> bool:
        """Whether the tensor is an allocation with its first sizes and strides."""
        if tensor._memory.address is not None or not _same(tensor._offset, 0):
            return False
        allocation = self.owned[int(tensor._memory.handle[6:-1])]
        return all(
            len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
            for a, b in zip(allocation, (tensor.shape, tensor._strides))
        )

    # ------------------------------------------------------------------ the device

    def fact(self, name: str) -> Any:
        """Return a fact of the device, which the stub asks for when it runs."""
        value = self._kernels_of.present.fact(name)
        if constant(name, self._kernels_of.target) is not None:
            return value
        text = self.facts.value(int, f"api->attribute(call, {ATTRIBUTES[name]})")
        self.facts.guard(f"{text} > 0")  # 0: the driver does not know
        return self.symbol(text, value, f"`k.{name}`", natural=True)

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> TensorProxy:
        """Return the proxy of a workspace; a stub misses where there is none of that size yet."""
        count = checked_count(size, dtype)
        text = f"api->workspace(call, {text_of(start + size)}, {int(zeroed)})"
        base = self.facts.value(int, text)
        self.facts.guard(base)
        memory = Memory("", f"(char *){base}", self.symbol(base, 0, "the address of a workspace"))
        offset = start // dtype.itemsize
        return TensorProxy(self, memory, dtype, (count,), (1,), offset=offset, contiguous=True)

    def tensor_map(
        self, x: TensorProxy, box: Sequence[Any], swizzle: str, l2_promotion: str, oob_fill: str
    ) -> TensorMap:
        """Return a tensor map that the stub makes."""
        options = options_of(self._kernels_of.target, x, box, swizzle, l2_promotion, oob_fill)
        layout = layout_of(x)
        name, self.maps = f"m{self.maps}", self.maps + 1
        numbers, inner_first = _array(options), _array(tuple(reversed(box)))
        self.act(f"_Alignas(128) char {name}[128];")
        self.act(
            f"if (api->tensor_map(call, {name}, {numbers.replace('i64', 'i32')}, "
            f"{_argument('*', x)}, {_array(layout.sizes)}, {_array(layout.strides)}, "
            f"{inner_first.replace('i64', 'i32')})) goto failed;"
        )
        return TensorMap(x, name)

    # ------------------------------------------------------------------ launches and results

    def start(self, call: Call) -> None:
        """Record a launch: get the kernel and check the arguments now, and let the stub launch."""
        choose = functools.partial(self._autotuned, call.function)
        where = self._kernels_of.where
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
        values = [_passed(code, arg) for code, arg in zip(compiled.parameters, args)]
        if self.device.type == "cpu":
            types = ", ".join(ctype for ctype, _ in values) or "void"
            texts = ", ".join(text for _, text in values)
            self.act(f"((void (*)({types}))call->kernels[{number}])({texts});")
            self.act("call->launched = 1;")
            return
        shape = geometry_of(what, compiled, call.keywords)
        values += [("char *", text) for text in self._scratch(compiled, shape.grid)]
        declared = " ".join(
            f"{ctype}{'' if ctype.endswith('*') else ' '}a{i} = {text};"
            for i, (ctype, text) in enumerate(values)
            if ctype
        )
        pointers = ", ".join(f"&a{i}" if c else text for i, (c, text) in enumerate(values)) or "0"
        carveout = 0 if shape.carveout is None else shape.carveout + 1
        options = (*(shape.cluster or (0, 0, 0)), int(shape.cooperative), int(shape.pdl), carveout)
        extra = _array(options).replace("i64", "i32") if any(options) else "0"
        size, block = _array(shape.grid), _array((*shape.block, shape.smem))
        self.act("{")
        self.act(f"  {declared}")
        self.act(f"  void *p[] = {{{pointers}}};")
        self.act(
            f'  if (api->launch(call, call->kernels[{number}], "{what}", {size}, {block}, '
            f"{extra}, p)) goto failed;"
        )
        self.act("}")

    def choose(
        self, tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the configuration of `.tune`, and guard all that the choice depends on."""
        configs = autotune.configs_of(tuned, args, kwargs)
        return configs[self._choice("", configs, autotune.situation_of_call(tuned, args, kwargs))]

    def _autotuned(
        self, function: str, declared: triton_text.Function, named: dict[str, Any]
    ) -> triton_decorators.Config:
        situation = autotune.situation_of(declared, named)
        return declared.configs[self._choice(function, declared.configs, situation)]

    def _choice(self, function: str, configs: Sequence[Any], situation: autotune.Situation) -> int:
        number, model = self._kernels_of.chosen(function, configs, situation)
        if model != "" and self.model is not None:
            self.model = model
        return number

    def _scratch(self, compiled: Compiled, grid: Sequence[Any]) -> Iterator[str]:
        """Yield the arguments for Triton's trailing parameters: memory that its programs share."""
        for size in compiled.meta.get("scratch", ()):
            if size:
                yield self.allocate((math.prod(grid) * size,), None, torch.uint8)._memory.data
            else:
                yield "0"

    def finish(self, result: Any, kinds: str) -> None:
        """Record the results, with which the stub returns. kinds: see `Signature.results`."""
        nothing = result is None and not kinds
        results = result if isinstance(result, (tuple, list)) else () if nothing else (result,)
        if len(results) != len(kinds):
            raise Unsupported(f"it returns {len(results)} values, and its schema says {len(kinds)}")
        handles_seen: set[str] = set()
        handles: list[str] = []
        for tensor, kind in zip(results, kinds):
            if tensor is None and kind == "t":
                handles.append("")
                continue
            if type(tensor) is not TensorProxy:
                raise Unsupported(f"a result of type {type(tensor).__name__} cannot be traced")
            if tensor._memory.address is not None or tensor._memory.handle in handles_seen:
                raise Unsupported("a result that is an argument or another result cannot be traced")
            handles_seen.add(tensor._memory.handle)
            handles.append(self.handle(tensor))
        for i, handle in enumerate(handles):  # after all that can fail
            given = f"{handle}, {handle} = 0" if handle else "0"
            self.act(f"call->returns[{i}] = {given};")


def _passed(code: str, value: Any) -> tuple[str, str]:
    """Return the type and the text of a kernel argument in C; no type for a table in memory."""
    if table_of(code):
        return "", value.parameter()
    return _ctype(code), _argument(code, value)


def _argument(code: str, value: Any) -> str:
    """Return a kernel argument in C."""
    if value is None:
        return "0"
    if code == TENSOR_MAP:
        return str(value.encoded)
    if type(value) is TensorProxy:
        if _same(value._offset, 0):
            return value._memory.data
        if value.numel() == 0:
            return "0"
        return f"{value._memory.data} + {text_of(value._offset * value.itemsize)}"
    text = text_of(value)
    if code in ("f32", "f64") and not isinstance(value, float):
        text = f"(double){text}"  # rounds an integer as Python does
    return text if code in ("i64", "f64") else f"({DTYPES[code].stub}){text}"


def _ctype(code: str) -> str:
    """Return the type of a kernel argument in C; "" for one that lies where its name points."""
    if code == TENSOR_MAP:
        return ""
    return "char *" if code[:1] == "*" else DTYPES[code].stub


def _array(values: Sequence[Any]) -> str:
    """Return a C array of integers, never empty."""
    return f"(const i64[]){{{', '.join(map(text_of, values)) or '0'}}}"


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
        or (is_symbol(a) and is_symbol(b) and a.text == b.text)
        or (not is_symbol(a) and not is_symbol(b) and a == b)
    )
