"""The root that a process writes to: staging, trash, quarantine, and removal of entries.

Only folders with the name of an entry and a manifest of ours are ever removed, and only below a
root with our tag; links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jitkern.cache import VERSION, layout
from jitkern.cache.entry import Entry
from jitkern.cache.key import Key
from jitkern.cache.manifest import LOG, NAME
from jitkern.errors import CacheError
from jitkern.files import atomic, trust

STALE_STAGING = 86400.0  # seconds after which a killed builder's staging is swept
GRACE = 600.0  # seconds that removed entries stay in the trash, for processes that still read them
QUARANTINED = 20  # damaged entries and logs that are kept for the user to look at
_log = logging.getLogger(__name__)


class Root:
    """A directory with a cache that this process may write."""

    def __init__(self, root: Path, *, fsync: bool = True, trusted: tuple[Path, ...] = ()) -> None:
        self.root = root
        self.fsync = fsync
        self.known_look = 0.0  # Unix time, see `eviction`
        self.published = 0  # bytes that were published since
        self._own = trust.user_layer(root, trusted)
        self._warned: set[object] = set()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a private directory to build in, and remove it with its content afterwards.

        Raises CacheError.
        """
        path = self.root / VERSION / "tmp" / os.urandom(16).hex()
        try:  # from here on a signal may end this process in good order
            with self._writing():
                self._create_root()
                path.mkdir(mode=0o700)
                self._sweep(path.lstat().st_mtime)
            yield path
        finally:
            atomic.delete(path)

    def remove(self, path: Path) -> bool:
        """Move an entry of the user root into the trash, from where it is purged later.

        A reader sees the whole entry or none. Returns False, and leaves the path alone, if `path`
        is not an entry of the user root. Raises CacheError.
        """
        if path.parent.parent != self.root / VERSION or not layout.is_entry(path):
            return False
        with self._writing(), contextlib.suppress(FileNotFoundError):
            self._trash(path)
            return True
        return False

    def claim(self) -> bool:
        """Return whether the user root has our tag; first tag a root that holds only a cache.

        Raises CacheError.
        """
        tag = self.root / layout.TAG
        if layout.is_tagged(self.root):
            return True
        with self._writing():
            if layout.has_other_tag(self.root) or not layout.holds_only_a_cache(self.root):
                return layout.is_tagged(self.root)  # another process may have tagged it meanwhile
            staging = self.root / VERSION / "tmp"
            atomic.write(tag, layout.TAG_TEXT.encode(), staging=staging, fsync=self.fsync)
        return True

    def purge(self, older_than: float = GRACE) -> None:
        """Delete files that were moved to the trash, or away from `v1`, so many seconds ago."""
        if not layout.is_tagged(self.root):
            return
        trash = self.root / VERSION / "trash"
        removed = {trash / name: layout.set_aside_at(name) for name in layout.names(trash)}
        with contextlib.suppress(OSError):
            for path in self.root.glob(f"{VERSION}.bad.*"):
                if not layout.is_folder(path):
                    removed[path] = layout.set_aside_at(path.name.removeprefix(f"{VERSION}.bad."))
        for path, removed_at in removed.items():
            if removed_at is not None and not 0 <= time.time() - removed_at < older_than:
                atomic.delete(path)

    def quarantine(self, entry: Entry) -> None:
        """Quarantine an entry that failed to load, if it is in the user root."""
        if entry.path.is_relative_to(self.root):
            self._quarantine(entry.path)

    def paths(
        self, root: Path | None = None, named: Callable[[str, str], bool] | None = None
    ) -> Iterator[Path]:
        """Yield the paths of the entries of a root (default: the user root), without reading them.

        named: a filter that takes a target and a folder name; the default lets all entries pass.
        """
        version = (root or self.root) / VERSION
        for target in layout.folders(version, layout.is_target):
            wanted = functools.partial(named, target) if named else bool
            for name in filter(layout.is_entry_name, layout.folders(version / target, wanted)):
                yield version / target / name

    def write_error(self, e: OSError) -> CacheError:
        """Return the error for a failed write: the reason, and what the user can do."""
        return CacheError(
            f"the cache {self.root} cannot be written: {reason_of(e)}",
            path=str(self.root),
            errno=e.errno,
        )

    def keep_log(self, key: Key, staging: Path) -> Path:
        """Keep the log of a failed build in the quarantine, and return its path."""
        folder = self._quarantine_path(key.name)
        with contextlib.suppress(OSError):
            atomic.make_directory(folder.parent, 0o700, fsync=False)
            folder.mkdir()
            shutil.copy(staging / LOG, folder / LOG)
            self._bound_quarantine()
        return folder / LOG

    def _trash(self, path: Path) -> None:
        trash = self.root / VERSION / "trash" / f"{time.time_ns()}.{path.name}"
        atomic.make_directory(trash.parent, 0o700, fsync=False)
        _move(path, trash)

    def _quarantine_path(self, name: str) -> Path:
        return self.root / VERSION / "bad" / f"{time.time_ns()}.{name}"

    def _bound_quarantine(self) -> None:
        bad = self.root / VERSION / "bad"
        names = [name for name in layout.names(bad) if layout.set_aside_at(name) is not None]
        for name in names[:-QUARANTINED] if layout.is_tagged(self.root) else ():
            atomic.delete(bad / name)

    def _quarantine(self, path: Path) -> None:
        """Move a damaged entry, or a file in the place of a cache directory, into quarantine."""
        if not layout.is_tagged(self.root) and not layout.is_entry(path):
            return  # the file may belong to the user
        with contextlib.suppress(OSError):
            bad = self._quarantine_path(path.name)
            if path.name == VERSION:  # the quarantine is inside this directory: move it beside
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
                "point JITKERN_CACHE_DIR at a directory of its own, e.g. %s/jitkern",
                self.root,
                self.root,
            )

    def _make_own(self, path: Path) -> None:
        """Make a cache directory; a file or link in its place is quarantined."""
        try:
            atomic.make_directory(path, 0o755, fsync=self.fsync)
        except FileExistsError:
            self._quarantine(path)
            atomic.make_directory(path, 0o755, fsync=self.fsync)
        if self._own.owners and not self._own.vouched:
            status = path.stat()
            if status.st_mode & 0o022 and status.st_uid in self._own.owners:
                path.chmod(0o755)  # lookups refuse directories that others can write

    def _sweep(self, now: float) -> None:
        """Remove the staging of builders that were killed long ago.

        now: Unix time by the clock of the file system, which may differ from that of this process.
        """
        if not layout.is_tagged(self.root):
            return
        self.purge()
        staged = self.root / VERSION / "tmp"
        for path in (staged / name for name in layout.names(staged) if layout.is_staged(name)):
            with contextlib.suppress(OSError):
                if now - path.lstat().st_mtime > STALE_STAGING:
                    self._trash(path)  # not deleted: if the clock jumped, its builder may live

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
    """Move a file or directory of the user root; delete it, manifest first, if it cannot be moved.

    In a container, overlayfs refuses with EXDEV to rename a directory of the image. Raises OSError.
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


def reason_of(e: OSError) -> str:
    """Return why the system refused a write, and what the user can do."""
    if e.errno in _REASONS:
        return _REASONS[e.errno]
    if e.errno in (errno.ENOTDIR, errno.EEXIST):
        what = "a link to no directory" if Path(e.filename or "").is_symlink() else "a file"
        return f"{e.filename} is {what}; remove it, or point JITKERN_CACHE_DIR at a directory"
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
