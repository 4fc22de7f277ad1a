"""Make a published entry callable in this process. No compiler, no Triton, no subprocess.

The modules for one kind of source are imported when an entry of that kind is loaded: the launch
runtime, which each process loads, needs none of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from jitkern import loading
from jitkern.cache.key import canonical
from jitkern.cache.store import Entry
from jitkern.errors import DeclarationError, LoadError
from jitkern.source.dtypes import DTYPES
from jitkern.source.kinds import CUDA, FUNCTION, HOST, Generated, Source


class HostFunction:
    """The function of a loaded library to which its symbol FUNCTION points."""

    def __init__(self, entry: Entry) -> None:
        self.meta = meta = entry.manifest.meta
        self.reference = entry.reference
        self.parameters: list[str] = meta["parameters"]
        self._library = _open(entry)
        address = ctypes.c_void_p.in_dll(self._library, FUNCTION).value
        self._function = ctypes.CFUNCTYPE(None)(address or 0)
        self._function.argtypes = [
            ctypes.c_void_p if code[:1] == "*" else DTYPES[code].ctype
            for code in self.parameters
            if code
        ]

    @property
    def address(self) -> int:
        """The address of the function's code, as stubs take it."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def call(self, values: list[float | None]) -> None:
        """Call the function; `values` match `parameters`."""
        self._function(*values)


def load(source: Source, entry: Entry) -> Any:
    """A CudaFunction, a HostFunction, or for an Extension the function itself.

    Raises LoadError, and DeclarationError for an Extension that registers a name already
    registered.
    """
    try:
        if source.runs == CUDA:
            meta = dict(entry.manifest.meta)
            cubin, name = entry.read(meta["artifact"]), f"`{meta['symbol']}`"
            return loading.cuda_driver.CudaFunction(cubin, meta, name, entry.reference)
        if isinstance(source, Generated):
            return _open(entry)
        return HostFunction(entry) if source.runs == HOST else _extension(entry)
    except (LoadError, DeclarationError):
        raise
    except Exception as e:  # of the system's loader, or because of an odd manifest
        noexec = _is_noexec(entry)
        hint = f"; {entry.root} is mounted noexec: point JITKERN_CACHE_DIR elsewhere"
        raise LoadError(
            f"could not load {entry.path}: {e}{hint if noexec else ''}", whole=noexec
        ) from e


def _is_noexec(entry: Entry) -> bool:
    """Whether libraries cannot be loaded from the file system of an entry."""
    try:
        return bool(os.statvfs(entry.path).f_flag & os.ST_NOEXEC)
    except (OSError, AttributeError):  # gone; not on Windows
        return False


def _open(entry: Entry) -> ctypes.CDLL:
    with entry.loadable() as path:
        return ctypes.CDLL(path)


def _extension(entry: Entry) -> Callable[..., Any]:
    import torch

    inputs, meta = entry.manifest.inputs, entry.manifest.meta
    # Two ops may use one source, which must register only once.
    identity = canonical([inputs[name] for name in ("source", "flags", "target")]).decode()
    path, output = str(entry.path / meta["artifact"]), "module" if meta["module"] else "library"
    try:
        with entry.loadable() as place:
            library = loading.library.open_library(
                meta["module"], output, path, meta["namespaces"], meta["ops"], place, identity
            )
    except loading.library.Registered as e:
        raise DeclarationError(f"the Extension of {inputs['op']} {e}") from e
    namespace, _, name = meta["function"].rpartition("::")
    home = getattr(torch.ops, namespace) if namespace else library
    function: Callable[..., Any] = getattr(home, name)
    return function.default if namespace else function  # type: ignore[attr-defined]
