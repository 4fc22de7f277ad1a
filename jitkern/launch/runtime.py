"""The launch runtime in this process: `runtime.c`, bound to Torch by a table of addresses.

It is compiled once per platform and cached like any artifact. A process that starts before it
exists uses the Python launcher for good, and leaves the runtime behind for the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import struct
import sys
import threading
from collections.abc import Mapping
from ctypes import c_longlong, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import torch

from jitkern import config, jit
from jitkern.errors import CompilerNotFound, JitkernError, LoadError, NotCached, TargetError
from jitkern.kernel import Generated, Variant
from jitkern.target import Target

MAX_ARGUMENTS, MAX_RETURNS, MAX_TEXT = 32, 16, 4096  # as runtime.c has them
_MACHINES = ("x86_64", "aarch64")  # whose trampolines runtime.c knows
_log = logging.getLogger(__name__)
# Exported by Torch since before 2.11, but by no promise: where one is missing, Python has to do.
_MANGLED = {
    "requires_grad": ("c10", "_ZNK3c1010TensorImpl13requires_gradEv"),
    "forward_grad": ("c10", "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE"),
    "is_included": ("c10", "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"),
    "bump_version": ("torch_cpu", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"),
    "is_inference": ("torch_cpu", "_ZN2at4_ops12is_inference4callERKNS_6TensorE"),
    "operator_delete": ("torch_cpu", "_ZdlPv"),
}
_UNDEFINED = "_ZN3c1019UndefinedTensorImpl10_singletonE"
AUTOGRAD = ("requires_grad", "forward_grad", "is_included")
# What modes, torch.func and tracing include, to see calls between Autograd and the backend.
_WATCHING = (
    "Python", "PythonTLSSnapshot", "PythonDispatcher", "FuncTorchDynamicLayerBackMode",
    "FuncTorchDynamicLayerFrontMode", "FuncTorchVmapMode", "Functionalize", "Fake",
)  # fmt: skip
MUTATION = ("bump_version", "is_inference")
OPTIONALS = ("operator_delete",)


@functools.cache
def shim() -> str:
    """What stands above the runtime and every stub."""
    return Path(__file__).with_name("shim.h").read_text(encoding="utf-8")


def variant() -> Variant:
    """What the runtime is compiled from."""
    text = shim() + "\n" + Path(__file__).with_name("runtime.c").read_text(encoding="utf-8")
    return Variant("jitkern::runtime", Generated("runtime.c", text=text))


@functools.cache
def runtime() -> Runtime | None:
    """The runtime, if the cache has it; asked when the first op is declared, and not again."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    try:
        return Runtime(jit.loaded(variant(), Target.current("cpu"), may_compile=False))
    except (NotCached, TargetError) as e:
        _log.debug("calls go through the Python launcher: %s", e)
    except (JitkernError, AttributeError, KeyError, OSError, ValueError) as e:
        _log.warning("calls go through the Python launcher, which is slower: %s", e)
    return None


