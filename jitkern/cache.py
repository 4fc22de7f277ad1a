"""Entries on disk: found, published, listed and removed. Knows no compiler and no Torch.

    <root>/CACHEDIR.TAG
    <root>/v1/<target>/<op>[.<variant>]-<digest>/{manifest.json, compile.log, artifacts}
    <root>/v1/tmp/<uuid>/      staging, on the same file system
    <root>/v1/bad/             quarantine, and the logs of failed builds

An entry is built in private staging, synced, and published by one rename; it is never edited.
Reading takes no lock; whatever is odd about an entry makes it a miss. The user root is looked up
first, then the read-only layers, where nothing is ever written.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from jitkern import trust
from jitkern.config import Config
from jitkern.entry import Damaged, Entry, read_entry
from jitkern.errors import CacheError, UntrustedCache
from jitkern.key import Key
from jitkern.manifest import LOG, NAME, Artifact, Manifest

__all__ = ["VERSION", "Cache", "Entry", "private_root"]

VERSION = "v1"
TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This directory is a cache of jitkern: it may be deleted at any time.\n"
)
STALE_STAGING = 86400.0  # seconds after which a killed builder's staging is swept
QUARANTINED = 20  # entries kept for a look at what went wrong
_NOT_ENTRIES = ("tmp", "bad")
_log = logging.getLogger(__name__)


class Cache:
    """A user root that is written to, and read-only layers below it."""

    def __init__(
        self,
        root: Path,
        layers: tuple[Path, ...] = (),
        *,
        verify: str = "always",
        fsync: bool = True,
    ) -> None:
        self.root = root
        self.layers = layers
        self.verify = verify
        self.fsync = fsync
        self._distrusted: set[Path] = set()

    @classmethod
    def open(cls, config: Config) -> Cache:
        """The cache that the settings name.

        Raises UntrustedCache if others could have written the root.
        """
        reason = trust.distrust_root(config.cache_dir)
        if reason:
            raise UntrustedCache(
                f"the cache {config.cache_dir} is not trusted: {reason}. "
                "Native code is loaded from it, so mend its owner and mode (`chmod 700`), "
                "or point JITKERN_CACHE_DIR at a directory of your own",
                path=str(config.cache_dir),
            )
        return cls(config.cache_dir, config.system_cache, verify=config.verify, fsync=config.fsync)

    def find(self, key: Key) -> Entry | None:
        """The entry of `key`, whole and verified, or None."""
        for root in self._trusted_roots():
            path = root / VERSION / key.target / key.name
            try:
                entry = self._read(path, root)
                if entry.manifest.digest == key.digest:
                    return entry
                _log.warning("%s is of another key with the same short name", path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Damaged as e:
                _log.warning("%s is damaged (%s); compiling it again", path, e)
                if root == self.root and e.current:
                    self._quarantine(path)
            except OSError as e:
                _log.warning("%s could not be read (%s)", path, e)
        return None

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory to build in; whatever is left in it afterwards is removed.

        Raises CacheError.
        """
        with self._writing():
            self._create_root()
            self._sweep()
            path = self.root / VERSION / "tmp" / uuid.uuid4().hex
            path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def publish(self, key: Key, staging: Path, manifest: Manifest) -> Entry:
        """Make the files of `staging` the entry of `key` by one rename.

        The manifest is completed with their hashes. If another process published first, its entry
        is returned. Raises CacheError.
        """
        with self._writing():
            files = sorted(path for path in staging.iterdir() if path.is_file())
            for path in set(staging.iterdir()).difference(files):
                shutil.rmtree(path)
            manifest = manifest._replace(
                artifacts={
                    p.name: Artifact.of(p.read_bytes()) for p in files if p.suffix != ".log"
                },
            )
            (staging / NAME).write_bytes(manifest.encode())
            for path in (*files, staging / NAME):
                path.chmod(0o644)
                self._sync(path)
            staging.chmod(0o755)
            self._sync(staging)
            final = self.root / VERSION / key.target / key.name
            final.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            try:
                staging.rename(final)
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return self.find(key) or self._after_losing(staging, final, manifest)
            self._sync(final.parent)
        return Entry(final, manifest)

    def _after_losing(self, staging: Path, final: Path, manifest: Manifest) -> Entry:
        try:
            staging.rename(final)  # what stood there was damaged, and is in quarantine now
        except OSError:
            # The winner exists but cannot be seen yet (NFS caches lookups): use our own copy.
            final = private_root() / final.name
            shutil.copytree(staging, final, dirs_exist_ok=True)
        return Entry(final, manifest)

    def replace(self, entry: Entry) -> None:
        """Move an entry of the user root aside, for the next publish to take its place.

        Raises CacheError.
        """
        if not entry.path.is_relative_to(self.root):
            return  # a read-only layer: ours goes above it
        with self._writing():
            trash = self.root / VERSION / "tmp" / uuid.uuid4().hex
            trash.parent.mkdir(parents=True, exist_ok=True)
            entry.path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)

    def quarantine(self, entry: Entry) -> None:
        """Put an entry that would not load out of the way, if it lies in the user root."""
        if entry.path.is_relative_to(self.root):
            self._quarantine(entry.path)

    def entries(self) -> Iterator[tuple[Path, Entry | ValueError]]:
        """(path, entry or what is wrong with it) of all in the user root and layers, in order."""
        for root in self._trusted_roots():
            for path in sorted((root / VERSION).glob("*/*")):
                if path.parent.name in _NOT_ENTRIES or not path.is_dir():
                    continue
                try:
                    yield path, self._read(path, root)
                except (OSError, ValueError) as e:
                    yield path, ValueError(str(e))

    def write_error(self, e: OSError) -> CacheError:
        """The error for a write that failed: why, and what to do."""
        return CacheError(
            f"the cache {self.root} cannot be written: {_reason(e)}",
            path=str(self.root),
            errno=e.errno,
        )

    def keep_log(self, key: Key, staging: Path) -> Path:
        """Keep the log of a build that failed, beside the damaged entries; returns its path."""
        kept = self._bad(key.name)
        with contextlib.suppress(OSError):
            kept.mkdir(parents=True)
            shutil.copy(staging / LOG, kept / LOG)
            self._bound_quarantine()
        return kept / LOG

    def _bad(self, name: str) -> Path:
        return self.root / VERSION / "bad" / f"{time.time_ns()}.{name}"

    def _bound_quarantine(self) -> None:
        for old in sorted((self.root / VERSION / "bad").iterdir())[:-QUARANTINED]:
            shutil.rmtree(old, ignore_errors=True)

    def _trusted_roots(self) -> list[Path]:
        """The user root, and the layers that nobody else could have written."""
        roots = [self.root]
        for layer in self.layers:
            reason = trust.distrust_layer(layer) if layer.is_dir() else ""
            if not reason:
                roots.append(layer)
            elif layer not in self._distrusted:
                self._distrusted.add(layer)
                _log.warning("the read-only cache %s is not used: %s", layer, reason)
        return roots

    def _read(self, path: Path, root: Path) -> Entry:
        owners = {os.geteuid()} if hasattr(os, "geteuid") else set()
        if root != self.root:
            owners |= {0}
        while True:
            try:
                return read_entry(path, owners, verify=self.verify)
            except Damaged as e:
                if e.current:
                    raise  # else it was replaced while it was read: look again

    def _quarantine(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            bad = self._bad(path.name)
            bad.parent.mkdir(mode=0o700, exist_ok=True)
            path.rename(bad)
            self._bound_quarantine()

    def _create_root(self) -> None:
        if not self.root.is_dir():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
        tmp = self.root / VERSION / "tmp"
        if not tmp.is_dir():
            tmp.mkdir(parents=True, exist_ok=True)
            (self.root / "CACHEDIR.TAG").write_text(TAG)

    def _sweep(self) -> None:
        with contextlib.suppress(OSError):
            for path in (self.root / VERSION / "tmp").iterdir():
                if time.time() - path.stat().st_mtime > STALE_STAGING:
                    shutil.rmtree(path, ignore_errors=True)

    def _sync(self, path: Path) -> None:
        if self.fsync:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise self.write_error(e) from e


@functools.cache
def private_root() -> Path:
    """A temporary root of this process alone, removed at its end: where no other is writable."""
    path = Path(tempfile.mkdtemp(prefix="jitkern-"))
    owner = os.getpid()
    atexit.register(
        lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None
    )
    return path


def _reason(e: OSError) -> str:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space is left; free some, or point JITKERN_CACHE_DIR elsewhere"
    if e.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{e.filename} is a file; remove it, or point JITKERN_CACHE_DIR at a directory"
    return f"{e.strerror}; make it writable, or point JITKERN_CACHE_DIR at a directory that is"
