"""A remote as this process reads it: indexes, bundles, entries of their own, and builds.

Nothing here raises for what a remote does: a dead or hostile remote costs at most the budget.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from jitkern import config
from jitkern._fork import after_fork
from jitkern.cache import lock
from jitkern.cache.key import Key, canonical
from jitkern.cache.store import Cache
from jitkern.cache_tools.bundle import MAX_FILE
from jitkern.cache_tools.check import human_bytes
from jitkern.cache_tools.ustar import BundleError
from jitkern.config import Config
from jitkern.errors import CacheError, JitkernError
from jitkern.named_tuple import NamedTuple
from jitkern.remote import bundles, copies, layout, trust
from jitkern.remote.copies import Copy
from jitkern.remote.index import Bundle, Index
from jitkern.remote.patience import Patience, Resting, breaker_of, within
from jitkern.remote.store import (
    Object,
    Readable,
    Service,
    TooLarge,
    Unavailable,
    Unchanged,
    opened,
    shown,
)

MOST_TAKEN = 2 << 30  # bytes that a process takes from all remotes
MOST_KNOWN = 4096  # misses that are remembered
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)
_taken: Counter[str] = Counter()  # bytes, by the URL of the remote


class Order(NamedTuple):
    """An order for a service that builds: a call as a line of a recording, and a target."""

    call: str
    target: str


class Miss(NamedTuple):
    """An entry that the cache lacks.

    expected: seconds that making the entry would take here; infinity where that is not allowed.
    order: returns the call that needs the entry, or None if the call is not known.
    """

    cache: Cache
    key: Key
    expected: float
    order: Callable[[], Order | None] = lambda: None

    @property
    def place(self) -> tuple[Path, str]:
        """What a miss is remembered by."""
        return self.cache.root, self.key.digest

    def is_mended(self) -> bool:
        """Return whether the cache has the entry now."""
        return self.cache.find(self.key) is not None


class Remote:
    """A remote in this process: what it has said, and whether it is asked."""

    def __init__(self, url: str, settings: Config) -> None:
        self.url = shown(url)
        self.given = url
        self._store: Readable | None = None
        self.breaker = breaker_of(url)
        self._timeout = settings.remote_timeout
        self._indexes: dict[tuple[Path, str], Copy] = {}
        self._refused: set[str] = set()  # objects that are not asked for again
        self._known: dict[tuple[Path, str], tuple[float, str]] = {}  # misses: when, and why
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        after_fork(self._lock)

    @property
    def store(self) -> Readable:
        """The store, opened when it is first asked. Raises JitkernError if that cannot be done."""
        if self._store is None:  # without a lock, which a forked child would wait for
            made = opened(self.given)
            self._store = self._store or made  # of another thread
        return self._store

    def bring(self, miss: Miss, budget: float) -> str:
        """Adopt what the miss wants; return "", or why it is not there. Raises CacheError."""
        at, why = self._known.get(miss.place, (0.0, ""))
        if why and time.monotonic() - at < copies.FRESH:
            return why
        if why := self.breaker.open():
            return f"it is not asked: {why}"
        try:
            why = self._brought(miss, Patience(self.breaker, budget))
        except Resting as e:
            return f"it is not asked: {e}"
        except CacheError:
            raise
        except JitkernError as e:  # not trusted, not a URL of a store, or a package is missing
            self._warn(str(e))
            return f"it cannot be used: {str(e).partition(': ')[0]}"
        except TooLarge as e:
            why = str(e)
        except Unavailable as e:
            self._warn(f"the remote {self.url} is of no use now: {e}", "unavailable")
            why = str(e)
        if why:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[miss.place] = time.monotonic(), why
        return why

    def index(self, cache: Cache, machine: str, patience: Patience) -> Copy:
        """Return the index of a machine, at most a minute old. Raises Unavailable."""
        if not self._lock.acquire(timeout=max(0.0, patience.left)):
            raise Unavailable("another thread still waits for its index")
        try:
            copy = self._indexes.get((cache.root, machine))
            if copy is None or not copy.fresh:
                copy = copies.read(cache.root, self.url, machine) or copy
            if copy is None or not copy.fresh:
                copy = self._read_index(machine, copy, patience)
                copies.write(cache, self.url, machine, copy)
            self._indexes[cache.root, machine] = copy
            return copy
        finally:
            self._lock.release()

    def _read_index(self, machine: str, old: Copy | None, patience: Patience) -> Copy:
        name, tag = layout.index_of(machine), old.tag if old else None
        store = self.store  # whose answer says whether it builds
        try:
            found = patience.ask(
                lambda: store.get(name, limit=layout.LARGEST_INDEX, unless=tag),
                self._timeout,
            )
            index = Index.decode(found.data) if found else Index()
            tag = found.tag if found else None
        except Unchanged:
            index = old.listing if old else Index()
        except (ValueError, TooLarge) as e:
            self._refuse(name, str(e))
            index, tag = Index(loose=False), None
        builds = isinstance(store, Service) and store.builds
        return Copy(index, tag, builds, time.time())

    def _brought(self, miss: Miss, patience: Patience) -> str:
        keys = trust.keys_for(self.given, config.current(), miss.cache.root)
        within(patience.left, lambda: self.store)  # whose errors are none of the remote
        machine = layout.machine_of(miss.key.target)
        copy = self.index(miss.cache, machine, patience)
        for bundle in copy.listing.holding(miss.key.digest[:16]):
            if self._bundle(miss, machine, bundle, keys, patience):
                return ""
        if copy.listing.loose and self._entry(miss, keys, patience):
            return ""
        if copy.builds and isinstance(self.store, Service):
            return self._built(self.store, miss, keys, patience)
        return f"it has no such entry for {machine}"

    def _bundle(
        self, miss: Miss, machine: str, bundle: Bundle, keys: tuple[str, ...], patience: Patience
    ) -> bool:
        """Adopt a bundle that lists the entry; return whether the entry is there then."""
        name = layout.bundle_of(machine, bundle.file)
        if name in self._refused:
            return False
        if bundle.bytes > layout.LARGEST_BUNDLE:
            return self._refuse(name, f"it has {bundle.bytes} bytes")
        spared = miss.expected / 2 * len(bundle.entries)
        patience.extend(min(config.current().remote_budget, spared))
        with self._alone(miss, name, f"a bundle of {bundle.package}", patience):
            if miss.is_mended():
                return True
            found = self._got(name, bundle.bytes, patience)
            try:
                data = bundles.checked(found, bundle)
            except BundleError as e:
                return self._refuse(name, str(e))
            return self._adopt(miss, name, data, keys)

    def _entry(self, miss: Miss, keys: tuple[str, ...], patience: Patience) -> bool:
        """Adopt the object of the entry alone, if there is one."""
        key = miss.key
        name = layout.entry_of(key.target, key.name)
        if name in self._refused:
            return False
        found = self._got(name, MAX_FILE, patience)
        return found is not None and self._adopt(
            miss, name, found.data, keys, (key.target, key.name)
        )

    def _built(
        self, service: Service, miss: Miss, keys: tuple[str, ...], patience: Patience
    ) -> str:
        """Have a service build what a call needs; return "", or why it has not."""
        order = miss.order()
        if order is None:
            return "it has no such entry, and the call to have it built for is not known here"
        patience.extend(config.current().remote_budget)
        want = {"call": order.call, "schema": 1, "targets": [order.target]}
        body = canonical({**want, "want": [miss.key.digest]})
        with self._alone(miss, json.dumps(want), f"a build of {miss.key.label}", patience):
            if miss.is_mended():
                return ""
            while True:
                answer = patience.ask(
                    lambda: service.post(layout.BUILD, body, limit=layout.LARGEST_BUNDLE),
                    patience.left,
                )
                if answer.status != 202:
                    break
                nap = min(answer.retry_after or 1.0, max(0.0, patience.left))
                time.sleep(nap)
                if patience.left <= 0:
                    return "its service is still building the entry"
        if answer.status == 200:
            what = f"{layout.BUILD} for {miss.key.name}"
            return "" if self._adopt(miss, what, answer.data, keys) else "its answer is refused"
        said = answer.data[:500].decode("utf-8", "replace")
        text = " ".join("".join(c if c.isprintable() else " " for c in said).split())
        why = f"its service does not build the entry ({answer.status}): {text:.300}"
        if answer.status not in (404, 405, 501):
            self._warn(f"the remote {self.url}: {why}")
        return why

    def _got(self, name: str, limit: int, patience: Patience) -> Object | None:
        """Return an object, which may take all that is left of the budget."""
        left = MOST_TAKEN - sum(tuple(_taken.values()))
        if left <= 0:
            raise Unavailable(f"this process has taken {human_bytes(MOST_TAKEN)} from remotes")
        limit = min(limit, left)
        try:
            found = patience.ask(lambda: self.store.get(name, limit=limit), patience.left)
        except TooLarge as e:
            self._refuse(name, str(e))
            raise
        _taken[self.url] += len(found.data) if found else 0
        return found

    def _adopt(
        self, miss: Miss, name: str, data: bytes, keys: tuple[str, ...],
        only: tuple[str, str] | None = None,
    ) -> bool:  # fmt: skip
        """Adopt the entries of a bundle; return whether the wanted one is there then."""
        cache, started = miss.cache, time.perf_counter()
        try:
            done = bundles.adopt(cache, data, keys, only)
        except CacheError as e:
            if getattr(e, "errno", None) not in _FULL:
                raise
            return miss.is_mended() or self._refuse(name, str(e))  # the entry alone may fit
        except JitkernError as e:
            return self._refuse(name, str(e))
        if not miss.is_mended():
            return self._refuse(name, f"it does not hold {miss.key.name}")
        _log.log(
            logging.WARNING if config.current().verbose else logging.INFO,
            "fetched %s from %s: %d new entries, %s, adopted in %.2f s",
            name, self.url, done.new, human_bytes(len(data)), time.perf_counter() - started,
        )  # fmt: skip
        return True

    def _alone(
        self, miss: Miss, name: str, what: str, patience: Patience
    ) -> AbstractContextManager[None]:
        """Hold a lock of this host, so that one process fetches what several of them miss."""
        text = f"{self.url} {name} {miss.cache.root}"
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return lock.held(
            f"{digest[:24]}-{digest[24:32]}", what,
            doing="fetching", timeout=max(0.0, patience.left),
        )  # fmt: skip

    def _refuse(self, name: str, why: str) -> bool:
        """Ask for an object no more in this process; warn once."""
        self._refused.add(name)
        self._warn(f"{name} of the remote {self.url} is not used: {why}")
        return False

    def _warn(self, text: str, once_for: str = "") -> None:
        if (once_for or text) not in self._warned:
            self._warned.add(once_for or text)
            _log.warning("%s", text)
