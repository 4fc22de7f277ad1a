"""Find the file of a module without importing the packages above it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib.machinery import ModuleSpec


def spec_in(folders: Iterable[str], name: str) -> ModuleSpec | None:
    """Return the spec of the module of this whole name, in the first of the folders that has it.

    A package without `__init__` has a spec without a loader, of all its parts.
    """
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name, None) if finder else None
        if spec and spec.loader:
            return spec
        portions += (spec and spec.submodule_search_locations) or ()
    whole = ModuleSpec(name, None, is_package=True)
    whole.submodule_search_locations = portions
    return whole if portions else None
