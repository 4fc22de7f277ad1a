"""The tracer of a trace, which notes arguments, launches and results as steps of a program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jitkern.launch import autotune
from jitkern.launch.arguments import checked
from jitkern.launch.call import Call, check_contiguous, expanded
from jitkern.launch.flat import address_of
from jitkern.launch.geometry import Compiled, geometry_of
from jitkern.launch.resources.device_facts import ATTRIBUTES, constant
from jitkern.launch.resources.tensor_maps import TensorMap, layout_of, options_of
from jitkern.launch.resources.workspaces import checked_count
from jitkern.launch.runner import CachedKernels, Runner, arguments_of
from jitkern.launch.symbols import Unsupported, concrete, is_symbol
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.source import triton_decorators
from jitkern.source.dtypes import TENSOR_MAP, table_of
from jitkern.source.kinds import HOST
from jitkern.trace.program import FLOAT, LINE, POINTED, TABLE, WORD
from jitkern.trace.program_builder import DTYPE_CODES, ProgramBuilder
from jitkern.trace.tensor_proxy import Memory, TensorProxy, allocate, handle_of, is_proxy, same


class TensorMetadata(NamedTuple):
    """All that a trace needs of a tensor argument: everything but its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        """Describe a tensor."""
        if tensor.layout is not torch.strided:
            return cls(tensor.dtype, (), (), 0, tensor.layout)
        shape, address = tuple(tensor.shape), address_of(tensor)
        return cls(tensor.dtype, shape, tensor.stride(), address, tensor.layout)


def metadata_of(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with metadata in place of tensors: one object for each tensor."""
    known: dict[int, TensorMetadata] = {}

    def one(arg: Any) -> Any:
        if type(arg) in (list, tuple):  # a TensorMetadata is a tuple, too
            return [one(item) for item in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        return known.setdefault(id(arg), TensorMetadata.of(arg))

    return [one(arg) for arg in args]


Provider = Runner | CachedKernels  # of a trace's kernels; the latter only reads the cache


class Tracer(ProgramBuilder):
    """The program of a trace, and the requests of the launch function to `k`."""

    def __init__(
        self, device: torch.device, kernels_of: Provider, line: Callable[[], int], arguments: int
    ) -> None:
        super().__init__(device, line)
        self.tensors = arguments  # the number of the next tensor of a list
        self.table_words = 0  # of the memory
        self.kernels: list[Compiled] = []
        self.model: str | None = ""
        self._kernels_of = kernels_of

    def tensor(
        self, number: int, label: str, value: TensorMetadata, *, changes: bool
    ) -> TensorProxy:
        """Return the proxy of an argument or of a list's tensor, and guard dtype, rank, device.

        changes: whether the op is declared to change it.
        """
        if value.layout is not torch.strided or value.dtype not in DTYPE_CODES:
            raise Unsupported(f"argument `{label}` cannot be traced: {value.layout} {value.dtype}")
        facts = self.facts
        self.unchanged.update(() if changes else (number,))
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

    # ------------------------------------------------------------------ the device

    def fact(self, name: str) -> Any:
        """Return a fact of the device, which the program reads when it runs."""
        value = self._kernels_of.present.fact(name)
        if constant(name, self._kernels_of.target) is not None:
            return value
        at = self.facts.value("ATTRIBUTE", ATTRIBUTES[name])
        return self.symbol(at, value, f"`k.{name}`", natural=True)

    def workspace(self, start: Any, size: Any, dtype: torch.dtype, *, zeroed: bool) -> TensorProxy:
        """Return the proxy of a workspace; a program misses if no workspace of that size exists."""
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
        check_contiguous(where, source, call)
        call = expanded(where, source, call, choose, self._kernels_of.target)
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
        if source.runs == HOST:
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
        if same(tensor._offset, 0):
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
        chosen: Mapping[str, Any] = self._choice(autotune.Question("", configs, situation))
        return chosen

    def _autotuned(
        self, function: str, declared: triton_decorators.TritonFunction, named: dict[str, Any]
    ) -> triton_decorators.TritonConfig:
        chosen: triton_decorators.TritonConfig = self._choice(
            autotune.question_of(self._kernels_of.source, function, declared, named)
        )
        return chosen

    def _choice(self, question: autotune.Question) -> Any:
        config, model = self._kernels_of.chosen(question)
        if model != "" and self.model is not None:
            self.model = model
        return config

    def _scratch(self, compiled: Compiled, grid: Sequence[Any]) -> Iterator[int]:
        """Yield the arguments for Triton's trailing parameters: memory that its programs share."""
        for size in compiled.meta.get("scratch", ()):
            if size:
                yield allocate(self, (math.prod(grid) * size,), None, torch.uint8)._memory.data
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
            handles.append(handle_of(tensor))
        for i, handle in enumerate(handles):  # after all that can fail
            if handle is None:
                self.act("RETURN_NONE", i)
            else:
                self.act("RETURN", i, handle)


def table_words(capacity: int) -> int:
    """Return the words of a list in a table: WORDS in program.c."""
    return capacity // 2 * 5 + 1
