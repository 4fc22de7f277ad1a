"""jitkern: PyTorch kernels that compile on first use and are cached.

`import jitkern` is light and imports no Torch: the names below are loaded when they are first used.
Start with `jitkern.declare.kernel` (an op with kernels), `jitkern.pointwise` (a formula),
`jitkern.load_inline` (as Torch's), `jitkern.ops` (the shipped ops) and `jitkern.prewarm`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:  # else loaded on first use: a type checker knows these names and no others
    from jitkern import cache_tools as cache_tools, declare as declare, ops as ops
    from jitkern._version import __version__ as __version__
    from jitkern.cache.events import on_compile as on_compile, stats as stats
    from jitkern.cache.store import Cache as Cache
    from jitkern.composition.pointwise import compose as compose, pointwise as pointwise
    from jitkern.config import Config as Config, using as using
    from jitkern.devtools.roofline import roofline as roofline
    from jitkern.dropin.api import load as load, load_inline as load_inline
    from jitkern.dropin.patch import patch_extensions as patch_extensions
    from jitkern.errors import (
        CacheError as CacheError,
        CompileError as CompileError,
        CompilerNotFound as CompilerNotFound,
        DeclarationError as DeclarationError,
        JitkernError as JitkernError,
        LaunchError as LaunchError,
        LoadError as LoadError,
        NotCached as NotCached,
        SettingError as SettingError,
        TargetError as TargetError,
        UntrustedCache as UntrustedCache,
    )
    from jitkern.prewarming.api import prewarm as prewarm
    from jitkern.raw.from_file import cpp_kernel as cpp_kernel, cuda_kernel as cuda_kernel
    from jitkern.raw.from_triton import triton_kernel as triton_kernel
    from jitkern.raw.patch import patch_triton as patch_triton
    from jitkern.target import Target as Target

if "t" in getattr(sys, "abiflags", ""):  # Windows has none
    raise ImportError(
        "jitkern does not run on a free-threaded build of Python, whose objects are laid out "
        f"otherwise than its guards read them: use python{sys.version_info[0]}."
        f"{sys.version_info[1]} with the global interpreter lock"
    )

_HOMES = {
    "Cache": "cache.store",
    "Config": "config",
    "Target": "target",
    "load": "dropin.patch",
    "load_inline": "dropin.patch",
    "on_compile": "cache.events",
    "compose": "composition.pointwise",
    "cpp_kernel": "raw.from_file",
    "cuda_kernel": "raw.from_file",
    "triton_kernel": "raw.from_triton",
    "pointwise": "composition.pointwise",
    "patch_extensions": "dropin.patch",
    "patch_triton": "raw.patch",
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
    "CacheError": "errors",
    "NotCached": "errors",
    "UntrustedCache": "errors",
    "__version__": "_version",
}
_OF_OPS = frozenset((
    "AsyncScalar", "BlockSparseMask", "KVCacheFull", "LossMeter", "PagedCache",
    "cross_entropy_in_place", "flash_attention", "quantize_linears",
))  # fmt: skip
_FOR_AUTHORS = ("kernel", "Cpp", "CuTile", "Cuda", "Cute", "Extension", "Include", "Triton")
_MODULES = ("ops", "declare", "cache_tools")

__all__ = sorted({*_HOMES, *_MODULES} - {"__version__"})

if not TYPE_CHECKING:
    _attribute = on_first_use(
        __name__, _HOMES, elsewhere=dict.fromkeys(_FOR_AUTHORS, "jitkern.declare")
    )

    def __getattr__(name: str) -> object:
        if name not in _OF_OPS:
            return _attribute(name)
        import warnings

        old = f"`jitkern.{name}` goes with the next release: use `jitkern.ops.{name}`"
        warnings.warn(old, FutureWarning, stacklevel=2)
        return getattr(_attribute("ops"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
