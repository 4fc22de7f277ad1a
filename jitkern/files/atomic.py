"""Directories and files that are on the disk, not only in its cache, when a function returns.

After a power cut a rename may be there and the bytes it renamed not, unless they were synced
before it (ext4 and xfs, tried); the rename itself is there once its directory is synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int, *, fsync: bool) -> None:
    """Make `path`, and with mode 0755 what is missing above it; each is synced into its parent.

    Raises FileExistsError where something else is in the way, and OSError.
    """
    if path.is_dir() and not path.is_symlink():
        return
    if not path.parent.is_dir():
        make_directory(path.parent, 0o755, fsync=fsync)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir() or path.is_symlink():  # else another process was faster
            raise
    if fsync:
        sync(path.parent)


def write(
    path: Path,
    data: bytes,
    *,
    staging: Path | None = None,
    mode: int = 0o644,
    fsync: bool = False,
) -> None:
    """Make `path` hold `data` by one rename: a reader has the old file or the new. Raises OSError.

    staging: where it is written first, on the same file system; by default beside it.
    """
    new = (staging or path.parent) / f".{path.name}.{uuid.uuid4().hex}"
    try:
        new.write_bytes(data)
        new.chmod(mode)
        if fsync:
            sync(new)
        new.replace(path)
    except BaseException:
        delete(new)
        raise


def delete(path: Path) -> None:
    """Remove a file, or a directory and all in it; what cannot be removed stays."""
    with contextlib.suppress(OSError):  # rmtree raises some errors that it was told to ignore
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
