"""Entries on disk: found, published, listed and removed. Knows no compiler and no Torch.

    <root>/CACHEDIR.TAG
    <root>/v1/<target>/<op>[.<variant>]-<digest>/{manifest.json, compile.log, artifacts}
    <root>/v1/tmp/<uuid>/      staging, on the same file system
    <root>/v1/bad/             quarantine

An entry is built in private staging, synced, and published by one rename; it is never edited.
Reading takes no lock; whatever is odd about an entry makes it a miss. The user root is looked up
first, then the read-only layers, where nothing is ever written.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jitkern import trust
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.key import Key
from jitkern.manifest import MAX_BYTES, NAME, Artifact, Manifest

VERSION = "v1"
TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This directory is a cache of jitkern: it may be deleted at any time.\n"
)
STALE_STAGING = 86400.0  # seconds after which a killed builder's staging is swept
QUARANTINED = 20  # entries kept for a look at what went wrong
_NOT_ENTRIES = ("tmp", "bad")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One published directory."""

    path: Path
    manifest: Manifest

    def read(self, name: str) -> bytes:
        """The bytes of an artifact, verified.

        Raises ValueError where they are not what was published.
        """
        return _read_verified(self.path / name, self.manifest.artifacts[name])


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
        for root in (self.root, *self.layers):
            path = root / VERSION / key.target / key.name
            try:
                return self._check(path, key.digest, root)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError) as e:
                _log.warning("%s is damaged (%s); compiling it again", path, e)
                if root == self.root:
                    self._quarantine(path)
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
            manifest = replace(
                manifest,
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
        except (
            OSError
        ):  # the winner exists but cannot be seen yet (NFS caches lookups): use our own copy
            final = private_root() / final.name
            shutil.copytree(staging, final, dirs_exist_ok=True)
        return Entry(final, manifest)

    def replace(self, entry: Entry) -> None:
        """Move an entry aside so that the next publish takes its place. Raises CacheError."""
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
        for root in (self.root, *self.layers):
            for path in sorted((root / VERSION).glob("*/*")):
                if path.parent.name in _NOT_ENTRIES or not path.is_dir():
                    continue
                try:
                    yield path, self._check(path, None, root)
                except (OSError, ValueError) as e:
                    yield path, ValueError(str(e))

    def _check(self, path: Path, digest: str | None, root: Path) -> Entry:
        owners = {os.geteuid()} if hasattr(os, "geteuid") else set()
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError("it is not a directory")
        if root != self.root:
            owners |= {0}
            reason = trust.distrust_layer(root)
            if reason:
                raise ValueError(reason)
        reason = trust.distrust_entry(status, owners) if owners else ""
        if reason:
            raise ValueError(f"it {reason}")
        try:
            manifest = Manifest.decode(_read_file(path / NAME, MAX_BYTES, owners))
        except FileNotFoundError as e:
            raise ValueError("it has no manifest") from e
        recomputed = manifest.digest
        if path.name.rpartition("-")[2] != recomputed[:16] or digest not in (None, recomputed):
            raise ValueError("its manifest belongs to another entry")
        for name, artifact in manifest.artifacts.items():
            self._check_artifact(path / name, artifact)
        return Entry(path, manifest)

    def _check_artifact(self, path: Path, artifact: Artifact) -> None:
        try:
            if self.verify == "always":
                _read_verified(path, artifact)
            elif path.lstat().st_size != artifact.size:
                raise ValueError(f"{path.name} has the wrong size")
        except FileNotFoundError as e:
            raise ValueError(f"{path.name} is missing") from e

    def _quarantine(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            bad = self.root / VERSION / "bad"
            bad.mkdir(mode=0o700, exist_ok=True)
            path.rename(bad / f"{time.time_ns()}.{path.name}")
            for old in sorted(bad.iterdir())[:-QUARANTINED]:
                shutil.rmtree(old, ignore_errors=True)

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
            raise CacheError(
                f"the cache {self.root} cannot be written: {_reason(e)}",
                path=str(self.root),
                errno=e.errno,
            ) from e


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


def _read_file(path: Path, limit: int, owners: set[int] | None = None) -> bytes:
    """The bytes of a regular file of at most `limit` bytes, links not followed."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise ValueError(f"{path.name} is not a regular file of at most {limit} bytes")
        reason = trust.distrust_entry(status, owners) if owners else ""
        if reason:
            raise ValueError(f"{path.name} {reason}")
        return file.read(limit)


def _read_verified(path: Path, artifact: Artifact) -> bytes:
    data = _read_file(path, artifact.size)
    if len(data) != artifact.size or hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise ValueError(f"{path.name} is not what was published")
    return data
