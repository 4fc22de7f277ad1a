"""Records: small facts that are computed once, each in the manifest of its own entry.

A record says how calls of a class are served (`call`), which configuration is the fastest
(`choice`), where the artifact of a drop-in's call lies (`shortcut`), or what the functions of a
Triton file declare (`declaration`). It is named by what a process knows without an import. What
else must be as it was is part of the content, and is checked by whoever reads the record. Several
records may have the same inputs but for `which`, the digest of their content; they have one label,
too.

A `Reader` needs few imports: it takes only what is whole and may be used in place, and leaves all
else to `Cache.look_up`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jitkern.cache import VERSION, events
from jitkern.cache.entry import Entry, read_entry
from jitkern.cache.key import Key, digest_of
from jitkern.cache.manifest import NAME, Manifest
from jitkern.errors import CacheError
from jitkern.files import trust

if TYPE_CHECKING:
    from jitkern.cache.store import Cache
    from jitkern.config import Config

LookUp = Callable[[str, str], "Entry | None"]
_SCHEMA = 2  # bump when the meaning of an input or of a content changes
_log = logging.getLogger(__name__)


def record_key(kind: str, op: str, target: str, label: str, inputs: Mapping[str, Any]) -> Key:
    """Return the key of a record. inputs: plain values for JSON."""
    named = {**inputs, "record": kind, "format": _SCHEMA, "op": op, "target": target}
    return Key(named, digest_of(named), label)


def one_of(key: Key, content: Any) -> Key:
    """Return the key of one of several records, with this content."""
    inputs = {**key.inputs, "which": digest_of(content)}
    return Key(inputs, digest_of(inputs), key.label)


def content_of(entry: Entry) -> Any:
    """Return the content of a record. Raises ValueError for an entry of another kind."""
    content, which = entry.manifest.meta.get("content"), entry.manifest.inputs.get("which")
    if content is None or which not in (None, digest_of(content)):
        raise ValueError("its content is not what it was published with")
    return content


class Reader:
    """Reads records, and what they refer to, under the settings of the moment.

    Folders are listed once: records that others publish meanwhile are not found. look_up:
    `Cache.look_up`, of a target and a folder name.
    """

    def __init__(self, settings: Config, look_up: LookUp) -> None:
        self._verify = settings.verify
        self._look_up = look_up
        self._layers = list(trust.layers(settings))
        self._listed: dict[tuple[trust.Layer, str], dict[str, list[str]]] = {}

    def alternatives(self, *keys: Key) -> Iterator[Entry]:
        """Yield the records that differ from one of these keys only in `which`, each once.

        keys: of one target.
        """
        wanted = {key.label: {**key.inputs, "which": None} for key in keys}
        found: set[str] = set()
        for layer in self._layers if keys else ():
            listed = self._names(layer, keys[0].target)
            for name in sorted(name for label in wanted for name in listed.get(label, ())):
                inputs = wanted[name.rpartition("-")[0]]
                if name in found:
                    continue
                entry = self._entry_in(layer, keys[0].target, name, "size", touch=False)
                if entry and {**entry.manifest.inputs, "which": None} == inputs:
                    found.add(name)
                    yield entry

    def changed(self) -> None:
        """Drop cached listings: this process has published or removed a record."""
        self._listed.clear()

    def _names(self, layer: trust.Layer, target: str) -> dict[str, list[str]]:
        """Return the names of the entries of a layer for a target, by their labels."""
        if (layer, target) not in self._listed:
            listed = self._listed[layer, target] = defaultdict(list)
            with suppress(OSError):
                for name in os.listdir(layer.root / VERSION / target):
                    listed[name.rpartition("-")[0]].append(name)
        return self._listed[layer, target]

    def find(self, reference: str) -> Entry | None:
        """Return the entry with a reference (see `Key`), whole and verified, or None."""
        target, _, place = reference.partition("/")
        label, _, digest = place.rpartition("-")
        name = f"{label}-{digest[:16]}"
        for layer in self._layers:
            entry = self._entry_in(layer, target, name, self._verify, touch=layer.own)
            if entry and entry.manifest.digest == digest:
                return entry
        return None

    def used(self, entry: Entry) -> None:
        """Mark a record as used, if it is in the user root."""
        events.use(entry.path)
        own = any(layer.own and layer.root == entry.root for layer in self._layers)
        with suppress(OSError):
            if own and abs(time.time() - last_use(entry)) > trust.TOUCH:
                os.utime(entry.path / NAME)

    def _entry_in(
        self, layer: trust.Layer, target: str, name: str, verify: str, *, touch: bool
    ) -> Entry | None:
        if layer.in_place:
            try:
                return read_entry(layer, target, name, verify=verify, touch=touch)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (OSError, ValueError) as e:
                _log.debug("%s of %s: %s", name, layer.root, e)
        return self._look_up(target, name)


def last_use(entry: Entry) -> float:
    """Return when a record was last used, as Unix time; 0 if it is gone."""
    try:
        return (entry.path / NAME).stat().st_mtime
    except OSError:
        return 0.0


def write(cache: Cache, key: Key, content: Any, compiler: Mapping[str, str]) -> Entry | None:
    """Publish a record and return its entry, which another process may have published before.

    compiler: name and version of what found it out. Returns None if the cache cannot be written.
    """
    try:
        with cache.staging() as staging:
            manifest = Manifest(key.inputs, meta={"content": content}, compiler=compiler)
            entry = cache.publish(key, staging, manifest)
    except CacheError:
        return None
    events.use(entry.path)
    return entry


def read(cache: Cache, key: Key, parse: Callable[[Any], Any]) -> Any:
    """Return what `parse` makes of the content of the record of a key, or None.

    parse: raises ValueError for an odd content, whose entry is then quarantined.
    """
    entry = cache.find(key)
    if entry is None:
        return None
    try:
        content = parse(content_of(entry))
    except ValueError as e:
        _log.warning("%s is damaged (%s); making it again", entry.path, e)
        cache.quarantine(entry)
        return None
    events.use(entry.path)
    return content


def every(cache: Cache, kind: str, op: str, target: str, label: str) -> Iterator[Entry]:
    """Yield every record of a kind and an op with a label that begins with `label`."""
    for layer, path in cache.places(lambda t, name: t == target and name.startswith(label)):
        entry = cache.entry_at(layer, path, "size")
        if (
            isinstance(entry, Entry)
            and entry.op == op
            and entry.manifest.inputs.get("record") == kind
        ):
            yield entry
