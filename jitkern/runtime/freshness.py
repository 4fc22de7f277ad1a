"""The files that the kernels of a launch record were compiled from: noted, and compared later.

Files and the paths where no file may be are named relative to bases that may lie elsewhere on each
machine. Where files are not all that decides (variables, facts of an import, paths in flags, a
macro's `#include`, a link that leads out of a base), the kernels are named by what their keys are
made of, and the keys are computed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from jitkern import jit, source as source_room
from jitkern.files import trust
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import Cpp, Cuda, Cute, CuTile, Source, Triton, Variant, shared_include
from jitkern.target import Target

_FOLLOWED = (Cuda, Cpp, Triton, CuTile, Cute)  # whose keys follow from files and jitkern's code
_PLACES = ("home", "include", "module", "others", "package", "text", "written_at")  # not compiled
_PLAIN = (str, bool, int, float, type(None))
_EVERYWHERE = "/usr/local/include/"  # searched by all compilers, so that its paths mean the same
_UP = f"..{os.sep}"
Place = tuple[int, str]  # the number of a base (see `_bases`), and a path relative to it


class Dependencies(NamedTuple):
    """The files and keys that a record depends on. references: the present keys of its kernels."""

    references: list[str]
    content: dict[str, Any]


def declaration_of(source: Source) -> str:
    """Return how a declaration has a source compiled, except for folders."""
    plain = [(n, v) for n, v in vars(source).items() if n not in _PLACES and _is_plain(v)]
    roots = [include.version for include in source.include]
    text = hashlib.sha256(source.text.encode(errors="surrogateescape")).hexdigest()
    return repr((type(source).__qualname__, plain, roots, source.text and text))


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value tells it from all others, in every process."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else type(value) in _PLAIN


def dependencies(source: Source, target: Target, kernels: Sequence[Variant]) -> Dependencies | None:
    """Return what kernels of a source depend on, now; None if a file changes meanwhile.

    content: files: each with its place and digest; absent: the places where no file may be;
    kernels' variants in place of both, where other things decide, too. Raises DeclarationError.
    """
    with source_room.closure.each_once():
        requests = [jit.request.Request.of(kernel, target) for kernel in kernels]
        whole = jit.request.Request.of(Variant("", source), target)  # all units
    references = [request.key.reference for request in requests]
    variants = [[v.function, v.template, v.signature, v.options, v.facts] for v in kernels]
    by_key = Dependencies(references, {"variants": variants})
    closures = [request.closure for request in (whole, *requests)]
    facts = any(kernel.facts for kernel in kernels)
    if facts or not _by_files(source) or any(closure.absent is None for closure in closures):
        return by_key
    of_text = f"{source.folder}{os.sep}" if source.text else "\0"  # which the key has
    named = {path for closure in closures for path in closure.named}
    absent = {path for closure in closures for path in closure.absent or ()}
    places: dict[str, Place] = {}
    for path in named | absent:
        if not path.startswith(of_text):
            place = _place_of(path, source)
            if place is None:
                return by_key
            places[path] = place
    digests = {path: trust.digest(path) for path in named}
    if {*digests.values()} != {digest for c in closures for digest in c.files.values()}:
        return None
    files = sorted((places[path], digests[path]) for path in named & places.keys())
    gone = sorted(places[path] for path in absent & places.keys())
    return Dependencies(references, {"variants": None, "files": files, "absent": gone})


def _by_files(source: Source) -> bool:
    """Return whether files are all that decides how a source is compiled."""
    return (
        type(source) in _FOLLOWED
        and not source.environment
        and all(map(source_room.flags.names_no_file, source.every_flag))
        and all(map(_is_plain, vars(source).values()))
    )


def is_current(op: str, source: Source, target: Target, content: dict[str, Any]) -> bool:
    """Return whether a record with this content matches the current files.

    Raises LookupError, TypeError and ValueError for malformed content, OSError, DeclarationError.
    """
    if content["variants"] is not None:
        kernels = [_variant(op, source, target, *parts) for parts in content["variants"]]
        current = [jit.key_of(kernel, target).reference for kernel in kernels]
        return bool(current == content["kernels"])
    bases = _bases(source)

    def path(place: Place) -> str:
        base, relative = place
        return os.path.normpath(os.path.join(bases[base], relative))  # noqa: PTH118

    return not any(os.path.isfile(path(place)) for place in content["absent"]) and all(  # noqa: PTH113
        trust.digest(path(place)) == digest for place, digest in content["files"]
    )


def _variant(op: str, source: Source, target: Target, function: str, *parts: Any) -> Variant:
    template, signature, options, facts = map(_in_tuples, parts)
    source = source_room.defining_file.unit_of(source, function, template)
    present = tuple((name, source_room.import_facts.now(name, target)) for name, _ in facts)
    return Variant(op, source, function, template, signature, options, present)


def _in_tuples(value: Any) -> Any:
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def _bases(source: Source) -> list[str]:
    roots = [os.path.join(source.home, include.path) for include in source.include]  # noqa: PTH118
    return [shared_include(), *roots, source.home, _EVERYWHERE]


def _place_of(path: str, source: Source) -> Place | None:
    """Return the place of a path; None for one that would lead elsewhere on another machine."""
    *bases, home, _ = _bases(source)
    place = len(bases), os.path.relpath(path, home)
    for number, base in enumerate(bases):
        if path.startswith(f"{os.path.normpath(base)}{os.sep}"):
            place = number, os.path.relpath(path, base)
            break
    else:
        if path.startswith(_EVERYWHERE):
            place = len(bases) + 1, os.path.relpath(path, _EVERYWHERE)
        elif place[1].startswith(_UP * 3):
            return None
    folder, there = map(os.path.dirname, (path, os.path.normpath(path)))
    return place if os.path.realpath(folder) == os.path.realpath(there) else None