@functools.cache
def leave_behind() -> None:
    """Compile the runtime for the next process, in a thread; said once where that cannot be."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return
    if config.current().compile == "never":
        _log.info("calls go through the Python launcher: the launch runtime is not cached")
        return

    def build() -> None:
        try:
            jit.ensure(variant(), Target.current("cpu"))
        except CompilerNotFound as e:
            announce(e)
        except JitkernError as e:
            _log.info("the launch runtime could not be built: %s", e)

    with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
        threading.Thread(target=build, name="jitkern runtime").start()


def announce(why: CompilerNotFound) -> None:
    """Say, once, that there is no compiler for stubs and the runtime."""
    message = f"calls go through the Python launcher, which is slower: {why}"
    if message not in _announced:
        _announced.add(message)
        _log.warning("%s", message)


_announced: set[str] = set()


class Runtime:
    """The loaded runtime. Its functions are called under `lock` where they change a table."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        self._libraries: dict[tuple[str, str], c_void_p] = {}
        self._kept: list[Any] = []  # what C holds pointers into
        self._torch = {name: _torch_library(name) for name in ("c10", "torch_cpu")}
        table = shim().partition("/* of Torch */")[2].partition("/* of the runtime")[0]
        names = [line.partition("(*")[2].partition(")")[0] for line in table.splitlines()]
        self.addresses = {name: self._address(name) for name in names if name}
        missing = [n for n in self.addresses if not self._optional(n) and not self.addresses[n]]
        if missing:
            raise LoadError(f"this Torch has no `{missing[0]}`, which the launch runtime needs")
        for name, result in (("jitkern_trampoline", c_void_p), ("jitkern_misses", c_ulonglong)):
            getattr(library, name).restype = result
        self._bind()
        self._bind_autograd()
        config.listeners.append(self._follow)
        self._follow(config.current())

    def provides(self, *names: str) -> bool:
        """Whether this Torch has all of these, and shows where tensors keep their keys."""
        return all(self.addresses.get(name) for name in names) and bool(self.keys_at)

    def declare(self, kinds: str, name: str, sibling: str, device: str) -> int:
        """A slot for an op on a device type; -1 where all are taken."""
        with self.lock:
            names = (text.encode() for text in (kinds, name, sibling))
            slot: int = self.library.jitkern_declare(*names, int(device == "cuda"))
            return slot

    def register(self, slot: int, name: str, key: str) -> None:
        """Make the slot's trampoline Torch's kernel for `name` at a dispatch key, for good."""
        namespace, _, plain = name.partition("::")
        torch_cpu = self._torch["torch_cpu"]
        library = self._libraries.get((namespace, key))
        if library is None:
            library = self._libraries[namespace, key] = c_void_p()
            if torch_cpu.aoti_torch_library_init_impl(
                namespace.encode(), key.encode(), b"jitkern", 0, ctypes.byref(library)
            ):
                raise RuntimeError(f"Torch gave no library for {namespace} at {key}")
        trampoline = c_void_p(self.library.jitkern_trampoline(slot, int(key == "Autograd")))
        if torch_cpu.torch_library_impl(library, plain.encode(), trampoline, self._version):
            raise RuntimeError(f"Torch took no kernel for {name} at {key}")

    def append(
        self,
        slot: int,
        stub: Any,
        kernels: list[int],
        device: torch.device,
        settings: config.Config,
    ) -> bool:
        """Add a variant that serves `device` under these settings; False where there is no room."""
        if device.type == "cuda" and not self.addresses["cuLaunchKernelEx"]:
            self._bind_driver()
        table = (c_void_p * max(1, len(kernels)))(*kernels)
        self._kept += [stub, table]
        function = ctypes.cast(stub.stub, c_void_p)
        number = config.PREFERENCES.index(settings.prefer)
        with self.lock:
            room = self.library.jitkern_append(slot, function, table, device.index or 0, number)
        return bool(room >= 0)

    def backends(self, slot: int, slots: Mapping[str, int]) -> None:
        """Let the slot at the Autograd key go straight on to those of the op's devices."""
        self.library.jitkern_backends(slot, slots.get("cpu", -1), slots.get("cuda", -1))

    def misses(self, slot: int) -> int:
        """How many calls of an op asked Python."""
        return int(self.library.jitkern_misses(slot))

    def has_tangent(self, tensor: torch.Tensor) -> bool:
        """Whether forward-mode AD is at work on a tensor; no dispatcher and no mode sees this."""
        return bool(self.library.jitkern_has_tangent(c_void_p(tensor._cdata)))

    def fail(self, message: str) -> None:
        """Make the trampoline that called Python raise a RuntimeError."""
        self.library.jitkern_fail(message.encode())

    def _after_fork(self) -> None:
        self.lock = threading.Lock()  # another thread of the parent may have held it

    @property
    def _version(self) -> c_ulonglong:
        version = self._torch["torch_cpu"].aoti_torch_abi_version
        version.restype = c_ulonglong
        return c_ulonglong(version())

    def _bind(self) -> None:
        array = (c_void_p * len(self.addresses))(*self.addresses.values())
        self.library.jitkern_bind(array, c_ulonglong(ctypes.sizeof(array)))

    def _bind_autograd(self) -> None:
        """Tell C when the Autograd key may go straight on to a backend."""
        plain = torch.empty(0)
        known = torch._C.DispatchKey.__members__
        watching = [known[name].value for name in _WATCHING if name in known]
        cuda = torch._C.DispatchKeySet(known["CUDA"]) | torch._C.DispatchKeySet(
            known["AutocastCUDA"]
        )
        undefined = c_void_p.in_dll(self._torch["c10"], _UNDEFINED)
        self.keys_at = _place_of_keys(plain)
        self.library.jitkern_autograd(
            ctypes.byref(undefined), c_longlong(self.keys_at or 0),
            c_ulonglong(_keys(plain) | cuda.raw_repr()), (c_uint * (len(watching) + 1))(*watching),
        )  # fmt: skip

    def _bind_driver(self) -> None:
        """The driver comes later than the rest: an import asks for no device."""
        driver = ctypes.CDLL("libcuda.so.1")
        for name in self.addresses:
            if name.startswith("cu"):
                self.addresses[name] = ctypes.cast(driver[name], c_void_p).value
        self._bind()

    def _follow(self, settings: config.Config) -> None:
        """Variants serve while the settings prefer the source that they were made under."""
        self.library.jitkern_prefer(config.PREFERENCES.index(settings.prefer))

    def _optional(self, name: str) -> bool:
        return name in _MANGLED or name.startswith("cu") or name == "get_current_cuda_stream"

    def _address(self, name: str) -> int | None:
        if name.startswith("cu"):
            return None
        home, symbol = _MANGLED.get(name, ("torch_cpu", f"aoti_torch_{name}"))
        if name == "get_current_cuda_stream":
            if not torch.version.cuda:
                return None
            home = "torch_cuda"
        try:
            library = self._torch.get(home) or _torch_library(home)
            return ctypes.cast(library[symbol], c_void_p).value
        except (AttributeError, OSError):
            return None


def _torch_library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))


def _keys(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _place_of_keys(plain: torch.Tensor) -> int | None:
    """At which byte of a TensorImpl its dispatch keys are, if that can be told beyond doubt.

    Torch has no function for it. The keys of several tensors of different kinds are searched for.
    """
    with torch.inference_mode():
        inference = torch.empty(0)
    tensors = (
        plain,
        inference,
        torch.empty(0, device="meta"),
        torch.nn.Parameter(torch.empty(0)),
        torch.empty(0, dtype=torch.complex64).conj(),
    )
    found = None
    for tensor in tensors:
        words = struct.unpack("40Q", ctypes.string_at(tensor._cdata, 320))
        places = {8 * i for i, word in enumerate(words) if word == _keys(tensor)}
        found = places if found is None else found & places
    return found.pop() if found and len(found) == 1 else None
