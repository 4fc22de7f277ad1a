"""Checks of the disk of a cache: write access, sync, space, and whether code can be loaded."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jitkern.cache import VERSION
from jitkern.cache_tools.check import (
    ELSEWHERE,
    Check,
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


def writable(settings: Config) -> Check:
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


def executable(settings: Config) -> Check:
    """Check that code can be loaded from the cache, which a noexec mount prevents."""
    try:
        with _probe(settings) as folder, (folder / "probe").open("w+b") as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            reason = _no_mapping(file.fileno())
    except OSError:  # no probe is possible: read the flags of the mount
        flags = os.statvfs(existing(settings.cache_dir)).f_flag
        reason = "it is mounted noexec" if flags & os.ST_NOEXEC else ""
    if reason:
        remedy = f"{ELSEWHERE} that is not mounted noexec, or `mount -o remount,exec`"
        return failure(f"no kernel can be loaded from the cache: {reason}", remedy)
    return fine("code can be loaded from the cache")


def _no_mapping(descriptor: int) -> str:
    """Return the reason why a file cannot be mapped as code, or ""."""
    try:
        mmap.mmap(
            descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC
        ).close()
    except OSError as e:
        return f"{e.strerror}, as on a noexec mount"
    return ""


def kind(settings: Config) -> Check:
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


def sync_time(settings: Config) -> Check:
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


def space(settings: Config) -> Check:
    """Check that the disk has room for the cache."""
    status = os.statvfs(existing(settings.cache_dir))
    free = status.f_bavail * status.f_frsize
    counted = status.f_files > 0  # btrfs, for example, does not count inodes
    value = f"{human_bytes(free)} free" + (f", {status.f_favail} inodes" if counted else "")
    if free < LEAST_FREE or (counted and status.f_favail < LEAST_INODES):
        return failure(f"{value}: too little to build in", PRUNE)
    return fine(value)
