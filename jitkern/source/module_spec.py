"""Find the file of a module without importing the packages above it."""

from __future__ import annotations

import importlib.util
import pkgutil
from importlib.machinery import ModuleSpec


def spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of a module; None if there is none. Raises ValueError for `__main__`.

    A package without `__init__` has a spec without a loader, of all its parts.
    """
    full, *rest = name.split(".")
    spec = importlib.util.find_spec(full)
    for part in rest:
        full, portions = f"{full}.{part}", list[str]()
        for folder in (spec and spec.submodule_search_locations) or ():
            finder = pkgutil.get_importer(folder)
            spec = finder.find_spec(full, None) if finder else None
            if spec and spec.loader:
                break
            portions += (spec and spec.submodule_search_locations) or ()
        else:
            spec = ModuleSpec(full, None, is_package=True) if portions else None
            if spec:
                spec.submodule_search_locations = portions
    return spec
