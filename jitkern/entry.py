"""One published directory, read with no lock and trusted in nothing.

It is read through one open descriptor, so a reader sees one generation of it even while another
process replaces it. Whatever is odd is a ValueError, which the cache treats as a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jitkern import trust
from jitkern.manifest import MAX_BYTES, NAME, Artifact, Manifest

_RELATIVE = os.open in os.supports_dir_fd  # not on Windows


class Entry(NamedTuple):
    """A whole entry: its directory, and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def op(self) -> str:
        """The op that it belongs to, qualified."""
        return str(self.manifest.inputs["op"])

    @property
    def variant(self) -> str:
        """The readable part of its name after that of the op, e.g. `f32`."""
        base = self.op.removeprefix("jitkern::").replace("::", ".")
        label = self.path.name.rpartition("-")[0]
        return label.removeprefix(base).removeprefix(".")

    def read(self, name: str) -> bytes:
        """The bytes of an artifact, verified. Raises ValueError or OSError if it is not whole."""
        with _opened(self.path) as directory:
            return _read_verified(self.path, directory, name, self.manifest.artifacts[name])


class Damaged(ValueError):
    """What is wrong with an entry. `current`: its path still names the directory that was read."""

    def __init__(self, message: str, *, current: bool = True) -> None:
        super().__init__(message)
        self.current = current


def read_entry(path: Path, owners: set[int], *, verify: str) -> Entry:
    """The entry at `path`, checked: owner and mode, manifest, and size and hash of its artifacts.

    verify: "always", or "size" to leave out the hashes. Raises FileNotFoundError where there is
    none, Damaged where it is not whole, OSError where it could not be read this time.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Damaged("it is not a directory")
    with _opened(path) as directory:
        status = status if directory is None else os.fstat(directory)
        try:
            _check_owner("it", status, owners)
            return _read_opened(path, directory, owners, verify)
        except FileNotFoundError as e:
            raise Damaged(f"{e.filename} is missing", current=_names(path, status)) from e
        except OSError as e:
            if e.errno != errno.ELOOP:  # a link where a file should be; all else may pass
                raise
            raise Damaged(str(e), current=_names(path, status)) from e
        except ValueError as e:
            raise Damaged(str(e), current=_names(path, status)) from e


def _names(path: Path, status: os.stat_result) -> bool:
    """Whether `path` names the directory of `status`; asked while that is open, so not reused."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.lstat(), status)
    return False


def _read_opened(path: Path, directory: int | None, owners: set[int], verify: str) -> Entry:
    manifest = Manifest.decode(_read(path, directory, NAME, MAX_BYTES, owners))
    if path.name.rpartition("-")[2] != manifest.digest[:16]:
        raise ValueError("its manifest belongs to another entry")
    for name, artifact in manifest.artifacts.items():
        if verify == "always":
            _read_verified(path, directory, name, artifact)
        elif _status(path, directory, name).st_size != artifact.size:
            raise ValueError(f"{name} has the wrong size")
    return Entry(path, manifest)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor of the directory, or None where the platform has none."""
    if not _RELATIVE:
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(
    path: Path, directory: int | None, name: str, limit: int, owners: set[int] | None = None
) -> bytes:
    """The bytes of a regular file of at most `limit` bytes, links not followed."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    where = path / name if directory is None else name
    with open(os.open(where, flags, dir_fd=directory), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise ValueError(f"{name} is not a regular file of at most {limit} bytes")
        _check_owner(name, status, owners or set())
        return file.read(limit)


def _read_verified(path: Path, directory: int | None, name: str, artifact: Artifact) -> bytes:
    data = _read(path, directory, name, artifact.size)
    if len(data) != artifact.size or hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise ValueError(f"{name} is not what was published")
    return data


def _status(path: Path, directory: int | None, name: str) -> os.stat_result:
    where = path / name if directory is None else name
    return os.stat(where, dir_fd=directory, follow_symlinks=False)


def _check_owner(what: str, status: os.stat_result, owners: set[int]) -> None:
    reason = trust.distrust_entry(status, owners) if owners else ""
    if reason:
        raise ValueError(f"{what} {reason}")
