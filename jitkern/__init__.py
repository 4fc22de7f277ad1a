"""jitkern: PyTorch kernels that compile on first use and never again.

`import jitkern` is light and imports no Torch; the names below load on first use. So do the modules
of a room (a folder of jitkern), so that a warm process imports only the modules that it needs.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # else loaded on first use: a type checker knows these names and no others
    from jitkern import cache_tools as cache_tools, declare as declare, ops as ops
    from jitkern.cache.events import on_compile as on_compile, stats as stats
    from jitkern.cache.store import Cache as Cache
    from jitkern.composition.pointwise import compose as compose, pointwise as pointwise
    from jitkern.config import Config as Config, using as using
    from jitkern.devtools.roofline import roofline as roofline
    from jitkern.dropin.api import load as load, load_inline as load_inline
    from jitkern.errors import (
        CacheError as CacheError,
        CompileError as CompileError,
        CompilerNotFound as CompilerNotFound,
        DeclarationError as DeclarationError,
        JitkernError as JitkernError,
        KVCacheFull as KVCacheFull,
        LaunchError as LaunchError,
        LoadError as LoadError,
        NotCached as NotCached,
        SettingError as SettingError,
        TargetError as TargetError,
        UntrustedCache as UntrustedCache,
    )
    from jitkern.kernels_src.async_scalar import AsyncScalar as AsyncScalar
    from jitkern.kernels_src.block_sparse_attention.flash_attention import (
        flash_attention as flash_attention,
    )
    from jitkern.kernels_src.block_sparse_attention.mask import BlockSparseMask as BlockSparseMask
    from jitkern.kernels_src.cross_entropy.in_place import (
        cross_entropy_in_place as cross_entropy_in_place,
    )
    from jitkern.kernels_src.linears import quantize_linears as quantize_linears
    from jitkern.kernels_src.loss_meter.meter import LossMeter as LossMeter
    from jitkern.kernels_src.paged_decode.paged_cache import PagedCache as PagedCache
    from jitkern.prewarming.api import prewarm as prewarm
    from jitkern.raw.from_file import cpp_kernel as cpp_kernel, cuda_kernel as cuda_kernel
    from jitkern.raw.from_triton import triton_kernel as triton_kernel
    from jitkern.target import Target as Target

if "t" in getattr(sys, "abiflags", ""):  # Windows has none
    raise ImportError(
        "jitkern does not run on a free-threaded build of Python, whose objects are laid out "
        f"otherwise than its guards read them: use python{sys.version_info[0]}."
        f"{sys.version_info[1]} with the global interpreter lock"
    )

__version__ = "0.1.0"
IMPORTED = time.time_ns()  # before any other module of ours; see runtime.own_code

_HOMES = {
    "AsyncScalar": "kernels_src.async_scalar",
    "BlockSparseMask": "kernels_src.block_sparse_attention.mask",
    "Cache": "cache.store",
    "Config": "config",
    "LossMeter": "kernels_src.loss_meter.meter",
    "PagedCache": "kernels_src.paged_decode.paged_cache",
    "quantize_linears": "kernels_src.linears",
    "Target": "target",
    "load": "dropin.api",
    "load_inline": "dropin.api",
    "on_compile": "cache.events",
    "compose": "composition.pointwise",
    "cpp_kernel": "raw.from_file",
    "cross_entropy_in_place": "kernels_src.cross_entropy.in_place",
    "cuda_kernel": "raw.from_file",
    "flash_attention": "kernels_src.block_sparse_attention.flash_attention",
    "triton_kernel": "raw.from_triton",
    "pointwise": "composition.pointwise",
    "prewarm": "prewarming.api",
    "roofline": "devtools.roofline",
    "stats": "cache.events",
    "using": "config",
    "JitkernError": "errors",
    "DeclarationError": "errors",
    "SettingError": "errors",
    "TargetError": "errors",
    "CompilerNotFound": "errors",
    "CompileError": "errors",
    "LoadError": "errors",
    "LaunchError": "errors",
    "KVCacheFull": "errors",
    "CacheError": "errors",
    "NotCached": "errors",
    "UntrustedCache": "errors",
}
FORK_WAITS = 10.0  # seconds, at most, for imports of other threads
_MODULES = ("ops", "declare", "cache_tools")

__all__ = sorted([*_HOMES, *_MODULES])


def on_first_use(
    room: str, homes: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a room (PEP 562), which imports its modules on first use.

    homes: public names of the room itself, with the modules that define them.
    """

    def attribute(name: str) -> Any:
        if name in homes:
            value = getattr(_imported(f"{room}.{homes[name]}"), name)
            vars(sys.modules[room])[name] = value
            return value
        if not name.startswith("__"):
            try:
                return _imported(f"{room}.{name}")
            except ModuleNotFoundError as e:
                if e.name != f"{room}.{name}":
                    raise
        raise AttributeError(f"module `{room}` has no attribute `{name}`")

    return attribute


class _Importing:
    """The threads that import on first use, for which a fork waits.

    A child has none of them, and would wait for ever for a module that one of them was importing.
    Imports never wait for each other, which could be for a lock of Python's that the other holds.
    """

    def __init__(self) -> None:
        self._gate = threading.Condition()
        self._depths: dict[int, int] = {}  # of imports within imports, by thread

    def __enter__(self) -> None:
        me = threading.get_ident()
        if me in self._depths:
            self._depths[me] += 1
            return
        with self._gate:
            self._depths[me] = 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        self._depths[me] -= 1
        if not self._depths[me]:
            with self._gate:
                del self._depths[me]
                self._gate.notify_all()

    def acquire(self) -> None:
        """Wait, but not for ever, until no other thread imports, and let none begin."""
        self._gate.acquire()
        self._gate.wait_for(lambda: self._depths.keys() <= {threading.get_ident()}, FORK_WAITS)

    def release(self) -> None:
        """Let threads import again."""
        self._gate.release()

    def forget(self) -> None:
        """Forget, in a forked child, the threads of its parent."""
        me = threading.get_ident()
        self._gate = threading.Condition()
        self._depths = {thread: n for thread, n in self._depths.items() if thread == me}


_importing = _Importing()


def _imported(name: str) -> ModuleType:
    with _importing:
        return importlib.import_module(name)


def after_fork(*renewed: Any, held: Any = None) -> None:
    """Have locks made anew, and functions called, in each child that this process forks.

    A child has none of its parent's other threads, whose locks nobody would free. The objects that
    a process holds are listed in docs/architecture.md; this is the only way to renew them.

    held: a lock that a fork waits for, and frees on both sides.
    """
    if not hasattr(os, "register_at_fork"):
        return
    if held:
        os.register_at_fork(
            before=held.acquire, after_in_parent=held.release, after_in_child=held.release
        )
    for item in renewed:
        os.register_at_fork(after_in_child=_renewal(item))


def _renewal(item: Any) -> Callable[[], object]:
    """Return what renews a lock, or the function itself that `item` is."""
    if hasattr(item, "_is_owned"):  # reentrant: the thread that forks may be in its block
        return lambda: item._is_owned() or item._at_fork_reinit()
    renewal: Callable[[], object] = getattr(item, "_at_fork_reinit", item)
    return renewal


after_fork(_importing.forget, held=_importing)
if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
