"""A miss on this machine: what remotes have for it is checked and adopted into the cache.

1. The index of the machine, if this host has not read it in the last minute.
2. The bundle that lists the entry: all its entries are adopted, so that later misses are hits.
3. An object for the entry alone, if the index says that there are such.
4. A build, if the server says that it builds.
"""

from __future__ import annotations

import threading
import time

from jitkern import config
from jitkern._fork import after_fork
from jitkern.cache.key import Key
from jitkern.cache.store import Cache
from jitkern.errors import JitkernError
from jitkern.remote import layout, trust
from jitkern.remote.patience import Patience, Resting, within
from jitkern.remote.reader import Miss, Order, Remote
from jitkern.remote.store import Unavailable, shown

__all__ = ["Miss", "Order", "fetch", "places_of", "remote_of"]


def fetch(miss: Miss) -> str:
    """Adopt what the miss wants from the first remote that has it; return "", or why none has.

    Raises CacheError if the cache cannot be written.
    """
    settings = config.current()
    deadline = time.monotonic() + settings.remote_budget
    budget = min(settings.remote_budget, max(1.0, miss.expected / 2))
    reasons = []
    for url in settings.remotes:
        remote = remote_of(url)
        left = deadline - time.monotonic()
        if left <= 0:
            reasons.append(f"{remote.url}: it is not asked: no time is left")
            continue
        why = remote.bring(miss, min(budget, left))
        if not why:
            return ""
        reasons.append(f"{remote.url}: {why}")
    return "; ".join(reasons)


def places_of(cache: Cache, key: Key) -> list[str]:
    """Return, for each remote of the settings, in words, where it has an entry. Raises nothing."""
    return [f"{shown(url)}: {_place_in(url, cache, key)}" for url in config.current().remotes]


def _place_in(url: str, cache: Cache, key: Key) -> str:
    remote = remote_of(url)
    settings = config.current()
    try:
        trust.keys_for(url, settings, cache.root)
        patience = Patience(remote.breaker, settings.remote_timeout)
        within(patience.left, lambda: remote.store)
        machine = layout.machine_of(key.target)
        copy = remote.index(cache, machine, patience)
    except Resting as e:
        return f"not asked: {e}"
    except (JitkernError, Unavailable) as e:
        return str(e)
    found = next(iter(copy.listing.holding(key.digest[:16])), None)
    if found:
        return f"yes, in the bundle {found.file} of {found.package} {found.version}".rstrip()
    more = ["entries of their own"] * copy.listing.loose + ["builds"] * copy.builds
    return f"no{', unless by ' * bool(more)}{' or '.join(more)}"


def remote_of(url: str) -> Remote:
    """Return the remote of a URL: one in a process, for each set of settings that it depends on."""
    settings = config.current()
    chosen = (url, settings.remote_timeout, settings.remote_budget, settings.remote_token_file)
    with _guard:
        if chosen not in _remotes:
            _remotes[chosen] = Remote(url, settings)
        return _remotes[chosen]


_remotes: dict[tuple[object, ...], Remote] = {}
_guard = threading.Lock()
after_fork(_guard)
