"""jitkern: PyTorch kernels that compile on first use and never again.

`import jitkern` is light and imports no Torch; the names below load on first use. So do the modules
of a room (a folder of jitkern), so that a warm process imports only the modules that it needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Cache": "cache.store",
    "Config": "config",
    "Target": "target",
    "load": "dropin.api",
    "load_inline": "dropin.api",
    "on_compile": "cache.events",
    "cpp_kernel": "raw.from_file",
    "cuda_kernel": "raw.from_file",
    "triton_kernel": "raw.from_triton",
    "prewarm": "prewarming.api",
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
}
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
            value = getattr(importlib.import_module(f"{room}.{homes[name]}"), name)
            vars(sys.modules[room])[name] = value
            return value
        if not name.startswith("__"):
            try:
                return importlib.import_module(f"{room}.{name}")
            except ModuleNotFoundError as e:
                if e.name != f"{room}.{name}":
                    raise
        raise AttributeError(f"module `{room}` has no attribute `{name}`")

    return attribute


__getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
