"""The root that a process writes to: staging, trash, quarantine, and what may be removed.

Only folders that bear an entry's name and a manifest of ours are ever touched, below a root that
bears our tag; links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from jitkern.cache import VERSION, layout
from jitkern.cache.entry import Entry
from jitkern.cache.key import Key
from jitkern.cache.manifest import LOG, NAME
from jitkern.errors import CacheError
from jitkern.files import atomic, owned

STALE_STAGING = 86400.0  # seconds after which a killed builder's staging is swept
GRACE = 600.0  # seconds that what was removed stays in the trash, for those who are reading it
QUARANTINED = 20  # entries kept for a look at what went wrong
_log = logging.getLogger(__name__)


class Root:
    """A directory with a cache in it that this process may write."""

    def __init__(self, root: Path, *, fsync: bool = True, trusted: tuple[Path, ...] = ()) -> None:
        self.root = root
        self.fsync = fsync
        self._own = owned.user_layer(root, trusted)
        self._warned: set[object] = set()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory to build in; whatever is left in it afterwards is removed.

        Raises CacheError.
        """
        with self._writing():
            self._create_root()
            path = self.root / VERSION / "tmp" / uuid.uuid4().hex
            path.mkdir(mode=0o700)
            self._sweep(path.lstat().st_mtime)
        try:
            yield path
        finally:
            atomic.delete(path)

    def list_plan(self, entry: Entry) -> None:
        """Put a plan into the list of its label, so that nobody lists a target to find it.

        One that cannot be put there is made again.
        """
        if "plan" in entry.manifest.inputs and entry.root == self.root:
            listed = layout.in_list(entry.path)
            with contextlib.suppress(OSError):
                atomic.make_directory(listed.parent, 0o755, fsync=False)
                listed.touch()

    def remove(self, path: Path) -> bool:
        """Put an entry of the user root into the trash, from where it is purged later.

        A reader has it whole or not at all. Returns False, and leaves alone what is there, if that
        is no entry of the user root. Raises CacheError.
        """
        if path.parent.parent != self.root / VERSION or not layout.is_entry(path):
            return False
        with self._writing(), contextlib.suppress(FileNotFoundError):
            self._trash(path)
            with contextlib.suppress(OSError):
                layout.in_list(path).unlink()
                layout.in_list(path).parent.rmdir()
            return True
        return False

    def claim(self) -> bool:
        """Whether the user root bears our tag; one that holds nothing but a cache is given it now.

        Raises CacheError.
        """
        tag = self.root / layout.TAG
        if layout.is_tagged(self.root):
            return True
        with self._writing():
            if layout.has_other_tag(self.root) or not layout.holds_only_a_cache(self.root):
                return layout.is_tagged(self.root)  # by another process, since it was asked
            staging = self.root / VERSION / "tmp"
            atomic.write(tag, layout.TAG_TEXT.encode(), staging=staging, fsync=self.fsync)
        return True

    def purge(self, older_than: float = GRACE) -> None:
        """Delete what has been in the trash, or put aside in place of `v1`, for so many seconds."""
        if not layout.is_tagged(self.root):
            return
        trash = self.root / VERSION / "trash"
        put_away = {trash / name: layout.set_aside_at(name) for name in layout.names(trash)}
        for name in listed(self.root):
            path = self.root / name
            if name.startswith(f"{VERSION}.bad.") and not layout.is_folder(path):
                put_away[path] = layout.set_aside_at(name.removeprefix(f"{VERSION}.bad."))
        for path, when in put_away.items():
            if when is not None and not 0 <= time.time() - when < older_than:
                atomic.delete(path)

    def quarantine(self, entry: Entry) -> None:
        """Put an entry that would not load out of the way, if it lies in the user root."""
        if entry.path.is_relative_to(self.root):
            self._quarantine(entry.path)

    def paths(
        self, root: Path | None = None, named: Callable[[str, str], bool] | None = None
    ) -> Iterator[Path]:
        """Where the entries of a root lie, by default of the user root; nothing is read.

        named: whether entries of this target and folder name are wanted; by default all are.
        """
        version = (root or self.root) / VERSION
        for target in layout.folders(version, layout.is_target):
            wanted = functools.partial(named, target) if named else bool
            for name in filter(layout.is_entry_name, layout.folders(version / target, wanted)):
                yield version / target / name

    def write_error(self, e: OSError) -> CacheError:
        """The error for a write that failed: why, and what to do."""
        return CacheError(
            f"the cache {self.root} cannot be written: {reason_of(e)}",
            path=str(self.root),
            errno=e.errno,
        )

    def keep_log(self, key: Key, staging: Path) -> Path:
        """Keep the log of a build that failed, beside the damaged entries; returns its path."""
        kept = self._bad(key.name)
        with contextlib.suppress(OSError):
            atomic.make_directory(kept.parent, 0o700, fsync=False)
            kept.mkdir()
            shutil.copy(staging / LOG, kept / LOG)
            self._bound_quarantine()
        return kept / LOG

    def _trash(self, path: Path) -> None:
        trash = self.root / VERSION / "trash" / f"{time.time_ns()}.{path.name}"
        atomic.make_directory(trash.parent, 0o700, fsync=False)
        _move(path, trash)

    def _bad(self, name: str) -> Path:
        return self.root / VERSION / "bad" / f"{time.time_ns()}.{name}"

    def _bound_quarantine(self) -> None:
        bad = self.root / VERSION / "bad"
        kept = [name for name in layout.names(bad) if layout.set_aside_at(name) is not None]
        for name in kept[:-QUARANTINED] if layout.is_tagged(self.root) else ():
            atomic.delete(bad / name)

    def _quarantine(self, path: Path) -> None:
        """Put what is damaged, or in the way of what is ours, out of the way."""
        if not layout.is_tagged(self.root) and not layout.is_entry(path):
            return  # it may be somebody's
        with contextlib.suppress(OSError):
            bad = self._bad(path.name)
            if path.name == VERSION:  # what holds the quarantine: beside it
                bad = path.with_name(f"{VERSION}.bad.{time.time_ns()}")
            else:
                atomic.make_directory(bad.parent, 0o700, fsync=False)
            try:
                _move(path, bad)
            except PermissionError:  # a directory moves only if it can be written
                if not path.is_symlink():
                    path.chmod(0o700)
                    _move(path, bad)
            self._bound_quarantine()

    def _create_root(self) -> None:
        if not self.root.is_dir():
            atomic.make_directory(self.root, 0o700, fsync=self.fsync)
        self._make_own(self.root / VERSION)
        self._make_own(self.root / VERSION / "tmp")
        if not self.claim():
            self._warn_once(
                layout.TAG,
                "%s holds other files than jitkern's, so nothing in it is ever evicted or cleared: "
                "point JITKERN_CACHE_DIR at a directory of its own, %s/jitkern say",
                self.root,
                self.root,
            )

    def _make_own(self, path: Path) -> None:
        """Make a directory of ours; what is in its way, a link say, is put aside."""
        try:
            atomic.make_directory(path, 0o755, fsync=self.fsync)
        except FileExistsError:
            self._quarantine(path)
            atomic.make_directory(path, 0o755, fsync=self.fsync)
        if self._own.owners and not self._own.vouched:
            status = path.stat()
            if status.st_mode & 0o022 and status.st_uid in self._own.owners:
                path.chmod(0o755)  # what others may write is not read from

    def _sweep(self, now: float) -> None:
        """Take out the staging of builders that were killed long ago.

        now: the time by the clock of the file system, which may not be that of this process.
        """
        if not layout.is_tagged(self.root):
            return
        self.purge()
        staged = self.root / VERSION / "tmp"
        for path in (staged / name for name in layout.names(staged) if layout.is_staged(name)):
            with contextlib.suppress(OSError):
                if now - path.lstat().st_mtime > STALE_STAGING:
                    self._trash(path)  # whole: its builder may live, if the clock jumped

    def _sync(self, path: Path) -> None:
        if self.fsync:
            atomic.sync(path)

    def _warn_once(self, what: object, message: str, *values: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(message, *values)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise self.write_error(e) from e


def _move(path: Path, to: Path) -> None:
    """Move what lies in the user root; what cannot be moved is deleted, its manifest first.

    In a container, a directory that its image brought cannot be renamed: overlayfs says EXDEV.
    Raises OSError.
    """
    try:
        path.rename(to)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        (path / NAME).unlink(missing_ok=True)
        atomic.delete(path)
        if os.path.lexists(path):
            raise


def listed(directory: Path) -> list[str]:
    """What a directory holds, sorted; nothing for one that is gone or none."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def reason_of(e: OSError) -> str:
    """Why the system refused, and what to do."""
    if e.errno in _REASONS:
        return _REASONS[e.errno]
    if e.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{e.filename} is a file; remove it, or point JITKERN_CACHE_DIR at a directory"
    if e.errno in _NOT_WRITABLE:
        return f"{e.strerror}; make it writable, or point JITKERN_CACHE_DIR at a directory that is"
    return f"{e.strerror or e}; point JITKERN_CACHE_DIR elsewhere if it stays so"


_NO_SPACE = "no space is left; free some, or point JITKERN_CACHE_DIR elsewhere"
_TOO_MANY = "too many files are open; close some, or raise the limit (`ulimit -n`)"
_REASONS = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EMFILE: _TOO_MANY,
    errno.ENFILE: _TOO_MANY,
    errno.EFBIG: "a file is larger than this process may write; raise the limit (`ulimit -f`)",
    errno.ENAMETOOLONG: "its path is too long; point JITKERN_CACHE_DIR at a shorter one",
}
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
