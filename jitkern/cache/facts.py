"""Facts: small things found out once, such as plans and tuning choices, kept as entries.

A fact is keyed by named inputs: its kind, its op, its target, and all else that it depends on. Its
content is JSON, in the one artifact of its entry. Several facts may have the same inputs but for
`which`; they have one label, too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jitkern.cache import events
from jitkern.cache.key import Key, canonical, digest_of
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache, Entry
from jitkern.errors import CacheError

ARTIFACT = "fact.json"
_FORMAT = 1  # bump when the meaning of an input or of a content changes
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def key_of(kind: str, op: str, target: str, label: str, inputs: Mapping[str, Any]) -> Key:
    """Return the key of a fact. kind: `plan` or `choice`; inputs: plain values for JSON."""
    named = {**inputs, "fact": kind, "format": _FORMAT, "op": op, "target": target}
    return Key(named, digest_of(named), label)


def one_of(key: Key, which: Any) -> Key:
    """Return the key of one of several facts whose inputs differ in `which` alone."""
    inputs = {**key.inputs, "which": which}
    return Key(inputs, digest_of(inputs), key.label)


def read(cache: Cache, key: Key, parse: Callable[[Entry], _T]) -> _T | None:
    """Return what `parse` makes of the entry of a fact, or None if the fact is not known.

    parse: raises ValueError or OSError for an entry with an odd content, which is then quarantined.
    """
    entry = cache.find(key)
    return None if entry is None else _parsed(cache, entry, parse)


def read_all(cache: Cache, key: Key, parse: Callable[[Entry], _T]) -> Iterator[tuple[Entry, _T]]:
    """Yield each of several facts: the entry, and what `parse` makes of it."""
    for entry in cache.labelled(key.target, key.label):
        inputs = {name: value for name, value in entry.manifest.inputs.items() if name != "which"}
        if inputs == key.inputs and (content := _parsed(cache, entry, parse)) is not None:
            yield entry, content


def _parsed(cache: Cache, entry: Entry, parse: Callable[[Entry], _T]) -> _T | None:
    try:
        content = parse(entry)
    except (OSError, ValueError) as e:
        _log.warning("%s is damaged (%s); making it again", entry.path, e)
        cache.quarantine(entry)
        return None
    events.use(entry.path)
    return content


def content_of(entry: Entry) -> Any:
    """Return the content of a fact. Raises ValueError or OSError for an entry that is none."""
    try:
        return json.loads(entry.read(ARTIFACT))
    except (KeyError, RecursionError) as e:
        raise ValueError(f"its content is no fact: {e}") from e


def write(cache: Cache, key: Key, content: Any, compiler: Mapping[str, str]) -> Entry | None:
    """Publish a fact and return its entry, which another process may have published before.

    compiler: name and version of what found the fact out. Returns None if the cache cannot be
    written.
    """
    try:
        with cache.staging() as staging:
            (staging / ARTIFACT).write_bytes(canonical(content))
            entry = cache.publish(key, staging, Manifest(key.inputs, compiler=compiler))
    except CacheError:
        return None
    events.use(entry.path)
    return entry


def every(cache: Cache, kind: str, op: str, target: str, label: str) -> Iterator[Entry]:
    """Yield the entry of every fact of a kind and an op with a label that begins with `label`."""
    for layer, path in cache.places(lambda t, name: t == target and name.startswith(label)):
        entry = cache.entry_at(layer, path, "size")
        if (
            isinstance(entry, Entry)
            and entry.op == op
            and entry.manifest.inputs.get("fact") == kind
        ):
            yield entry
