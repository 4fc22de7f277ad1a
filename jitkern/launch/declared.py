"""What a Triton function declares: by its text, with a record beyond that, else by Triton's object.

Decorators may follow from variables, from the device or from other files of the package. A text
that is run with these (`source.triton_facts`) says what they are, if nothing else has a part in it.
Whether that is so shows an import: the process that makes it compares both, and publishes a record
if they are the same. Its key is all that the reading depends on, and what it says. A process that
finds the record imports neither the file nor Triton.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import torch

from jitkern import jit, source as source_room
from jitkern._version import __version__
from jitkern.cache import records
from jitkern.cache.key import Key, label_of
from jitkern.errors import CompileError, DeclarationError, LaunchError
from jitkern.named_tuple import NamedTuple
from jitkern.source.closure import closure_of
from jitkern.source.key import source_inputs, version_of
from jitkern.source.kinds import Source
from jitkern.source.triton_decorators import TritonFunction, difference, read
from jitkern.source.triton_text import UntoldByText, functions, of_object
from jitkern.target import Target


class _Kept(NamedTuple):
    """A function that its text alone does not determine, and the reading of it, if any."""

    source: Source
    function: TritonFunction
    reading: source_room.triton_facts.Reading | None = None


def declared_in(op: str, source: Source, function: str) -> TritonFunction:
    """Return what a launch needs of a function of a Triton source.

    It is read from the text. Where that does not tell the decorators, it is read from Triton's
    objects: of the module that this process has imported, else of one that is imported now, unless
    a record says that what the text gives with variables and the like is the same. Raises
    CompileError for what launches do not do, DeclarationError for a missing file, LaunchError for a
    missing function.
    """
    path = source.paths[0]
    if not path.is_file():
        raise DeclarationError(f"{op}: {source_room.closure.missing(path)}")
    known = functions(path)
    kept: _Kept | None = known.others.get(function)
    if kept and kept.source == source and (not kept.reading or kept.reading.is_current()):
        return kept.function
    if function not in known:
        raise LaunchError(
            f"{op}: {path} has no @triton.jit function `{function}`; it has: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    try:
        return known[function]
    except UntoldByText as e:
        kept = known.others[function] = _beyond(source, function, e)
        return kept.function


def _beyond(source: Source, function: str, error: UntoldByText) -> _Kept:
    """Return a function that its text alone does not determine."""
    path = str(source.paths[0])
    if (live := source_room.triton_globals.live_function(source, function)) is not None:
        return _Kept(source, of_object(path, function, live, f"{error}; it has been imported"))
    reading = key = None
    try:
        reading = source_room.triton_facts.read(source, function)
        key = _key(source, function, reading)
        if reading.agrees() and records.read(jit.open_cache(), key, bool):
            found = reading.function._replace(unread=_told_by(reading))
            return _Kept(source, found, reading)
        why = ""
    except (CompileError, KeyError, OSError) as e:
        why = str(e)
    try:
        live = source_room.triton_globals.imported(source, function)
    except Exception as cause:  # whatever the statements of the file raise
        told = f"{error}; an import does not tell it: {type(cause).__name__}: {cause}"
        raise UntoldByText(told) from cause
    found = of_object(path, function, live, "")
    if reading and key and not (why := _difference(path, reading, live, found)):
        by = {"name": "triton", "version": version_of("triton")}
        records.write(jit.open_cache(), key, {"noted": reading.noted}, by)
        return _Kept(source, found._replace(unread=_told_by(reading)))
    return _Kept(source, found._replace(unread=f"{why}; each process imports Triton and the file"))


def _difference(
    path: str, reading: source_room.triton_facts.Reading, live: Any, imported: TritonFunction
) -> str:
    """Return how a reading differs from what an import has just given, in words, or ""."""
    told = difference(reading.function, read(live))
    if told or not (reading.is_current() and reading.is_of_modules()):
        return f"{path}: an import gives something else ({told or 'of other files'})"
    ours, theirs = map(_parameters_of, (reading.function, imported))
    return "" if ours == theirs else f"{path}: an import gives other parameters"


def _parameters_of(function: TritonFunction) -> tuple[Any, ...]:
    """Return what a function declares of its parameters."""
    _, names, constexprs, defaults, passed, annotated, *_ = function
    return names, constexprs, repr(defaults), repr(passed), annotated  # 1 == True


def _told_by(reading: source_room.triton_facts.Reading) -> str:
    """Return what a reading depends on, in words."""
    _, *others = reading.files
    return f"they follow from {', '.join([*reading.noted, *others]) or 'modules of Python'}"


def _key(source: Source, function: str, reading: source_room.triton_facts.Reading) -> Key:
    """Return the key of the record of a reading. Raises CompileError if it cannot be named."""
    found = reading.function
    pruning = found.pruning and found.pruning.top
    names = [name for name, _ in found.heuristics]
    lists = sorted(found.plain), sorted(found.unaligned)
    tuned = found.configs, found.key, found.zeroed, found.restored
    says = repr((*lists, *tuned, names, found.before, pruning))
    packages = sorted({"triton", *reading.packages}.difference(sys.stdlib_module_names))
    versions = {name: version_of(name) for name in packages}
    unknown = [name for name, version in versions.items() if not version]
    if unknown or " at 0x" in says:
        what = f"the version of `{unknown[0]}`" if unknown else "a value of a configuration"
        raise CompileError(f"{source.paths[0]}: error: {what} is not known without an import")
    inputs = {
        **source_inputs(source, closure_of(source)), "function": function, "says": says,
        "noted": {name: repr(value) for name, value in reading.noted.items()},
        "package": source.package, "packages": _digest_of_packages(source, reading),
        "versions": versions,
        "jitkern": __version__, "python": sys.version, "torch": torch.__version__,
    }  # fmt: skip
    name = re.sub(r"\W", "_", source.paths[0].stem, flags=re.ASCII)[:80]
    op, place = f"triton::{name}", str(Target.current("cpu").for_host_code())
    label = label_of(op, f"decorators.{function}", place)
    return records.record_key("decorators", op, place, label, inputs)


def _digest_of_packages(source: Source, reading: source_room.triton_facts.Reading) -> str:
    """Return a digest of all Python files of the packages read: an import runs each `__init__`."""
    modules = [(f"{source.package}.{source.paths[0].stem}".strip("."), str(source.paths[0]))]
    modules += [(module, path) for module, path, *_ in reading.taken]
    tops = set()
    for module, file in modules:
        path = Path(file)
        depth = module.count(".") + (path.name == "__init__.py")
        if depth:
            tops.add(path.parents[depth - 1])
    digest = hashlib.sha256()
    for top in sorted(tops):
        for path in sorted(top.rglob("*.py")):
            digest.update(f"{path.relative_to(top)}\0".encode(errors="surrogateescape"))
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
