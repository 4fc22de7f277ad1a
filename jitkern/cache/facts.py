"""Facts: small things found out once, such as plans and tuning choices, kept as entries.

A fact is keyed by named inputs: its kind, its op, its target, and all else that it depends on. Its
content is JSON, in the one artifact of its entry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jitkern.cache import events
from jitkern.cache.key import Key, canonical, digest_of
from jitkern.cache.manifest import LOG, Manifest
from jitkern.cache.store import Cache, Entry
from jitkern.errors import CacheError
from jitkern.named_tuple import NamedTuple

ARTIFACT = "fact.json"
_FORMAT = 1  # bump when the meaning of an input or of a content changes
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Fact(NamedTuple):
    """A fact without its content. kind: `plan` or `choice`; inputs: plain values for JSON."""

    kind: str
    op: str
    target: str
    label: str
    inputs: Mapping[str, Any]

    def key(self) -> Key:
        """Return the key of the fact, or the inputs that several facts share (see `one_of`)."""
        same = {"fact": self.kind, "format": _FORMAT, "op": self.op, "target": self.target}
        inputs = {**self.inputs, **same}
        return Key(inputs, digest_of(inputs), self.label)


def _label_of_all(key: Key) -> str:
    return f"{key.label}.{key.digest[:8]}"


def one_of(fact: Fact, which: Any) -> Key:
    """Return the key of one of several facts with the same inputs, all of which `read_all` finds.

    which: what this one differs in from the others, a plain value for JSON.
    """
    key = fact.key()
    inputs = {**key.inputs, "which": which}
    return Key(inputs, digest_of(inputs), _label_of_all(key))


def read(cache: Cache, fact: Fact, parse: Callable[[Entry], _T]) -> _T | None:
    """Return what `parse` makes of the entry of a fact, or None if the fact is not known.

    parse: raises ValueError or OSError for an entry with an odd content, which is then quarantined.
    """
    entry = cache.find(fact.key())
    return None if entry is None else _parsed(cache, entry, parse)


def read_all(cache: Cache, fact: Fact, parse: Callable[[Entry], _T]) -> Iterator[tuple[Entry, _T]]:
    """Yield the entries of all facts with these inputs, each with what `parse` makes of it."""
    key = fact.key()
    for entry in cache.labelled(key.target, _label_of_all(key)):
        inputs = {name: value for name, value in entry.manifest.inputs.items() if name != "which"}
        if inputs == key.inputs:
            content = _parsed(cache, entry, parse)
            if content is not None:
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


def write(
    cache: Cache, key: Key, content: Any, compiler: Mapping[str, str], log: str = ""
) -> Entry | None:
    """Publish a fact and return its entry, which another process may have published before.

    compiler: name and version of what found the fact out. Returns None if the cache cannot be
    written.
    """
    try:
        with cache.staging() as staging:
            (staging / ARTIFACT).write_bytes(canonical(content))
            if log:
                (staging / LOG).write_text(log)
            entry = cache.publish(key, staging, Manifest(key.inputs, compiler=compiler))
    except CacheError:
        return None
    events.use(entry.path)
    return entry


def every(cache: Cache, kind: str, op: str, target: str, label: str) -> Iterator[tuple[Entry, Any]]:
    """Yield every fact of a kind and an op, as entry and content, whatever its inputs.

    label: the beginning of the facts' labels.
    """
    for layer, path in cache.places(lambda t, name: t == target and name.startswith(label)):
        entry = cache.entry_at(layer, path, "size")
        if isinstance(entry, Entry) and entry.op == op and kind_of(entry.manifest) == kind:
            try:
                yield entry, content_of(entry)
            except (OSError, ValueError):
                continue


def kind_of(manifest: Manifest) -> str:
    """Return the kind of the fact that a manifest is of, or "" where it is of no fact."""
    return str(manifest.inputs.get("fact", ""))
