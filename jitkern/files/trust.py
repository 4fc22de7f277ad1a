"""Check that only trusted users could have written a directory of native code.

Checksums find accidents; ownership and signatures find other users. A process of the same user is
out of scope. Files are opened relative to an open directory, without following links, and their
owner and mode are those of the open descriptor: nobody can exchange a file after its check.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from jitkern.named_tuple import NamedTuple

if TYPE_CHECKING:
    from jitkern.config import Config

MAX_LINKS = 40  # of a path; Linux refuses one with more
TOUCH = 3600.0  # seconds between two notes that a file was used
DESCRIPTORS = "/proc/self/fd"
INSTALLED = "jitkern_layers"  # folder beside installed packages: one read-only layer for each wheel

_returned_paths: set[str] = set()  # by `path_in`


class Trust(NamedTuple):
    """The trust rules in the settings files (see config.Config)."""

    roots: tuple[Path, ...] = ()
    keys: tuple[str, ...] = ()
    signed: tuple[Path, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Trust:
        """Return the trust rules of the settings."""
        return cls(config.trusted, config.trusted_keys, config.signed)


class Layer(NamedTuple):
    """A root of the cache, and the conditions that its entries must meet.

    owners: users who may own entries that nobody else can write; None: any, the place is trusted.
    keys: public keys, one of which must have signed each entry; empty if no signature is needed.
    own: whether this is the user root, which this process writes to.
    vouched: whether the settings allow other users to write its directories.
    """

    root: Path
    owners: frozenset[int] | None
    keys: tuple[str, ...] = ()
    own: bool = False
    vouched: bool = False

    @property
    def in_place(self) -> bool:
        """Return whether entries are used in place: nobody can change them after a check."""
        return self.owners is not None or not self.keys


def user_layer(root: Path, trusted: tuple[Path, ...] = ()) -> Layer:
    """Return the layer of the user root."""
    return Layer(root, frozenset({os.geteuid()}), own=True, vouched=root in trusted)


def layer_of(root: Path, trust: Trust) -> Layer | str:
    """Return the read-only layer at `root`, or the reason why it must not be used.

    The first rule that fits decides: the settings demand signed entries for the root; they trust
    the root, or it is part of this Python installation; it belongs to this user or to the user root
    and nobody else can write it; its entries carry a trusted signature.
    """
    if not os.access(root, os.R_OK | os.X_OK):
        return f"{root} cannot be read by this user: run `chmod -R a+rX {root}`"
    reason = distrust_root_of_layer(root)
    owners = frozenset({os.geteuid(), 0})
    vouched = root in trust.roots or _is_installed(root)
    if root in trust.signed:
        if not trust.keys:
            return f"{root} is listed under `signed`, but the settings name no `trusted_keys`"
        return Layer(root, None if vouched or reason else owners, trust.keys)
    if vouched:
        return Layer(root, None)
    if not reason:
        return Layer(root, owners)
    return Layer(root, None, trust.keys) if trust.keys else reason


def why_untrusted_root(root: Path, trusted: tuple[Path, ...] = ()) -> str:
    """Return the reason why code must not be loaded from the user root, or "".

    The root must be owned by this user and writable by nobody else. On the way to it, links must be
    owned by this user or root, and a directory may be writable by all only if sticky, like /tmp.
    For a missing root only the way to it counts.
    """
    if root in trusted:
        return ""
    with contextlib.suppress(OSError):  # the root is missing or unreachable
        if reason := why_untrusted_entry(root.stat(), {os.geteuid()}):
            return f"{root} {reason}"
    return _why_untrusted_way(root, modes=True)


def distrust_root_of_layer(root: Path) -> str:
    """Return the reason why the owner or mode of a read-only layer is not trusted, or ""."""
    try:
        reason = why_untrusted_entry(root.stat(), {os.geteuid(), 0})
    except OSError as e:
        reason = f"cannot be examined: {e.strerror}"
    return f"{root} {reason}" if reason else _why_untrusted_way(root, modes=False)


def why_untrusted_entry(status: os.stat_result, owners: set[int] | frozenset[int]) -> str:
    """Return the reason why a file or directory with this status is not trusted, or ""."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _why_untrusted_way(root: Path, *, modes: bool) -> str:
    """Return the reason why another user could make the path `root` lead elsewhere, or "".

    modes: whether the modes of directories count, and not only the owners of links.
    """
    place, ahead, links = Path("/"), [*reversed(root.parts)], 0
    with contextlib.suppress(OSError):  # the rest is missing or unreachable
        while ahead and links < MAX_LINKS:
            step = place / ahead.pop()  # "/" begins anew
            status = step.lstat()
            open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
            if stat.S_ISLNK(status.st_mode):
                if status.st_uid not in (0, os.geteuid()):
                    return f"{step}, a link on the way to {root}, belongs to user {status.st_uid}"
                ahead += reversed(step.readlink().parts)
                links += 1
            elif modes and open_to_all and stat.S_ISDIR(status.st_mode):
                return f"{step}, a parent of {root}, is writable by every user"
            else:
                place = step
    return ""


