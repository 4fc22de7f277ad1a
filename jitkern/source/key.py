"""The key of a variant: everything that can change the bytes of its artifact.

`package_of`, the installed package of a source, is not in the key: it is for `prune --stale`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from jitkern import config
from jitkern._version import __version__
from jitkern.cache.key import SCHEMA, Key, digest_of, label_of
from jitkern.source.closure import Closure
from jitkern.source.flags import words_of
from jitkern.source.kinds import CUDA, Generated, Source, Variant
from jitkern.target import Target, gpus_for, processor_for


def make_key(variant: Variant, target: Target, flags: tuple[str, ...], closure: Closure) -> Key:
    """The key of `variant` built for `target` with `flags` from the files of `closure`."""
    source = variant.source
    owner = source.owner or variant.op
    inputs = {
        **source_inputs(source, closure),
        "op": owner,
        "flags": list(flags),
        "variant": {
            "function": variant.function,
            "template": [list(item) for item in variant.template],
            "signature": list(variant.signature),
            "options": [list(item) for item in variant.options],
            **({"facts": [list(fact) for fact in variant.facts]} if variant.facts else {}),
        },
        "target": str(target),
    }
    return Key(inputs, digest_of(inputs), label_of(owner, variant.label, str(target)))


def source_inputs(source: Source, closure: Closure) -> dict[str, Any]:
    """The inputs of a key that depend only on the source."""
    environment = config.current().environment
    return {
        "schema": SCHEMA,
        "source": {
            "kind": source.kind,
            "files": list(source.files),
            "closure": closure.files,
            "versions": closure.versions,
            "min_compiler": source.min_compiler,
            **_unit_flags(source),
            **_machine(source),
        },
        "environment": {name: environment.get(name) for name in source.environment},
    }


def _machine(source: Source) -> dict[str, Any]:
    """This machine's processor and GPUs for the key of host code, where flags say `native`."""
    if source.runs == CUDA:
        return {}
    flags = words_of(source)
    machine = {"processor": processor_for(flags), "gpus": list(gpus_for(flags))}
    return {name: value for name, value in machine.items() if value}


def _unit_flags(source: Source) -> dict[str, Any]:
    """The flags of single files for the key, or {}."""
    flags = {unit.file: list(unit.flags) for unit in source.unit_flags}
    return {"unit_flags": flags} if flags else {}


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
