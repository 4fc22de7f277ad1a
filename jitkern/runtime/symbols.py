"""Where the functions of Torch, Python and the driver are that the launch runtime calls.

They are handed to C as a table of addresses, so that nothing needs to be linked to any of them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import c_longlong, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import torch

from jitkern.trace.shim import shim

# Exported by Torch since before 2.11, but by no promise: where one is missing, Python has to do.
_MANGLED = {
    "requires_grad": ("c10", "_ZNK3c1010TensorImpl13requires_gradEv"),
    "forward_grad": ("c10", "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE"),
    "is_included": ("c10", "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"),
    "bump_version": ("torch_cpu", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"),
    "is_inference": ("torch_cpu", "_ZN2at4_ops12is_inference4callERKNS_6TensorE"),
    "operator_delete": ("torch_cpu", "_ZdlPv"),
    "default_dtype": ("c10", "_ZN3c1017get_default_dtypeEv"),
    "function_modes": ("torch_cpu", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"),
    "context": ("torch_cpu", "_ZN2at13globalContextEv"),
    "deterministic": ("torch_cpu", "_ZNK2at7Context23deterministicAlgorithmsEv"),
}
AUTOGRAD = ("requires_grad", "forward_grad", "is_included")
MUTATION = ("bump_version", "is_inference")
OPTIONALS = ("operator_delete",)
_TANGENT = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_ulonglong, c_void_p)
_UNDEFINED = "_ZN3c1019UndefinedTensorImpl10_singletonE"
_IMPL_BYTES = 184  # of a TensorImpl; Torch's own check is that there are no more than 208
# What modes, torch.func and tracing include, to see calls between Autograd and the backend.
_WATCHING = (
    "Python", "PythonTLSSnapshot", "PythonDispatcher", "FuncTorchDynamicLayerBackMode",
    "FuncTorchDynamicLayerFrontMode", "FuncTorchVmapMode", "Functionalize", "Fake",
)  # fmt: skip


class Symbols:
    """Addresses by the names of the table; None for what this Torch has not, or has not yet."""

    def __init__(self) -> None:
        self._libraries: dict[str, ctypes.CDLL] = {}
        table = shim().partition("/* of Torch */")[2].partition("/* of the runtime")[0]
        names = [line.partition("(*")[2].partition(")")[0] for line in table.splitlines()]
        self.addresses = {name: self._address(name) for name in names if name}
        missing = [n for n in self.addresses if not self._optional(n) and not self.addresses[n]]
        self.missing = missing[0] if missing else ""

    def provides(self, *names: str) -> bool:
        """Whether this Torch has all of these, and shows where tensors keep their keys."""
        return all(self.addresses.get(name) for name in names) and bool(self.keys_at)

    def library(self, name: str) -> ctypes.CDLL:
        """One of Torch's libraries. Raises OSError."""
        if name not in self._libraries:
            path = Path(torch.__file__).parent / "lib" / f"lib{name}.so"
            self._libraries[name] = ctypes.CDLL(str(path))
        return self._libraries[name]

    @functools.cached_property
    def keys_at(self) -> int | None:
        """At which byte of a TensorImpl its dispatch keys are; None where that is not clear."""
        return _place_of_keys(torch.empty(0))

    @functools.cached_property
    def abi_version(self) -> c_ulonglong:
        """What registrations name as the version of the C interface."""
        version = self.library("torch_cpu").aoti_torch_abi_version
        version.restype = c_ulonglong
        return c_ulonglong(version())

    def has_tangent(self, tensor: torch.Tensor) -> bool:
        """Whether forward-mode AD is at work on a tensor; no dispatcher and no mode sees this."""
        impl = c_void_p(tensor._cdata)  # an at::Tensor is this one pointer
        tangent = _TANGENT(self.addresses["forward_grad"] or 0)(impl, 0, ctypes.byref(impl))
        undefined = c_void_p.in_dll(self.library("c10"), _UNDEFINED)
        return c_void_p.from_address(tangent).value != ctypes.addressof(undefined)

    def add_driver(self) -> None:
        """Find the CUDA driver's functions, later than the rest: an import asks for no device."""
        driver = ctypes.CDLL("libcuda.so.1")
        for name in self.addresses:
            if name.startswith("cu"):
                self.addresses[name] = ctypes.cast(driver[name], c_void_p).value

    def table(self) -> ctypes.Array[c_void_p]:
        """The addresses as C has them."""
        return (c_void_p * len(self.addresses))(*self.addresses.values())

    @functools.cached_property
    def plain_keys(self) -> int:
        """The dispatch keys of tensors that nothing but Autograd and a backend sees."""
        known = torch._C.DispatchKey.__members__
        cuda = torch._C.DispatchKeySet(known["CUDA"]) | torch._C.DispatchKeySet(
            known["AutocastCUDA"]
        )
        return _keys(torch.empty(0)) | int(cuda.raw_repr())

    def autograd(self) -> tuple[Any, ...]:
        """What `jitkern_autograd` takes: when the Autograd key may go straight on to a backend."""
        known = torch._C.DispatchKey.__members__
        watching = [known[name].value for name in _WATCHING if name in known]
        undefined = c_void_p.in_dll(self.library("c10"), _UNDEFINED)
        return (
            ctypes.byref(undefined), c_longlong(self.keys_at or 0), c_ulonglong(self.plain_keys),
            (c_uint * (len(watching) + 1))(*watching),
        )  # fmt: skip

    def _optional(self, name: str) -> bool:
        return name in _MANGLED or name in ("get_current_cuda_stream", "pow") or name[:2] == "cu"

    def _address(self, name: str) -> int | None:
        if name.startswith("cu"):
            return None
        if name == "get_current_cuda_stream" and not torch.version.cuda:
            return None
        try:
            if name.startswith("Py"):
                function: Any = ctypes.pythonapi[name]
            elif name == "pow":
                function = ctypes.CDLL("libm.so.6")[name]
            else:
                home, symbol = _MANGLED.get(name, ("torch_cpu", f"aoti_torch_{name}"))
                home = "torch_cuda" if name == "get_current_cuda_stream" else home
                function = self.library(home)[symbol]
            return ctypes.cast(function, c_void_p).value
        except (AttributeError, OSError):
            return None


@functools.cache
def symbols() -> Symbols:
    """Those of this process."""
    return Symbols()


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
        words = struct.unpack(f"{_IMPL_BYTES // 8}Q", ctypes.string_at(tensor._cdata, _IMPL_BYTES))
        keys = _keys(tensor)
        places = {8 * i for i, word in enumerate(words) if word == keys}
        found = places if found is None else found & places
    return found.pop() if found and len(found) == 1 else None
