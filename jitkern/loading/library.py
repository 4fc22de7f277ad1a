"""Load Python modules, libraries that register ops, and programs into this process."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import re
import threading
from collections.abc import Iterable
from typing import Any

from jitkern._fork import after_fork
from jitkern.loading import LOADED, preserved_float_environment

opening = threading.RLock()
after_fork(opening)


class Registered(RuntimeError):
    """A library would register a name that this process has: Torch would end the process."""


class Refused(OSError):
    """The system's loader refused a library; the message is the loader's own."""


def open_library(
    name: str,
    output: str,
    path: str,
    namespaces: Iterable[str],
    ops: Iterable[str],
    place: str,
    identity: str = "",
) -> Any:
    """The module, or `path` once its library is loaded (a program is not loaded); each loaded once.

    name: the module's name.
    output: `module`, `library` or `program`.
    namespaces, ops: the names that the library registers with Torch.
    place: where the loader finds the verified bytes of `path` (see `Entry.loadable`).
    identity: the libraries of one identity are one, of which the first is loaded; default: `path`.

    Raises Registered, Refused, and the module's own exceptions.
    """
    identity = identity or path
    with opening, preserved_float_environment():
        if identity not in LOADED:
            _refuse_second_registration(name, namespaces, ops)
            if output == "module":
                LOADED[identity] = _imported(name, path, place)
            else:
                if output == "library":
                    _load(path, place)
                LOADED[identity] = path
        return LOADED[identity]


def _load(path: str, place: str) -> None:
    """Load a library as torch.ops.load_library does, which would look the path up once more."""
    import torch

    try:
        with torch._ops.dl_open_guard():
            ctypes.CDLL(place)
    except OSError as e:
        raise Refused(str(e).replace(place, path)) from e
    torch.ops.loaded_libraries.add(path)


def _imported(name: str, path: str, place: str) -> Any:
    """Load the module without adding it to `sys.modules`; its `__file__` is `path`.

    pybind11 caches modules by name, so a second load uses `<stem>.<name>`. The loader calls
    PyInit_<name>, with the last part of the name.
    """
    stem = os.path.basename(path).removesuffix(".so").replace(".", "_")  # noqa: PTH119  imports less
    for alias in (name, f"{stem}.{name}"):
        spec = _spec(alias, place)
        try:
            module = importlib.util.module_from_spec(spec)
        except ImportError as e:
            if e.path == place:
                raise Refused(str(e).replace(place, path)) from e
            raise  # an import of the module itself failed
        if module.__file__ == place:
            break
        module.__spec__ = _spec(alias, str(module.__file__))
    assert spec.loader
    module.__file__ = path
    module.__spec__ = _spec(alias, path)
    spec.loader.exec_module(module)
    return module


def _spec(name: str, path: str) -> importlib.machinery.ModuleSpec:
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec
    return spec


def _refuse_second_registration(name: str, namespaces: Iterable[str], ops: Iterable[str]) -> None:
    import torch

    for namespace in namespaces:
        try:
            torch._C._dispatch_library("DEF", namespace, "", __file__, 0).reset()
        except RuntimeError as e:
            other = "name" if namespace == name else "namespace"
            earlier = re.search(r"[Pp]revious registration.*? at (.*?)(?:;|\n|$)", str(e))
            raise Registered(
                f"registers the namespace `{namespace}` with TORCH_LIBRARY, and this process has "
                f"that namespace already{f' ({earlier.group(1)})' if earlier else ''}. Give the "
                f"library another {other}, add to the first with TORCH_LIBRARY_FRAGMENT, or load "
                "the changed source in a new process"
            ) from e
    for op in ops:
        if _is_registered(op):
            raise Registered(
                f"defines the op `{op}` with TORCH_LIBRARY_FRAGMENT, and this process has that op "
                "already. Give the op another name, or load it in a new process"
            )


def _is_registered(op: str) -> bool:
    import torch

    name, _, overload = op.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True
