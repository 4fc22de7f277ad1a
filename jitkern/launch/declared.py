"""What a Triton function declares: as an import of its file gives it, in a record.

Triton's worker imports the file and reads Triton's objects. What it finds holds for the files of
the source, for the versions of Triton and Python, and for the facts that the import read. A record
says which facts these are, the record for their values which others, and the last one what the
functions declare. A process that finds the records imports neither the file nor Triton.

A function that this process has imported itself is compared with that once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from jitkern import compilers, config, jit, source as source_room
from jitkern.cache import records
from jitkern.cache.key import Key, label_of
from jitkern.errors import CacheError, CompileError, DeclarationError, LaunchError, NotCached
from jitkern.named_tuple import NamedTuple
from jitkern.source.closure import Closure, closure_of, missing, states
from jitkern.source.declarations import data_of, of_data
from jitkern.source.import_facts import Facts, hold, now
from jitkern.source.key import source_inputs, version_of
from jitkern.source.kinds import Source, Variant
from jitkern.source.triton_decorators import (
    Functions,
    TritonFunction,
    UnsupportedDecorator,
    functions_of,
    read,
)
from jitkern.target import EXAMPLE, Target, short_version


class Declarations(NamedTuple):
    """The functions of a file, or why one is not supported, and the facts that the import read."""

    functions: Mapping[str, dict[str, Any] | str]
    facts: Facts


class _KnownFile(NamedTuple):
    """The declarations of files in these states. asked: the functions asked for."""

    files: dict[str, tuple[int, ...]]
    declarations: Declarations
    asked: dict[str, TritonFunction]

    def is_current(self, target: Target) -> bool:
        """Return whether files and facts are as they were, for a target."""
        return states(self.files) == self.files and hold(self.declarations.facts, target)


_known: dict[tuple[Source, Target | None], _KnownFile] = {}
_functions: dict[tuple[Source, str], tuple[dict[str, tuple[int, ...]], Any]] = {}


def declared_in(
    op: str, source: Source, function: str, target: Target | None = None, *, may_import: bool = True
) -> TritonFunction:
    """Return what a launch needs of a function of a Triton source.

    target: by default any, of which nothing is kept. may_import: False for a caller that does not
    wait for the worker. Raises CompileError for what launches do not do and for a file whose import
    fails, DeclarationError for a missing file and where this process has imported something else,
    LaunchError for a missing function, NotCached where no record is found and nothing may be
    compiled.
    """
    if source.others:
        source = source.replace(others=())  # which hold what one variant is passed
    known = _known.get((source, target))
    if known is None or not known.is_current(_chosen(target)):
        known = _known[source, target] = _read(op, source, target, may_import=may_import)
    if function not in known.asked:
        known.asked[function] = _one_of(op, source, function, known.declarations)
    return known.asked[function]


def make(variant: Variant, target: Target) -> None:
    """Make what an error says is not cached: a kernel, or what the functions of a file declare."""
    if variant.function or not variant.source.declares:
        jit.ensure(variant, target)
    else:
        _read(variant.op, variant.source, target, may_import=True)


def functions_for(source: Source, function: str) -> Functions:
    """Return what decorators have of functions, imported here. Raises CompileError."""
    known = _functions.get((source, function))
    if known and states(known[0]) == known[0]:
        of = source_room.triton_decorators
        names = getattr(of.inner(known[1]), "__globals__", {})
        if of.bare(names.get(function.removesuffix(of.BARE))) is of.bare(known[1]):  # no reload
            return functions_of(known[1])
    files = {} if source.text else states(closure_of(source).named)
    try:
        found = source_room.triton_globals.imported(source, function)
        functions = functions_of(found)
    except Exception as e:  # whatever the statements of the file raise
        raise CompileError(
            f"{source.paths[0]}: error: the functions in the decorators of `{function}` are those "
            f"of this process, where the import of the file fails: {type(e).__name__}: {e}"
        ) from e
    _functions[source, function] = files, found
    return functions


def compare_again(source: Source, function: str) -> None:
    """Have a function of this process compared with its file when it is next asked for."""
    for (one, _), known in [*_known.items()]:
        if one == source:
            known.asked.pop(function, None)


def _one_of(op: str, source: Source, function: str, found: Declarations) -> TritonFunction:
    path = source.paths[0]
    if function not in found.functions:
        raise LaunchError(
            f"{op}: {path} has no @triton.jit function `{function}`; it has: "
            f"{', '.join(sorted(n for n in found.functions if '.' not in n)) or 'none'}"
        )
    data = found.functions[function]
    if isinstance(data, str):
        raise CompileError(f"{path}: error: {data}")
    live = None if source.text else source_room.triton_globals.live_function(source, function)
    if live is not None and type(live).__name__ != "InterpretedFunction":
        _compare(source, function, data, live)
    return of_data(data, found.facts)


def _compare(source: Source, function: str, data: dict[str, Any], live: Any) -> None:
    """Raise DeclarationError if a function of this process declares something else than its file.

    data: as an import in another process gives it.
    """
    try:
        own: dict[str, Any] = data_of(read(live), source)
    except (TypeError, UnsupportedDecorator, source_room.constants.NotConstant) as e:
        raise DeclarationError(f"`{function}` of {source.paths[0]}: {e}") from e
    for name, value in data.items():
        if own[name] != value:
            raise DeclarationError(
                f"`{function}` of {source.paths[0]} has another `{name}` in this process, "
                f"{own[name]!r}, than an import of the file gives, {value!r}: reload a file that "
                "was edited or that read another variable, write what the program has changed into "
                f"the file, or launch `{function}` by Triton"
            )


def _read(op: str, source: Source, target: Target | None, *, may_import: bool) -> _KnownFile:
    """Return what the records say, else what the worker reads now."""
    if source.text and (data := source_room.declarations.declaration_in(source.text)):
        return _KnownFile({}, Declarations({data["name"]: data}, ()), {})
    path = source.paths[0]
    if not path.is_file():
        raise DeclarationError(f"{op}: {missing(path)}")
    closure = closure_of(source)
    files = states(sorted(closure.named))
    walk = _Walk(source, closure, target) if target else None
    found = walk.found() if walk else None
    if found is None:
        found = _of_another_target(source, files, target)
        if found is None and not _may_import(may_import):
            raise _not_cached(op, source, closure, target)
        found = found or _imported(op, source, closure, target)
        if walk:
            walk.write(found)
    return _KnownFile(files, found, {})


def _of_another_target(
    source: Source, files: dict[str, tuple[int, ...]], target: Target | None
) -> Declarations | None:
    alike = (k for (one, _), k in [*_known.items()] if one == source and k.files == files)
    found = (k.declarations for k in alike if hold(k.declarations.facts, _chosen(target)))
    return next(found, None)


def _may_import(waits: bool) -> bool:  # noqa: FBT001
    return waits and config.current().compile != "never" and not jit.capturing()


def _imported(op: str, source: Source, closure: Closure, target: Target | None) -> Declarations:
    """Return what the worker reads."""
    chosen = _chosen(target)
    with jit.announcement.announced(f"{op} for {chosen}"):
        return Declarations(*compilers.triton.build.declare(op, source, chosen, closure))


@functools.cache
def _chosen(target: Target | None) -> Target:
    return target or Target.parse(EXAMPLE)._replace(torch=short_version(torch.__version__))


def _not_cached(op: str, source: Source, closure: Closure, target: Target | None) -> NotCached:
    variant = Variant(op, source)
    error = jit.build.not_cached(variant, _key(source, closure, _chosen(target), ()))
    error.variant = variant
    return error


# ------------------------------------------------------------------ records


@functools.cache
def _triton() -> str:
    return version_of("triton")


def _key(source: Source, closure: Closure, target: Target, facts: Facts) -> Key:
    inputs = {
        **source_inputs(source, closure), "package": source.package,
        "facts": [list(fact) for fact in facts], "python": sys.version,
        "triton": _triton(),
    }  # fmt: skip
    name = Path(source.files[0]).stem
    place = str(target.for_device_code())
    op = f"triton::{''.join(c if c.isalnum() and c.isascii() else '_' for c in name)[:80]}"
    return records.record_key("declaration", op, place, label_of(op, "declaration", place), inputs)


class _Walk:
    """The records of a file for a target, from the first to the one that is missing or the last."""

    def __init__(self, source: Source, closure: Closure, target: Target) -> None:
        self._source, self._closure, self._target = source, closure, target
        self._asked: set[str] = set()  # facts that records named

    def _next(self, known: Facts = ()) -> Key:
        """Return the key of the next record, for facts that are known and others as they are."""
        values = dict(known)
        facts = tuple(
            (name, values[name] if name in values else now(name, self._target))
            for name in sorted(self._asked)
        )
        return _key(self._source, self._closure, self._target, facts)

    def found(self) -> Declarations | None:
        """Return what the last record says; None where one is missing."""
        while (content := self._content(self._next())) is not None:
            if "functions" in content:
                return Declarations(content["functions"], tuple(map(tuple, content["facts"])))
            if self._asked.issuperset(content["reads"]):
                break
            self._asked |= {*content["reads"]}
        return None

    def _content(self, key: Key) -> dict[str, Any] | None:
        found: dict[str, Any] | None = records.read(jit.open_cache(), key, _parsed)
        if found is None and config.current().remotes and not jit.capturing():
            with contextlib.suppress(CacheError):  # nothing can be written
                if not jit.download.fetch(key, self._source.kind, self._source.seconds):
                    found = records.read(jit.open_cache(), key, _parsed)
        return found

    def write(self, found: Declarations) -> None:
        """Write the records that are missing, of which the last has what an import gave."""
        by = {"name": "triton", "version": _triton()}
        if more := sorted({name for name, _ in found.facts} - self._asked):
            records.write(jit.open_cache(), self._next(found.facts), {"reads": more}, by)
            self._asked |= {*more}
        facts = [list(fact) for fact in found.facts]
        last = {"functions": dict(found.functions), "facts": facts}
        records.write(jit.open_cache(), self._next(found.facts), last, by)


_ODD = (AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError)


def _parsed(content: Any) -> dict[str, Any]:
    """Return the content of a record. Raises ValueError."""
    try:
        names = ["functions"] if "functions" in content else content["reads"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("it names no fact")
        for data in content["functions"].values() if "functions" in content else ():
            if not isinstance(data, str):
                of_data(data, tuple((str(name), value) for name, value in content["facts"]))
    except _ODD as e:
        raise ValueError(f"it says nothing of functions: {type(e).__name__}: {e}") from e
    found: dict[str, Any] = content
    return found
