"""Compiled code brought into this process, each artifact once."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jitkern._fork import after_fork
from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.loading import (
        cuda_driver as cuda_driver,
        library as library,
        loader as loader,
    )
else:
    __getattr__ = on_first_use(__name__)

# The code that this process has loaded: by the digest of its entry, and for an Extension its
# function; for a library, by what makes it this library and no other (see `library.open_library`);
# for `load_inline`, by its call as well.
# The digest of a shared library that an Extension is linked with, by the loader's handle.
LOADED: dict[str, Any] = {}
_locks: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
_guard = threading.Lock()


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """A lock for each name: one thread of this process at a time."""
    with _guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        yield


@contextlib.contextmanager
def preserved_float_environment() -> Iterator[None]:
    """A block after which floating-point numbers are computed as before it, in this thread.

    A constructor of a library may change that: crtfastmath.o, which -ffast-math has linked into
    other libraries, flushes denormals.
    """
    system = ctypes.CDLL(None)
    if not hasattr(system, "fegetenv"):  # Python uses no libm
        yield
        return
    modes = ctypes.create_string_buffer(64)  # fenv_t has 32 bytes on x86-64, and 8 on aarch64
    system.fegetenv(modes)
    try:
        yield
    finally:
        system.fesetenv(modes)


after_fork(_guard, _locks.clear)  # of the parent
