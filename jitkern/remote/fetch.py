"""A miss on this machine: what remotes have for it is checked and adopted into the cache.

1. The index of the machine, if this process has not read it in the last minute.
2. The bundle that lists the entry: all its entries are adopted, so that later misses are hits.
3. A build, if the server says that it builds.

Nothing here raises for what a remote does: a dead or hostile remote costs at most the budget.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from jitkern import config
from jitkern._fork import after_fork
from jitkern.cache import lock
from jitkern.cache.key import Key, canonical
from jitkern.cache.store import Cache
from jitkern.cache_tools.check import human_bytes
from jitkern.cache_tools.ustar import BundleError
from jitkern.config import Config
from jitkern.errors import CacheError, JitkernError
from jitkern.named_tuple import NamedTuple
from jitkern.remote import bundles, layout, trust
from jitkern.remote.index import Bundle, Index
from jitkern.remote.opening import opened
from jitkern.remote.patience import Cooldown, Deadline, InCooldown, run_with_timeout
from jitkern.remote.store import (
    Object,
    Readable,
    Service,
    Tag,
    TooLarge,
    Unavailable,
    Unchanged,
    shown,
)

FRESH = 60.0  # seconds for which an index, or that there is none, is taken for granted
MOST_TAKEN = 2 << 30  # bytes that a process takes from all remotes
MOST_KNOWN = 4096  # misses that are remembered
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


class Miss(NamedTuple):
    """An entry that the cache lacks.

    expected: seconds that making the entry would take here; infinity where that is not allowed.
    call: returns what a build service wants to know, or None if it is not known: the call that
    needs the entry, as a line of a recording, and the target.
    """

    cache: Cache
    key: Key
    expected: float
    call: Callable[[], tuple[str, str] | None] = lambda: None

    def is_cached(self) -> bool:
        """Return whether the cache has the entry now."""
        return self.cache.find(self.key) is not None


def fetch(miss: Miss) -> str:
    """Adopt the missing entry from the first remote that has it; return "", or why none has.

    Raises CacheError if the cache cannot be written.
    """
    settings = config.current()
    deadline = time.monotonic() + settings.remote_budget
    budget = min(settings.remote_budget, max(1.0, miss.expected / 2))
    reasons = []
    for url in settings.remotes:
        remote = remote_of(url)
        left = deadline - time.monotonic()
        why = "it is not asked: no time is left"
        if left > 0:
            why = remote.fetch(miss, min(budget, left))
        if not why:
            return ""
        reasons.append(f"{remote.url}: {why}")
    return "; ".join(reasons)


def places_of(cache: Cache, key: Key) -> list[str]:
    """Return, for each remote of the settings, in words, where it has an entry. Raises nothing."""
    remotes = map(remote_of, config.current().remotes)
    return [f"{remote.url}: {remote.place_of(cache, key)}" for remote in remotes]


def remote_of(url: str) -> Remote:
    """Return the remote of a URL: one in a process, for each set of settings that it depends on."""
    settings = config.current()
    chosen = (url, settings.remote_timeout, settings.remote_budget, settings.remote_token_file)
    return _remotes.get(chosen) or _remotes.setdefault(chosen, Remote(url, settings))


class _Read(NamedTuple):
    """An index as it was read. builds: whether a service answered. at: monotonic time."""

    listing: Index
    tag: Tag
    builds: bool
    at: float


class Remote:
    """Per-process state of a remote: indexes, failures, and the cooldown after one."""

    def __init__(self, url: str, settings: Config) -> None:
        self.url = shown(url)
        self.cooldown = Cooldown(self.url)
        self.bytes_read = 0  # bytes
        self._given = url
        self._timeout = settings.remote_timeout
        self._store: Readable | None = None
        self.indexes: dict[str, _Read] = {}  # by machine
        self._refused: set[str] = set()  # objects that are not asked for again
        self._known: dict[tuple[Path, str], tuple[float, str]] = {}  # misses: when, and why
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        after_fork(self._lock)

    @property
    def store(self) -> Readable:
        """The store, opened at its first use. Raises JitkernError if it cannot be opened."""
        if self._store is None:  # without a lock, which a forked child would wait for
            made = opened(self._given)
            self._store = self._store or made  # of another thread
        return self._store

    def fetch(self, miss: Miss, budget: float) -> str:
        """Adopt the missing entry; return "", or why it is missing. Raises CacheError."""
        place = miss.cache.root, miss.key.digest
        at, why = self._known.get(place, (0.0, ""))
        if why and time.monotonic() - at < FRESH:
            return why
        try:
            why = self._fetch(miss, Deadline(self.cooldown, budget))
        except InCooldown as e:
            return f"it is not asked: {e}"
        except CacheError:
            raise
        except JitkernError as e:  # not trusted, not a URL of a store, or a package is missing
            self._warn(str(e))
            return f"it cannot be used: {str(e).partition(': ')[0]}"
        except Unavailable as e:
            if not (isinstance(e, TooLarge) or self.cooldown.left()):  # which were told of
                self._warn(f"the remote {self.url} failed: {e}", "unavailable")
            why = str(e)
        if why:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[place] = time.monotonic(), why
        return why

    def place_of(self, cache: Cache, key: Key) -> str:
        """Return in words where the remote has an entry. Raises nothing."""
        deadline = Deadline(self.cooldown, self._timeout)
        try:
            trust.keys_for(self._given, config.current(), cache.root)
            read = self._index(layout.machine_of(key.target), deadline)
        except InCooldown as e:
            return f"not asked: {e}"
        except (JitkernError, Unavailable) as e:
            return str(e)
        found = next(iter(read.listing.holding(key.digest[:16])), None)
        if found:
            return f"yes, in the bundle {found.file} of {found.package} {found.version}".rstrip()
        return f"no{', unless it builds it' * read.builds}"

    def _fetch(self, miss: Miss, deadline: Deadline) -> str:
        keys = trust.keys_for(self._given, config.current(), miss.cache.root)
        machine = layout.machine_of(miss.key.target)
        index, _, builds, _ = self._index(machine, deadline)
        for bundle in index.holding(miss.key.digest[:16]):
            if self._bundle(miss, machine, bundle, keys, deadline):
                return ""
        if builds and isinstance(self.store, Service):
            return self._build(self.store, miss, keys, deadline)
        return f"it has no such entry for {machine}"

    def _index(self, machine: str, deadline: Deadline) -> _Read:
        """Return the index of a machine, at most a minute old. Raises as `store` and `ask` do."""
        run_with_timeout(deadline.left, lambda: self.store)  # whose errors are none of the remote
        if not self._lock.acquire(timeout=deadline.left):
            raise Unavailable("another thread still waits for its index")
        try:
            read = self.indexes.get(machine)
            if read is None or time.monotonic() - read.at >= FRESH:
                read = self.indexes[machine] = self._read_index(machine, read, deadline)
            return read
        finally:
            self._lock.release()

    def _read_index(self, machine: str, old: _Read | None, deadline: Deadline) -> _Read:
        name, store = layout.index_of(machine), self.store
        index, tag = (old.listing, old.tag) if old else (Index(), None)
        try:
            found = deadline.run(
                lambda: store.get(name, limit=layout.LARGEST_INDEX, unless=tag), self._timeout
            )
            index, tag = (Index.decode(found.data), found.tag) if found else (Index(), None)
        except Unchanged:
            pass
        except (ValueError, TooLarge) as e:
            self._refuse(name, str(e))
            index, tag = Index(), None
        builds = isinstance(store, Service) and store.builds  # as its answer says
        return _Read(index, tag, builds, time.monotonic())

    def _bundle(
        self, miss: Miss, machine: str, bundle: Bundle, keys: tuple[str, ...], deadline: Deadline
    ) -> bool:
        """Adopt a bundle that lists the entry; return whether the entry is cached now."""
        name = layout.bundle_of(machine, bundle.file)
        if name in self._refused:
            return False
        if bundle.bytes > layout.LARGEST_BUNDLE:
            return self._refuse(name, f"it has {bundle.bytes} bytes")
        spared = miss.expected / 2 * len(bundle.entries)
        deadline.extend(min(config.current().remote_budget, spared))
        with self._locked(miss, name, f"a bundle of {bundle.package}", deadline):
            if miss.is_cached():
                return True
            found = self._get(name, bundle.bytes, deadline)
            try:
                data = bundles.checked(found, bundle)
            except BundleError as e:
                return self._refuse(name, str(e))
            return self.adopt(miss, name, data, keys)

    def _build(
        self, service: Service, miss: Miss, keys: tuple[str, ...], deadline: Deadline
    ) -> str:
        """Have a service build what a call needs; return "", or why it has not."""
        known = miss.call()
        if known is None:
            return "it has no such entry, and no call is known for which it could build one"
        deadline.extend(config.current().remote_budget)
        want = {"call": known[0], "schema": 1, "targets": [known[1]]}
        body = canonical({**want, "want": [miss.key.digest]})
        with self._locked(miss, json.dumps(want), f"a build of {miss.key.label}", deadline):
            if miss.is_cached():
                return ""
            while True:
                answer = deadline.run(
                    lambda: service.post(layout.BUILD, body, limit=layout.LARGEST_BUNDLE)
                )
                if answer.status != 202:
                    break
                time.sleep(min(answer.retry_after or 1.0, deadline.left))
                if not deadline.left:
                    return "its service is still building the entry"
        if answer.status == 200:
            what = f"{layout.BUILD} for {miss.key.name}"
            return "" if self.adopt(miss, what, answer.data, keys) else "its answer is refused"
        said = answer.data[:500].decode("utf-8", "replace")
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):  # not ours
            said = str(json.loads(answer.data[: 1 << 16])["reason"])
        text = " ".join("".join(c if c.isprintable() else " " for c in said).split())
        why = f"its service does not build the entry ({answer.status}): {text:.300}"
        if answer.status not in (404, 405, 501):
            self._warn(f"the remote {self.url}: {why}")
        return why

    def _get(self, name: str, limit: int, deadline: Deadline) -> Object | None:
        """Return an object, which may take all that is left of the budget."""
        left = MOST_TAKEN - sum(remote.bytes_read for remote in [*_remotes.values()])
        if left <= 0:
            raise Unavailable(f"this process has taken {human_bytes(MOST_TAKEN)} from remotes")
        limit = min(limit, left)
        try:
            found = deadline.run(lambda: self.store.get(name, limit=limit))
        except TooLarge as e:
            self._refuse(name, str(e))
            raise
        self.bytes_read += len(found.data) if found else 0
        return found

    def adopt(self, miss: Miss, name: str, data: bytes, keys: tuple[str, ...]) -> bool:
        """Adopt the entries of a bundle; return whether the missing one is cached now."""
        started = time.perf_counter()
        try:
            done = bundles.adopt(miss.cache, data, keys)
        except CacheError as e:
            if getattr(e, "errno", None) not in _FULL:
                raise
            return miss.is_cached() or self._refuse(name, str(e))
        except JitkernError as e:
            return self._refuse(name, str(e))
        if not miss.is_cached():
            return self._refuse(name, f"it does not hold {miss.key.name}")
        _log.log(
            logging.WARNING if config.current().verbose else logging.INFO,
            "fetched %s from %s: %d new entries, %s, adopted in %.2f s",
            name, self.url, done.new, human_bytes(len(data)), time.perf_counter() - started,
        )  # fmt: skip
        return True

    def _locked(
        self, miss: Miss, name: str, what: str, deadline: Deadline
    ) -> AbstractContextManager[None]:
        """Hold a lock of this host, so that one process fetches what several of them miss."""
        text = f"{self.url} {name} {miss.cache.root}"
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return lock.held(
            f"{digest[:24]}-{digest[24:32]}", what, doing="fetching", timeout=deadline.left
        )

    def _refuse(self, name: str, why: str) -> bool:
        """Ask for an object no more in this process; warn once."""
        self._refused.add(name)
        self._warn(f"{name} of the remote {self.url} is not used: {why}")
        return False

    def _warn(self, text: str, once_for: str = "") -> None:
        if (once_for or text) not in self._warned:
            self._warned.add(once_for or text)
            _log.warning("%s", text)


_remotes: dict[tuple[object, ...], Remote] = {}
