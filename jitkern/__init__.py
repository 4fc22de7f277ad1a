"""jitkern: PyTorch kernels that compile on first use and never again.

`import jitkern` is light and imports no Torch; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Cache": "cache",
    "Config": "config",
    "Target": "target",
    "load": "drop_in",
    "load_inline": "drop_in",
    "on_compile": "events",
    "cpp_kernel": "raw",
    "cuda_kernel": "raw",
    "triton_kernel": "raw_triton",
    "stats": "events",
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
}
_MODULES = ("ops", "declare", "cache_tools")

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jitkern.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module `jitkern` has no attribute `{name}`")
    value = getattr(importlib.import_module(f"jitkern.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
