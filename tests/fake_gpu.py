"""A GPU that runs nothing: programs for CUDA and the launch runtime, over the driver of fake_gpu.c.

The tensors lie in the memory of the CPU, and are said to be on `cuda:0`.
"""

import ctypes
import shutil
import struct
import subprocess
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import torch
from helpers import H100

from jitkern import jit, testing
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.call_traces import traces_of
from jitkern.runtime import binding
from jitkern.runtime.guards import Guard
from jitkern.runtime.symbols import symbols
from jitkern.source.dtypes import table_of
from jitkern.source.kinds import HOST
from jitkern.target import Target
from jitkern.trace.program import listing

TARGET = Target.parse(H100)
_ALSO_OF_TORCH = (
    "get_device_type", "get_device_index", "get_current_device_index", "get_current_cuda_stream", "empty_strided",
    "call_dispatcher",
)  # fmt: skip
_PARAMETERS = {
    "*": ("Q", 8),
    "i32": ("i", 4),
    "i64": ("q", 8),
    "f32": ("f", 4),
    "tensor_map": ("16Q", 128),
}


def _parameter(code: str) -> tuple[str, int]:
    """The format and the bytes of a parameter; of a table, its bytes."""
    table = table_of(code)
    if table:
        return f"{table[2]}s", table[2]
    known = _PARAMETERS.get(code[:1] if code[0] == "*" else code)
    return known or (code, struct.calcsize(f"={code}"))  # a format of `struct`


def _handle(library, tensor: torch.Tensor) -> int:
    handle = c_void_p()
    library.aoti_torch_new_tensor_handle(
        ctypes.byref(c_void_p(tensor._cdata)), ctypes.byref(handle)
    )
    return handle.value


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    device = property(lambda _: torch.device("cuda", 0))
    is_cuda = property(lambda _: True)


class FakeGpu:
    """The driver, and a launch runtime of its own that is bound to the driver."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        library = folder / "fake_gpu.so"
        source = Path(__file__).with_name("fake_gpu.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic", "-o", library, source], check=True
        )
        self.driver = ctypes.CDLL(str(library))
        testing.set_driver(monkeypatch, self.driver)
        entry = jit.ensure(binding.variant(), Target.current("cpu"))
        copied = shutil.copy(entry.path / entry.manifest.meta["artifact"], folder / "runtime.so")
        self.runtime = ctypes.CDLL(str(copied))  # another file, so with tables of its own
        addresses = dict(symbols().addresses)
        real = c_void_p.in_dll(self.driver, "real_empty_strided")
        real.value = addresses["empty_strided"]
        for name in addresses:
            if name in _ALSO_OF_TORCH or name.startswith("cu"):
                addresses[name] = ctypes.cast(self.driver[name], c_void_p).value
        table = (c_void_p * len(addresses))(*addresses.values())
        self.runtime.jitkern_bind(table, c_uint64(ctypes.sizeof(table)))
        self._alive = []

    def __getattr__(self, name: str) -> int:
        """A number that the driver keeps."""
        return c_int.in_dll(self.driver, name).value

    def tell(self, name: str, value: int) -> None:
        """Set a number that the driver keeps."""
        c_int.in_dll(self.driver, name).value = value

    def array(self, name: str, kind, length: int) -> list[int]:
        """The numbers of an array that the driver keeps."""
        return list((kind * length).in_dll(self.driver, name))

    def learn(self, op, call, slot: int = 0) -> str:
        """Trace a call, let its program serve in a slot, and return the steps of the program."""
        source = op.sources["cuda"][0]
        variants = needs_of(op, source, "cuda", TARGET).variants
        for variant in variants:
            jit.ensure(variant, TARGET)
        (traced,), reasons, _ = traces_of(op, source, TARGET, [call], {})
        assert not reasons
        trace = traced.trace
        passed = [kernel.parameters for kernel in trace.kernels]
        kernels = (c_void_p * 4)(1, 2, 3, 4)
        if source.runs == HOST:
            functions = [jit.loaded(variant, TARGET) for variant in variants]
            passed = [function.passed for function in functions]
            kernels[: len(functions)] = [function.address for function in functions]
        kinds = "".join(p.kind for p in op.signature.parameters).encode()
        results = op.signature.results.encode()
        self.runtime.jitkern_declare(slot, kinds, results, b"fake", b"fake", 1, 0)
        guard = Guard()  # of a scope without names
        loaded = testing.loaded_program(trace.program, passed, kernels, guard)
        self._alive.append(loaded)
        assert self.runtime.jitkern_append(slot, ctypes.byref(loaded), -1) >= 0
        if source.runs != HOST:
            self.expect(passed[-1])
        names = [parameter.name for parameter in op.signature.parameters]
        _, constants, texts, *_ = trace.program
        return "\n".join(text for text, _ in listing(trace.steps, constants, texts, names))

    def expect(self, codes: list[str]) -> None:
        """Say what the parameters of the next launches are."""
        self._codes = codes
        sizes = [_parameter(code)[1] for code in codes]
        (c_int * 16).in_dll(self.driver, "sizes")[:] = [*sizes, *[0] * (16 - len(sizes))]

    def call(self, *args, slot: int = 0) -> list | None:
        """Call the op of a slot; returns the arguments of its last launch, None if Python is asked."""
        before = self.missed, self.launches
        library, stack = symbols().library("torch_cpu"), (c_uint64 * 16)()
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                stack[i] = _handle(library, arg)
            elif isinstance(arg, list):
                made = c_void_p()
                library.torch_new_list_reserve_size(c_size_t(len(arg)), ctypes.byref(made))
                for tensor in arg:
                    library.torch_list_push_back(made, c_uint64(_handle(library, tensor)))
                stack[i] = made.value
            else:
                stack[i] = arg
        self.runtime.jitkern_enter(stack, c_uint64(len(args)), c_uint64(1), c_uint(slot))
        if stack[0]:
            library.aoti_torch_delete_tensor_object(c_void_p(stack[0]))
        if self.missed > before[0]:
            return None
        assert self.launches > before[1]
        return self.launched()

    def launched(self) -> list:
        """The arguments of the last launch."""
        noted = (ctypes.c_ubyte * 2048 * 16).in_dll(self.driver, "parameters")
        values = []
        for code, row in zip(self._codes, noted):
            unpacked = struct.unpack_from(f"={_parameter(code)[0]}", bytes(row))
            values.append(unpacked[0] if len(unpacked) == 1 else list(unpacked))
        return values

    @property
    def grid(self) -> int:
        """The blocks of the last launch, in the first dimension."""
        return self.array("config", c_uint, 7)[0]
