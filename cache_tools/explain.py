"""Explain in words why two entries differ: the named inputs of their keys that are not equal."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from jitkern.cache.store import Cache, Entry
from jitkern.cache_tools.listing import folders_of
from jitkern.errors import TargetError
from jitkern.target import Target

_TARGET = {
    "device": "device", "arch": "arch", "cuda": "CUDA", "torch": "Torch", "platform": "platform",
    "abi": "C++ or Python ABI",
}  # fmt: skip
_NAMES = {
    "schema": "layout of jitkern's entries",
    "source.kind": "kind of source",
    "source.files": "source files",
    "source.min_compiler": "least compiler",
    "source.processor": "processor of the machine",
    "variant.function": "function",
}
_LISTS = {"flags": "flag", "variant.signature": "argument type"}
_PAIRS = {"variant.template": "template argument", "variant.options": "option"}
_PREFIXES = {"source.versions.": "version of ", "environment.": "variable "}


def nearest(cache: Cache, wanted: dict[str, Any]) -> tuple[Entry, list[str]] | None:
    """Return the similar entry whose inputs differ least from `wanted`, and the differences.

    An entry is alike if it is of the same op, device and kind of source, and if both are kernels,
    or both records of a kind. Returns None where there is no other.
    """
    folders = folders_of(wanted["op"])
    places = cache.places(lambda _, name: fnmatch.fnmatchcase(name, folders))
    entries = (cache.entry_at(layer, path, "size") for layer, path in places)
    candidates = [
        (entry, differences(entry.manifest.inputs, wanted))
        for entry in entries
        if isinstance(entry, Entry) and _class_of(entry.manifest.inputs) == _class_of(wanted)
    ]
    return min(
        ((entry, lines) for entry, lines in candidates if lines),
        key=lambda pair: len(pair[1]),
        default=None,
    )


def _class_of(inputs: dict[str, Any]) -> tuple[str, ...]:
    """Return what two entries must have in common to be compared."""
    device = str(inputs.get("target", "")).partition("-")[0]
    kind = str(inputs.get("source", {}).get("kind", ""))
    return str(inputs["op"]), device, kind, str(inputs.get("record", ""))


def differences(there: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a line `what is x instead of y` for each named input that is not equal."""
    return [line for name, a, b in _unequal(there, wanted, "") for line in _in_words(name, a, b)]


def _unequal(there: Any, wanted: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(wanted, dict):
        for key in sorted({*there, *wanted}):
            yield from _unequal(there.get(key), wanted.get(key), f"{name}.{key}".strip("."))
    elif there != wanted:
        yield name, there, wanted


def _in_words(name: str, there: Any, wanted: Any) -> list[str]:
    file = name.removeprefix("source.closure.")
    if name == "target":
        return _of_targets(str(there), str(wanted))
    if file != name:
        change = "is new" if there is None else "is no longer used" if wanted is None else "differs"
        return [f"{file} {change}"]
    if name == "which":  # a digest
        return ["the content of the record differs, such as the program for the same kind of call"]
    lists = isinstance(there or [], list) and isinstance(wanted or [], list)
    if name in _LISTS and lists:
        return _of_lists(_LISTS[name], there or [], wanted or [])
    if name in _PAIRS and lists:
        return _of_pairs(_PAIRS[name], there or [], wanted or [])
    for prefix, what in _PREFIXES.items():
        if name.startswith(prefix):
            name = what + name.removeprefix(prefix)
    return [_line(_NAMES.get(name, name), there, wanted)]


def _of_targets(there: str, wanted: str) -> list[str]:
    try:
        a, b = Target.parse(there)._asdict(), Target.parse(wanted)._asdict()
    except TargetError:
        return [_line("target", there, wanted)]
    return [_line(_TARGET[name], a[name], b[name]) for name in a if a[name] != b[name]]


def _of_pairs(what: str, there: list[Any], wanted: list[Any]) -> list[str]:
    try:
        unequal = list(_unequal(dict(there), dict(wanted), ""))
    except (TypeError, ValueError):  # the entry has another schema
        return _of_lists(what, there, wanted)
    return [_line(f"{what} {key}", a, b) for key, a, b in unequal] or [f"order of the {what}s"]


def _of_lists(what: str, there: Sequence[Any], wanted: Sequence[Any]) -> list[str]:
    lines = [f"extra {what} {_short(x)}" for x in there if x not in wanted]
    lines += [f"missing {what} {_short(x)}" for x in wanted if x not in there]
    return lines or [f"order of the {what}s"]


def _line(what: str, there: Any, wanted: Any) -> str:
    return f"{what} is {_short(there)} instead of {_short(wanted)}"


def _short(value: Any) -> str:
    text = "absent" if value in (None, "") else str(value)
    return text if len(text) <= 60 else f"{text[:12]}…"