@contextlib.contextmanager
def opened(path: Path, parent: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """Open a directory, by its name in the directory `parent` if there is one."""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path if parent is None else path.name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_in(directory: int, path: Path, name: str) -> str:
    """Return a path of the file `name` in an open directory, for loaders that need a path.

    The path goes through the descriptor, since `path`, the name of the directory, may lead
    elsewhere by now. dlopen takes equal paths for one library, so no path is returned twice.
    """
    if not os.path.isdir(DESCRIPTORS):  # noqa: PTH112  imports less
        return str(path / name)
    place = f"{DESCRIPTORS}/{directory}/"
    while f"{place}{name}" in _returned_paths:
        place += "./"
    _returned_paths.add(f"{place}{name}")
    return f"{place}{name}"


def name_library(place: str, path: Path) -> None:
    """Name a library that was loaded from `place` by its own path, which addr2line can open."""
    with contextlib.suppress(OSError):  # none was loaded
        if place in _returned_paths:
            handle = ctypes.CDLL(place, os.RTLD_NOLOAD)._handle  # a `link_map`: address, name, ...
            strdup = ctypes.CDLL(None).strdup
            strdup.restype = ctypes.c_void_p
            ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[1] = strdup(os.fsencode(path))


@contextlib.contextmanager
def opened_file(
    directory: int, name: str, owners: frozenset[int] | None
) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Open a regular file of an entry, not a link; yield it and its status. Raises ValueError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a regular file")
        check_owner(name, status, owners)
        with open(descriptor, "rb", closefd=False) as file:
            yield file, status
    finally:
        os.close(descriptor)


def read(
    directory: int, name: str, limit: int, owners: frozenset[int] | None, *, used: bool = False
) -> bytes:
    """Return the bytes of a file, at most `limit`. used: `touch` the file. Raises ValueError."""
    with opened_file(directory, name, owners) as (file, status):
        if status.st_size > limit:
            raise ValueError(f"{name} has more than {limit} bytes")
        if used:
            touch(file.fileno(), status)
        return file.read(limit)


def verified(
    directory: int,
    name: str,
    expected: tuple[int, str],
    owners: frozenset[int] | None,
    *,
    verify: str,
) -> tuple[bytes, os.stat_result]:
    """Return the bytes of a file (b"" where only the size is verified) and its status.

    expected: size in bytes and SHA-256, in hex; verify: "always", or "size" to skip the hash.
    Raises ValueError and OSError.
    """
    with opened_file(directory, name, owners) as (file, status):
        if status.st_size != expected[0]:
            raise ValueError(f"{name} has the wrong size")
        try:
            data = file.read(expected[0]) if verify == "always" else b""
        except MemoryError as e:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), name) from e
        if verify == "always" and hashlib.sha256(data).hexdigest() != expected[1]:
            raise ValueError(f"{name} is not what was published")
        return data, status


def touch(descriptor: int, status: os.stat_result) -> None:
    """Set the modification time of an open file to now, if it is more than an hour off."""
    if abs(time.time() - status.st_mtime) > TOUCH:
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def check_owner(what: str, status: os.stat_result, owners: frozenset[int] | None) -> None:
    """Raise ValueError if a file with this status is not trusted. owners: None for any owner."""
    if owners is not None and (reason := why_untrusted_entry(status, owners)):
        raise ValueError(f"{what} {reason}")


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that differ for any two files, and for one file before and after a change."""
    return status.st_dev, status.st_ino, *state(status)


def state(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that differ for a file before and after a change, and if another replaces it.

    The inode, which some network file systems make up anew, is none of them: a file that replaces
    another one has a new time of change.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest(path: str | Path) -> str:
    """Return the SHA-256 of a file's content, in hex; "" for a file that cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
    return ""


def installed_layers() -> tuple[Path, ...]:
    """Return the layers that wheels of prebuilt kernels brought into this Python installation."""
    layers = []
    others = [Path(p) for p in sys.path if p.endswith("-packages")]  # judged by their owner
    for place in dict.fromkeys((*_installation(), *others)):
        with contextlib.suppress(OSError):
            layers += [place / INSTALLED / name for name in sorted(os.listdir(place / INSTALLED))]
    return tuple(path for path in layers if path.is_dir())


def layers(config: Config) -> Iterator[Layer]:
    """Yield the user root, unless it is distrusted, and the read-only layers that may be used."""
    if not why_untrusted_root(config.cache_dir, config.trusted):
        yield user_layer(config.cache_dir, config.trusted)
    for root in (*config.system_cache, *installed_layers()):
        layer = layer_of(root, Trust.of(config))
        if isinstance(layer, Layer):
            yield layer


def _is_installed(root: Path) -> bool:
    return INSTALLED in root.parts and any(
        root.is_relative_to(place / INSTALLED) for place in _installation()
    )


def _installation() -> list[Path]:
    """Return this Python's package directories: who can write there can run code anyway."""
    here = Path(__file__).parents[2]
    prefix = f"{sys.prefix}{os.sep}"
    places = [Path(p) for p in sys.path if p.startswith(prefix) and p.endswith("-packages")]
    return list(dict.fromkeys((here, *places)))
