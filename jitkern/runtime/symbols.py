"""Addresses of the functions of Torch, Python and the driver that the launch runtime calls.

C gets them as a table of addresses, so that the runtime need not be linked to any library.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from ctypes import c_longlong, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import torch

# Exported since before Torch 2.11, but not promised: if one is missing, Python serves the calls.
_MANGLED = {
    "requires_grad": ("c10", "_ZNK3c1010TensorImpl13requires_gradEv"),
    "forward_grad": ("c10", "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE"),
    "is_included": ("c10", "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"),
    "bump_version": ("torch_cpu", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"),
    "is_inference": ("torch_cpu", "_ZN2at4_ops12is_inference4callERKNS_6TensorE"),
    "inference_mode": ("c10", "_ZN3c1013InferenceMode10is_enabledEv"),
    "operator_delete": ("torch_cpu", "_ZdlPv"),
    "operator_new": ("torch_cpu", "_Znwm"),
    "default_dtype": ("c10", "_ZN3c1017get_default_dtypeEv"),
    "function_modes": ("torch_cpu", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"),
    "context": ("torch_cpu", "_ZN2at13globalContextEv"),
    "deterministic": ("torch_cpu", "_ZNK2at7Context23deterministicAlgorithmsEv"),
}
AUTOGRAD = ("requires_grad", "forward_grad", "is_included")
MUTATION = ("bump_version", "is_inference", "inference_mode")
OPTIONALS = ("operator_delete", "operator_new")
LISTS = (  # of Torch's stable C interface since 2.10
    "list_size", "list_get_item", "delete_list", "string_length", "string_c_str", "delete_string",
)  # fmt: skip
_TANGENT = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_ulonglong, c_void_p)
_UNDEFINED = "_ZN3c1019UndefinedTensorImpl10_singletonE"
_IMPL_BYTES = 184  # size of a TensorImpl; Torch itself checks that it has no more than 208
# Keys that modes, torch.func and tracing include, to see calls between Autograd and the backend.
_WATCHING = (
    "Python", "PythonTLSSnapshot", "PythonDispatcher", "FuncTorchDynamicLayerBackMode",
    "FuncTorchDynamicLayerFrontMode", "FuncTorchVmapMode", "Functionalize", "Fake",
)  # fmt: skip


class Symbols:
    """Addresses by the names of the table; None for missing or not yet loaded functions."""

    def __init__(self) -> None:
        self._libraries: dict[str, ctypes.CDLL] = {}
        text = Path(__file__).with_name("program.c").read_text(encoding="utf-8")
        table = text.partition("/* of Torch */")[2].partition("} Api;")[0]
        names = [line.partition("(*")[2].partition(")")[0] for line in table.splitlines()]
        self.addresses = {name: self._address(name) for name in names if name}
        missing = [n for n in self.addresses if not self._optional(n) and not self.addresses[n]]
        self.missing = missing[0] if missing else ""

    def provides(self, *names: str) -> bool:
        """Whether this Torch has all these functions, and `keys_at` is known."""
        return all(self.addresses.get(name) for name in names) and bool(self.keys_at)

    def library(self, name: str) -> ctypes.CDLL:
        """Return one of Torch's libraries. Raises OSError."""
        if name not in self._libraries:
            path = Path(torch.__file__).parent / "lib" / f"lib{name}.so"
            self._libraries[name] = ctypes.CDLL(str(path))
        return self._libraries[name]

    @functools.cached_property
    def keys_at(self) -> int | None:
        """The byte offset of the dispatch keys in a TensorImpl; None if that is not clear."""
        return self._plain[1]

    @functools.cached_property
    def _plain(self) -> tuple[int, int | None]:
        """The dispatch keys of a plain tensor, and their place.

        The modes, transforms and default device of this thread would change both: where there are
        any, another thread measures.
        """
        if not (
            torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._are_functorch_transforms_active()
            or torch.is_inference_mode_enabled()
        ):
            return _measured_keys()
        measured: list[tuple[int, int | None]] = []
        thread = threading.Thread(target=lambda: measured.append(_measured_keys()))
        thread.start()
        thread.join()
        return measured[0]

    @functools.cached_property
    def abi_version(self) -> c_ulonglong:
        """The version of the C interface that registrations name."""
        version = self.library("torch_cpu").aoti_torch_abi_version
        version.restype = c_ulonglong
        return c_ulonglong(version())

    def has_tangent(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor carries a forward-mode tangent, which no dispatcher and no mode sees."""
        impl = c_void_p(tensor._cdata)  # an at::Tensor is this one pointer
        tangent = _TANGENT(self.addresses["forward_grad"] or 0)(impl, 0, ctypes.byref(impl))
        undefined = c_void_p.in_dll(self.library("c10"), _UNDEFINED)
        return c_void_p.from_address(tangent).value != ctypes.addressof(undefined)

    def add_driver(self) -> None:
        """Find the CUDA driver's functions, which an import must not need."""
        driver = ctypes.CDLL("libcuda.so.1")
        for name in self.addresses:
            if name.startswith("cu"):
                self.addresses[name] = ctypes.cast(driver[name], c_void_p).value

    def table(self) -> ctypes.Array[c_void_p]:
        """Return the addresses as an array for C."""
        return (c_void_p * len(self.addresses))(*self.addresses.values())

    @functools.cached_property
    def plain_keys(self) -> int:
        """The dispatch keys of tensors that only Autograd and a backend see."""
        known = torch._C.DispatchKey.__members__
        cuda = torch._C.DispatchKeySet(known["CUDA"]) | torch._C.DispatchKeySet(
            known["AutocastCUDA"]
        )
        return self._plain[0] | int(cuda.raw_repr())

    def autograd(self) -> tuple[Any, ...]:
        """Return the arguments of `jitkern_autograd`, by which C may skip the dispatcher."""
        known = torch._C.DispatchKey.__members__
        watching = [known[name].value for name in _WATCHING if name in known]
        undefined = c_void_p.in_dll(self.library("c10"), _UNDEFINED)
        return (
            ctypes.byref(undefined), c_longlong(self.keys_at or 0), c_ulonglong(self.plain_keys),
            (c_uint * (len(watching) + 1))(*watching),
        )  # fmt: skip

    def _optional(self, name: str) -> bool:
        few = ("get_current_cuda_stream", "pow", *LISTS)
        return name in _MANGLED or name in few or name[:2] == "cu"

    def _address(self, name: str) -> int | None:
        if name.startswith("cu"):
            return None
        if name == "get_current_cuda_stream" and not torch.version.cuda:
            return None
        try:
            if name.startswith("Py"):
                return _address_in(ctypes.pythonapi, name)
            if name == "pow":
                return _address_in(ctypes.CDLL("libm.so.6"), name)
            prefix = "torch" if name in LISTS else "aoti_torch"
            home, symbol = _MANGLED.get(name, ("torch_cpu", f"{prefix}_{name}"))
            home = "torch_cuda" if name == "get_current_cuda_stream" else home
            return _address_in(self.library(home), symbol)
        except (AttributeError, OSError, TypeError):  # no such library, or no dlsym
            return None


@functools.cache
def _dlsym() -> Any:
    dlsym = ctypes.CDLL(None).dlsym
    dlsym.restype, dlsym.argtypes = c_void_p, (c_void_p, ctypes.c_char_p)
    return dlsym


def _address_in(library: ctypes.CDLL, symbol: str) -> int | None:
    """Return the address of a symbol, or None; an object of ctypes for each would take 10 us."""
    address: int | None = _dlsym()(library._handle, symbol.encode())
    return address


@functools.cache
def symbols() -> Symbols:
    """Return the symbols of this process."""
    return Symbols()


def _keys(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _measured_keys() -> tuple[int, int | None]:
    """Return the keys of a plain tensor, and their byte offset in a TensorImpl, or None in doubt.

    Torch has no function for this offset: search several kinds of tensors for their keys.
    """
    plain = torch.empty(0, device="cpu")
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    tensors = (
        plain,
        inference,
        torch.empty(0, device="meta"),
        torch.nn.Parameter(torch.empty(0, device="cpu")),
        torch.empty(0, dtype=torch.complex64, device="cpu").conj(),
    )
    common = None
    for tensor in tensors:
        words = struct.unpack(f"{_IMPL_BYTES // 8}Q", ctypes.string_at(tensor._cdata, _IMPL_BYTES))
        keys = _keys(tensor)
        places = {8 * i for i, word in enumerate(words) if word == keys}
        common = places if common is None else common & places
    return _keys(plain), common.pop() if common and len(common) == 1 else None
