"""Checks of a cache: one row for each thing that a cache needs of the machine.

The checks repair nothing and leave no files; they do not make a missing cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jitkern.cache import VERSION, eviction, lock
from jitkern.cache.store import Cache
from jitkern.cache_tools.check import ELSEWHERE, Look, Problem, counted, existing, human_bytes
from jitkern.config import Config
from jitkern.files import trust

NETWORK = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
))  # fmt: skip
LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs",))  # the root of a container without privileges
LEAST_FREE = 1 << 30  # bytes
LEAST_INODES = 1000


def table(now: Config) -> list[Look]:
    """Return the checks of the user root, its file system and locks, and the layers."""
    prune = "jitkern cache prune, or point JITKERN_CACHE_DIR at a larger disk"
    layer = "fix its owner and mode, or name it under `trusted` in a settings file"
    read_only = f"make it writable, or {ELSEWHERE} and JITKERN_SYSTEM_CACHE at a read-only one"
    locks = "point XDG_RUNTIME_DIR or TMPDIR at a local directory that only you can write"
    executable = f"{ELSEWHERE} that is not mounted noexec, or `mount -o remount,exec`"
    local = "point JITKERN_CACHE_DIR at a local disk"
    to_read = f"{local}, and JITKERN_SYSTEM_CACHE={now.cache_dir} to read this cache"
    origin = now.origins.get("system_cache", "")
    layers = [(root, origin) for root in now.system_cache]
    with contextlib.suppress(OSError):
        layers += [(root, "installed") for root in trust.installed_layers()]
    return [
        Look("cache", partial(_root, now), ELSEWHERE, origin=now.cache_dir_origin),
        Look("cache owners", partial(_owners, now), ELSEWHERE),
        Look("cache writable", partial(_writable, now), read_only),
        Look("cache executable", partial(_executable, now), executable),
        Look("cache file system", partial(_kind, now), to_read),
        Look("cache locks", partial(_locks, now), locks),
        Look("cache space", partial(_space, now), prune),
        Look("cache size", partial(_size, now), prune),
        *(Look("layer", partial(_layer, now, root), layer, origin=at) for root, at in layers),
    ]  # fmt: skip


def _root(now: Config) -> str:
    root = now.cache_dir
    nearest = existing(root)
    if not nearest.is_dir():
        raise Problem(f"{nearest} is not a directory", f"remove it, or {ELSEWHERE}")
    if reason := trust.why_untrusted_root(root, now.trusted):
        by_mode = reason.startswith(f"{root} is writable")
        raise Problem(reason, f"chmod 700 {root}" if by_mode else "")
    return str(root) if nearest == root else f"{root}, which does not exist yet"


def _owners(now: Config) -> str:
    if now.cache_dir in now.trusted:
        return "not checked: the settings trust this root"
    by_group, others = [], []
    for parent in (p for p in now.cache_dir.resolve().parents if p.exists()):
        status = parent.stat()
        open_to = status.st_mode if not status.st_mode & stat.S_ISVTX else 0
        if open_to & stat.S_IWOTH:
            value = f"{parent} is writable by every user, who could put another cache there"
            raise Problem(value, f"chmod o-w {parent}, or {ELSEWHERE}")
        if open_to & stat.S_IWGRP:
            by_group.append(str(parent))
        if status.st_uid not in (0, os.geteuid()):
            others.append(f"{parent} belongs to user {status.st_uid}")
    if others:
        raise Problem(f"{', '.join(others)}, who could put another cache there", ok=True)
    if by_group:
        value = f"{', '.join(by_group)}: its group could put another cache there"
        raise Problem(value, f"chmod g-w {' '.join(by_group)}", ok=True)
    return "nobody else could put another cache there"


@contextlib.contextmanager
def _probe(now: Config) -> Iterator[Path]:
    """Yield a new file of 64 KiB in a new directory of the cache, and remove both afterwards.

    Raises OSError, whose strerror says why, where no cache exists that may be written.
    """
    root = now.cache_dir
    if not root.is_dir():
        raise OSError(errno.ENOENT, "the cache does not exist yet")
    if trust.why_untrusted_root(root, now.trusted):
        raise OSError(errno.EPERM, "the cache is not trusted, so nothing was tried in it")
    place = next(p for p in (root / VERSION / "tmp", root / VERSION, root) if p.is_dir())
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
        (Path(folder) / "probe").write_bytes(bytes(64 << 10))
        yield Path(folder) / "probe"


def _writable(now: Config) -> str:
    """Check that entries can be published."""
    nearest = existing(now.cache_dir)
    if nearest != now.cache_dir:
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return f"the cache can be made in {nearest}"
        raise Problem(f"the cache cannot be made in {nearest}")
    try:
        with _probe(now) as file:
            file.rename(file.with_name("renamed"))
    except OSError as e:
        raise Problem(f"{now.cache_dir} cannot be written: {e.strerror}") from e
    return "a file was written and renamed in the cache"


def _executable(now: Config) -> str:
    """Check that code can be loaded from the cache, which a noexec mount prevents."""
    try:
        with _probe(now) as path, path.open("r+b") as file:
            code = mmap.PROT_READ | mmap.PROT_EXEC
            with contextlib.suppress(PermissionError):
                mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=code).close()
                return "code can be loaded from the cache"
    except OSError:  # no probe is possible: read the flags of the mount
        if not os.statvfs(existing(now.cache_dir)).f_flag & os.ST_NOEXEC:
            return "code can be loaded from its file system"
    raise Problem("no kernel can be loaded from the cache, as on a noexec mount")


def _kind(now: Config) -> str:
    """Check that the file system is a local one, as `df` of the coreutils names it."""
    command = ["df", "--output=fstype", str(existing(now.cache_dir))]
    try:
        kind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[
            -1
        ]
    except (OSError, subprocess.CalledProcessError) as e:
        return f"unknown: {e}"
    if kind in NETWORK or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        value = f"{kind}, a network file system: locks are node-local, and reads may be stale"
        raise Problem(value, ok=True)
    return kind


def _space(now: Config) -> str:
    """Check that the disk has room for the cache."""
    status = os.statvfs(existing(now.cache_dir))
    free = status.f_bavail * status.f_frsize
    counts = status.f_files > 0  # btrfs, for example, does not count inodes
    value = f"{human_bytes(free)} free" + (f", {status.f_favail} inodes" if counts else "")
    if free < LEAST_FREE or (counts and status.f_favail < LEAST_INODES):
        raise Problem(f"{value}: too little to build in")
    return value


def _locks(now: Config) -> str:
    """Check that a lock excludes who opens its file again, as another process would."""
    import fcntl  # not on Windows

    twice = "processes may compile the same kernel twice"
    directory = lock.lock_directory(now)
    if directory is None:
        raise Problem(f"no directory for locks: {twice}", ok=True)
    try:
        with (
            tempfile.NamedTemporaryFile(prefix="doctor-", dir=directory) as file,
            open(file.name) as again,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                value = f"locks in {directory} do not exclude other processes: {twice}"
                raise Problem(value, ok=True)
    except OSError as e:
        raise Problem(f"locks are unavailable ({e}): {twice}", ok=True) from e
    return f"one process at a time, in {directory}"


def _size(now: Config) -> str:
    size = sum(use.bytes for use in eviction.uses(Cache(now.cache_dir)))
    limit = now.max_size
    value = human_bytes(size) + (f" of {human_bytes(limit)}" if limit else ", without a limit")
    if 0 < limit < size:
        raise Problem(f"{value}: over the limit", ok=True)
    return value


def _layer(now: Config, root: Path) -> str:
    """Check that a read-only layer is used; a layer that the settings do not name may be unused."""
    named = root in now.system_cache
    if not root.is_dir():
        remedy = "make it, or remove it from JITKERN_SYSTEM_CACHE"
        raise Problem(f"{root} is not a directory", remedy, ok=not named)
    layer = trust.layer_of(root, trust.Trust.of(now))
    if isinstance(layer, str):
        raise Problem(f"not used: {layer}", ok=not named)
    count = sum(1 for _ in Cache(now.cache_dir).paths(root))
    return f"{root}, {counted(count, 'entry')}" + (", signed entries only" if layer.keys else "")
