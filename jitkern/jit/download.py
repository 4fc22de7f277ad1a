"""On a cache miss: ask the remotes before anything is compiled."""

from __future__ import annotations

import itertools
import math

from jitkern import config, remote
from jitkern.cache import events
from jitkern.cache.entry import Entry
from jitkern.cache.key import Key, label_of
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.jit import active_cache, current_call
from jitkern.jit.active_cache import open_cache

_LOOKED_AT = 9  # entries of the same op, whose builds tell how long another one would take


def fetch(key: Key, op: str, usual: float) -> str:
    """Adopt the entry of a key from a remote, with the rest of its bundle.

    usual: the seconds that such a compile usually takes. Returns "" if the entry is there now, else
    what the remotes said. Raises CacheError if no cache can be written.
    """
    cache = open_cache()
    miss = remote.fetch.Miss(cache, key, expected(cache, key, op, usual), current_call.text)
    try:
        said = remote.fetch.fetch(miss)
    except CacheError as e:
        said = remote.fetch.fetch(miss._replace(cache=active_cache.use_temporary(e)))
    if not said:
        events.count("fetched")
    return said


def expected(cache: Cache, key: Key, op: str, usual: float) -> float:
    """Return the seconds that a compile would take; infinity if none is allowed."""
    if config.current().compile == "never":
        return math.inf
    begin = label_of(op, "", key.target)

    def alike(target: str, name: str) -> bool:
        return target == key.target and name.startswith(begin)

    places = itertools.islice(cache.places(alike), _LOOKED_AT)
    entries = [cache.entry_at(layer, path, "size") for layer, path in places]
    seconds = [e.manifest.seconds for e in entries if isinstance(e, Entry)]
    built = sorted(time for time in seconds if time > 0)
    return built[len(built) // 2] if built else usual
