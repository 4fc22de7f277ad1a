"""The installed package that a kernel's source came in: provenance, for `prune --stale`."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path

from jitkern._version import __version__
from jitkern.source.kinds import Generated, Source


def package_of(source: Source) -> dict[str, str]:
    """The name and version of the source's package; {} for a source of no installed package."""
    if isinstance(source, Generated):
        return {"name": "jitkern", "version": __version__}
    return _package_at(Path(source.home))


@functools.cache
def _package_at(folder: Path) -> dict[str, str]:
    for place in sorted(filter(None, sys.path), key=len, reverse=True):
        if folder.is_relative_to(place) and folder != Path(place):
            name = folder.relative_to(place).parts[0]
            version = version_of(name)
            return {"name": name, "version": version} if version else {}
    return {}


def version_of(name: str) -> str:
    """The installed version of the package `name`, or ""."""
    if name == "jitkern":
        return __version__
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
