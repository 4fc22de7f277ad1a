"""Checks of a cache: one check for each thing that a cache needs of the machine.

The checks repair nothing and leave no files; they do not make a missing cache.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import mmap
import os
import re
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from jitkern.cache import VERSION, eviction, lock
from jitkern.cache.manifest import LOG, NAME
from jitkern.cache.root import STALE_STAGING
from jitkern.cache.store import Cache
from jitkern.cache_tools.check import (
    ELSEWHERE,
    Check,
    counted,
    existing,
    failure,
    fine,
    human_bytes,
    warning,
)
from jitkern.config import Config
from jitkern.files import trust

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
))  # fmt: skip
LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs",))  # the root of a container without privileges
LEAST_FREE = 1 << 30  # bytes
LEAST_INODES = 1000
SLOW_SYNC = 0.1  # seconds
PRUNE = "jitkern cache prune, or point JITKERN_CACHE_DIR at a larger disk"


def health(settings: Config) -> list[Check]:
    """Check the user root, its file system and locks, and the layers.

    Raises nothing: an exception becomes a failed check with its reason.
    """
    checks = [_run(name, "", check, settings) for name, check in LOOKS.items()]
    checks[0] = replace(checks[0], origin=settings.cache_dir_origin)
    origin = settings.origins.get("system_cache", "")
    layers = [(root, origin) for root in settings.system_cache]
    with contextlib.suppress(OSError):
        layers += [(root, "installed") for root in trust.installed_layers()]
    return checks + [_run("layer", origin, _layer, settings, root) for root, origin in layers]


def _run(name: str, origin: str, check: Callable[..., Check], *arguments: object) -> Check:
    try:
        result = check(*arguments)
    except Exception as e:  # noqa: BLE001  on a broken machine any check may fail
        result = failure(f"cannot be examined: {e}", ELSEWHERE)
    return replace(result, name=name, origin=origin)


def _root(settings: Config) -> Check:
    root = settings.cache_dir
    nearest = existing(root)
    if not nearest.is_dir():
        return failure(f"{nearest} is not a directory", f"remove it, or {ELSEWHERE}")
    reason = trust.why_untrusted_root(root, settings.trusted)
    if reason:
        mode_alone = reason.startswith(f"{root} is writable")
        return failure(reason, f"chmod 700 {root}" if mode_alone else ELSEWHERE)
    return fine(str(root) if nearest == root else f"{root}, which does not exist yet")


def _owners(settings: Config) -> Check:
    root = settings.cache_dir
    if root in settings.trusted:
        return fine("not checked: the settings trust this root")
    by_group, others = [], []
    for parent in (p for p in root.resolve().parents if p.exists()):
        status = parent.stat()
        open_to = status.st_mode if not status.st_mode & stat.S_ISVTX else 0
        if open_to & stat.S_IWOTH:
            value = f"{parent} is writable by every user, who could put another cache there"
            return failure(value, f"chmod o-w {parent}, or {ELSEWHERE}")
        if open_to & stat.S_IWGRP:
            by_group.append(str(parent))
        if status.st_uid not in (0, os.geteuid()):
            others.append(f"{parent} belongs to user {status.st_uid}")
    if others:
        return warning(f"{', '.join(others)}, who could put another cache there", ELSEWHERE)
    if by_group:
        value = f"{', '.join(by_group)}: its group could put another cache there"
        return warning(value, f"chmod g-w {' '.join(by_group)}")
    return fine("nobody else could put another cache there")


def file_system(path: Path, mountinfo: str) -> str:
    """Return the kind of file system of an absolute path, by the text of /proc/self/mountinfo."""
    longest, kind = 0, "unknown"
    for line in mountinfo.split("\n"):
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
        if len(point) >= longest and path.is_relative_to(point):  # a later mount hides an earlier
            longest, kind = len(point), source.split(" ")[0]
    return kind


@contextlib.contextmanager
def _probe(settings: Config) -> Iterator[Path]:
    """Yield a new directory in the cache, and remove it afterwards.

    Raises OSError, whose strerror says why, where no cache exists that may be written.
    """
    root = settings.cache_dir
    if not root.is_dir():
        raise OSError(errno.ENOENT, "the cache does not exist yet")
    if trust.why_untrusted_root(root, settings.trusted):
        raise OSError(errno.EPERM, "the cache is not trusted, so nothing was tried in it")
    place = next(p for p in (root / VERSION / "tmp", root / VERSION, root) if p.is_dir())
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
        yield Path(folder)


def _writable(settings: Config) -> Check:
    """Check that entries can be published."""
    root = settings.cache_dir
    nearest = existing(root)
    remedy = f"make it writable, or {ELSEWHERE} and JITKERN_SYSTEM_CACHE at a read-only one"
    if nearest != root:
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return fine(f"the cache can be made in {nearest}")
        return failure(f"the cache cannot be made in {nearest}", remedy)
    try:
        with _probe(settings) as folder:
            with (folder / "probe").open("wb") as file:
                file.write(b"probe")
                file.flush()
                os.fsync(file.fileno())
            (folder / "probe").rename(folder / "renamed")
    except OSError as e:
        return failure(f"{root} cannot be written: {e.strerror}", remedy)
    return fine("a file was written, synced and renamed in the cache")


def _executable(settings: Config) -> Check:
    """Check that code can be loaded from the cache, which a noexec mount prevents."""
    try:
        with _probe(settings) as folder, (folder / "probe").open("w+b") as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            code = mmap.PROT_READ | mmap.PROT_EXEC
            try:
                mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=code).close()
                reason = ""
            except OSError as e:
                reason = f"{e.strerror}, as on a noexec mount"
    except OSError:  # no probe is possible: read the flags of the mount
        flags = os.statvfs(existing(settings.cache_dir)).f_flag
        reason = "it is mounted noexec" if flags & os.ST_NOEXEC else ""
    if reason:
        remedy = f"{ELSEWHERE} that is not mounted noexec, or `mount -o remount,exec`"
        return failure(f"no kernel can be loaded from the cache: {reason}", remedy)
    return fine("code can be loaded from the cache")


def _kind(settings: Config) -> Check:
    """Check that the file system is a local one."""
    try:
        mountinfo = MOUNTS.read_text(errors="surrogateescape")
    except OSError as e:
        return fine(f"unknown: {e}")
    kind = file_system(existing(settings.cache_dir).resolve(), mountinfo)
    if kind in NETWORK or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        value = f"{kind}, a network file system: locks are node-local, and reads may be stale"
        layer = f"JITKERN_SYSTEM_CACHE={settings.cache_dir}"
        return warning(value, f"JITKERN_CACHE_DIR on a local disk, and {layer} to read this cache")
    return fine(kind)


def _sync_time(settings: Config) -> Check:
    """Check how long a sync of a file takes."""
    note = "" if settings.fsync else "; jitkern does not sync, since JITKERN_FSYNC is 0"
    try:
        with _probe(settings) as folder:
            seconds = _seconds_to_sync(folder / "probe")
    except OSError as e:
        return fine(f"not measured: {e.strerror}{note}")
    value = f"{seconds * 1e3:.1f} ms for 64 KiB{note}"
    if seconds > SLOW_SYNC and settings.fsync:
        return warning(value, "JITKERN_CACHE_DIR on a local disk, or JITKERN_FSYNC=0")
    return fine(value)


def _seconds_to_sync(path: Path) -> float:
    """Return the median of five measured times, or of as many as fit into a second."""
    times: list[float] = []
    with path.open("wb", buffering=0) as file:
        while len(times) < 5 and sum(times) < 1:
            file.write(bytes(64 << 10))
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _space(settings: Config) -> Check:
    """Check that the disk has room for the cache."""
    status = os.statvfs(existing(settings.cache_dir))
    free = status.f_bavail * status.f_frsize
    counted = status.f_files > 0  # btrfs, for example, does not count inodes
    value = f"{human_bytes(free)} free" + (f", {status.f_favail} inodes" if counted else "")
    if free < LEAST_FREE or (counted and status.f_favail < LEAST_INODES):
        return failure(f"{value}: too little to build in", PRUNE)
    return fine(value)


def _locks(settings: Config) -> Check:
    remedy = "point XDG_RUNTIME_DIR or TMPDIR at a local directory that only you can write"
    twice = "processes may compile the same kernel twice"
    try:
        directory = lock.lock_directory(settings)
        if directory is None:
            return warning(f"no directory for locks: {twice}", remedy)
        if _excludes(directory):
            return fine(f"one process at a time, in {directory}")
        return warning(f"locks in {directory} do not exclude other processes: {twice}", remedy)
    except OSError as e:
        return warning(f"locks are unavailable ({e}): {twice}", remedy)


def _excludes(directory: Path) -> bool:
    """Return whether a lock excludes who opens its file again, as another process would."""
    import fcntl  # not on Windows

    with tempfile.NamedTemporaryFile(prefix="doctor-", dir=directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(file.name) as again:
            try:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _size(settings: Config) -> Check:
    size = sum(use.bytes for use in eviction.uses(Cache(settings.cache_dir)))
    limit = settings.max_size
    value = human_bytes(size)
    value += f" of {human_bytes(limit)}" if limit else ", without a limit"
    return warning(f"{value}: over the limit", PRUNE) if 0 < limit < size else fine(value)


def _leftovers(settings: Config) -> Check:
    version = settings.cache_dir / VERSION
    now = time.time()
    builds = sum(now - path.lstat().st_mtime > STALE_STAGING for path in _inside(version / "tmp"))
    bad = _inside(version / "bad")
    damaged = [path for path in bad if (path / NAME).exists() or not (path / LOG).exists()]
    value = f"{counted(builds, 'unfinished build')}, {counted(len(damaged), 'damaged entry')}, "
    value += f"{counted(len(bad) - len(damaged), 'log')} of failed compiles"
    value += f", {len(_inside(version / 'trash'))} in the trash"
    if damaged:
        return warning(value, f"look into {version / 'bad'}, and delete it")
    return warning(value, "the next compile deletes them") if builds else fine(value)


def _signatures(settings: Config) -> Check:
    value = f"{len(settings.trusted_keys)} trusted keys"
    wanted = settings.trusted_keys or settings.signed
    if wanted and not importlib.util.find_spec("cryptography"):
        value += ", but the package `cryptography`, which checks signatures, is missing"
        return failure(value, 'pip install "jitkern[sign]"')
    return fine(value)


def _layer(settings: Config, root: Path) -> Check:
    """Check that a read-only layer is used; a layer that the settings do not name may be unused."""
    problem = failure if root in settings.system_cache else warning
    if not root.is_dir():
        remedy = "make it, or remove it from JITKERN_SYSTEM_CACHE"
        return problem(f"{root} is not a directory", remedy)
    layer = trust.layer_of(root, trust.Trust.of(settings))
    if isinstance(layer, str):
        remedy = "fix its owner and mode, or name it under `trusted` in a settings file"
        return problem(f"not used: {layer}", remedy)
    count = sum(1 for _ in Cache(settings.cache_dir).paths(root))
    return fine(
        f"{root}, {counted(count, 'entry')}" + (", signed entries only" if layer.keys else "")
    )


def _inside(directory: Path) -> list[Path]:
    """Return the paths in a directory; none if it is missing."""
    return list(directory.iterdir()) if directory.is_dir() else []


LOOKS: dict[str, Callable[[Config], Check]] = {
    "cache": _root, "cache owners": _owners, "cache writable": _writable,
    "cache executable": _executable, "cache file system": _kind, "cache locks": _locks,
    "cache sync": _sync_time, "cache space": _space, "cache size": _size,
    "cache leftovers": _leftovers, "signatures": _signatures,
}  # fmt: skip
