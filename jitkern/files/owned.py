"""Who could have written a directory that native code is loaded from.

Checksums find accidents; ownership and signatures find other users. A process of the same user is
out of scope. What is read is opened so that this is known of it: relative to an open directory, no
link followed, its owner and mode those of what is open.
"""

from __future__ import annotations

import contextlib
import errno
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

TOUCH = 3600.0  # seconds between two notes that a file was used
RELATIVE = os.open in os.supports_dir_fd  # not on Windows
DESCRIPTORS = "/proc/self/fd"
INSTALLED = "jitkern_layers"  # folder beside installed packages: one read-only layer for each wheel

_given: set[str] = set()  # what `path_in` returned


class Trust(NamedTuple):
    """What the settings files say about trust (see config.Config)."""

    roots: tuple[Path, ...] = ()
    keys: tuple[str, ...] = ()
    signed: tuple[Path, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Trust:
        """Those of the settings."""
        return cls(config.trusted, config.trusted_keys, config.signed)


class Layer(NamedTuple):
    """A root of the cache, and what is asked of its entries.

    owners: users that they may belong to, writable by nobody else; None where the place vouches for
    them. keys: one of these must have signed each; none where no signature is needed.
    own: the user root, which is written to. vouched: the settings say that its directories may be
    open to others.
    """

    root: Path
    owners: frozenset[int] | None
    keys: tuple[str, ...] = ()
    own: bool = False
    vouched: bool = False

    @property
    def in_place(self) -> bool:
        """Whether an entry is used where it lies: no other can change it after it was checked."""
        return self.owners is not None or not self.keys


def user_layer(root: Path, trusted: tuple[Path, ...] = ()) -> Layer:
    """The user root, as a layer."""
    owners = frozenset({os.geteuid()}) if hasattr(os, "geteuid") else None
    return Layer(root, owners, own=True, vouched=root in trusted)


def layer_of(root: Path, trust: Trust) -> Layer | str:
    """The read-only layer at `root`, or why it must not be used.

    In this order: a root of which signed entries alone are wanted; one that the settings trust, or
    that is a part of the Python installation that jitkern was imported from; one that belongs to
    this user or to root and that no other can write; one whose entries carry a trusted signature.
    """
    if not os.access(root, os.R_OK | os.X_OK):
        return f"{root} cannot be read by this user: `chmod -R a+rX` it"
    reason = distrust_root_of_layer(root)
    owners = frozenset({os.geteuid(), 0}) if hasattr(os, "geteuid") else None
    vouched = root in trust.roots or _is_installed(root)
    if root in trust.signed:
        if not trust.keys:
            return f"{root} is to hold signed entries only, and there are no `trusted_keys`"
        return Layer(root, None if vouched or reason else owners, trust.keys)
    if vouched:
        return Layer(root, None)
    if not reason:
        return Layer(root, owners)
    return Layer(root, None, trust.keys) if trust.keys else reason


def distrust_root(root: Path, trusted: tuple[Path, ...] = ()) -> str:
    """Why code must not be loaded from the user root `root`, or "" if it may.

    It is owned by this user and writable by no other; a directory above it may be writable by all
    only if it is sticky, as /tmp is. A root that does not exist yet is judged by what is above it.
    """
    if not hasattr(os, "geteuid") or root in trusted:
        return ""
    with contextlib.suppress(OSError):  # there is none yet, or not for us
        reason = distrust_entry(root.stat(), {os.geteuid()})
        if reason:
            return f"{root} {reason}"
    for parent in Path(os.path.realpath(root)).parents:
        with contextlib.suppress(OSError):
            mode = parent.stat().st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"{parent}, above it, is writable by every user"
    return ""


def distrust_root_of_layer(root: Path) -> str:
    """Why a read-only layer is not trusted for its owner, or "" if it is."""
    if not hasattr(os, "geteuid"):
        return ""
    try:
        reason = distrust_entry(root.stat(), {os.geteuid(), 0})
    except OSError as e:
        reason = f"cannot be looked at: {e.strerror}"
    return f"{root} {reason}" if reason else ""


def distrust_entry(status: os.stat_result, owners: set[int] | frozenset[int]) -> str:
    """Why a file or directory with this status is not to be trusted, or ""."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


@contextlib.contextmanager
def opened(path: Path, parent: int | None = None, *, follow: bool = False) -> Iterator[int | None]:
    """A descriptor of a directory in the directory `parent`; None where the platform has none."""
    if not RELATIVE:
        if not path.is_dir() or (path.is_symlink() and not follow):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        yield None
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path if parent is None else path.name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_in(directory: int | None, path: Path, name: str) -> str:
    """A path of the file `name` in an open directory, for those who cannot take a descriptor.

    It goes through the descriptor, not through `path`, the directory's name, which may lead
    elsewhere by now. dlopen takes two libraries of one name for one, so no path is given twice.
    """
    if directory is None or not os.path.isdir(DESCRIPTORS):  # noqa: PTH112  imports less
        return str(path / name)
    place = f"{DESCRIPTORS}/{directory}/"
    while f"{place}{name}" in _given:
        place += "./"
    _given.add(f"{place}{name}")
    return f"{place}{name}"


@contextlib.contextmanager
def opened_file(
    path: Path, directory: int | None, name: str, owners: frozenset[int] | None
) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """A regular file of the entry, links not followed, and its status. Raises ValueError."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    where = path / name if directory is None else name
    descriptor = os.open(where, flags, dir_fd=directory)
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
    path: Path,
    directory: int | None,
    name: str,
    limit: int,
    owners: frozenset[int] | None,
    *,
    used: bool = False,
) -> bytes:
    """The bytes of a file of at most `limit` bytes. used: see `touch`. Raises ValueError."""
    with opened_file(path, directory, name, owners) as (file, status):
        if status.st_size > limit:
            raise ValueError(f"{name} has more than {limit} bytes")
        if used:
            touch(file.fileno(), status)
        return file.read(limit)


def touch(descriptor: int, status: os.stat_result) -> None:
    """Make now the time of modification of an open file, where that is more than an hour off."""
    if abs(time.time() - status.st_mtime) > TOUCH and os.utime in os.supports_fd:
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def check_owner(what: str, status: os.stat_result, owners: frozenset[int] | None) -> None:
    """Raise ValueError for what is not to be trusted; None for owners takes any."""
    reason = distrust_entry(status, owners) if owners is not None else ""
    if reason:
        raise ValueError(f"{what} {reason}")


def installed_layers() -> tuple[Path, ...]:
    """The layers that wheels of prebuilt kernels brought into this Python installation."""
    found = []
    others = [Path(p) for p in sys.path if p.endswith("-packages")]  # judged by their owner
    for place in dict.fromkeys((*_installation(), *others)):
        try:
            names = sorted(os.listdir(place / INSTALLED))
        except OSError:
            continue
        found += [place / INSTALLED / name for name in names]
    return tuple(path for path in found if path.is_dir())


def _is_installed(root: Path) -> bool:
    return INSTALLED in root.parts and any(
        root.is_relative_to(place / INSTALLED) for place in _installation()
    )


def _installation() -> list[Path]:
    """Where this Python's packages are, jitkern among them: who writes there runs code here."""
    here = Path(__file__).parents[2]
    prefix = f"{sys.prefix}{os.sep}"
    places = [Path(p) for p in sys.path if p.startswith(prefix) and p.endswith("-packages")]
    return list(dict.fromkeys((here, *places)))
