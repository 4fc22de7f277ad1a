"""Write files and directories so that they are whole on the disk, even after a power cut.

A rename can survive a power cut while the bytes of the renamed file are lost, unless the file was
synced first (tried on ext4 and xfs). The rename itself survives once its directory is synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int, *, fsync: bool) -> None:
    """Make the directory `path`, and its missing parents with mode 0755.

    fsync: sync the parent of each new directory. Raises FileExistsError where a file or link is in
    the way, and OSError.
    """
    if path.is_dir() and not path.is_symlink():
        return
    if not path.parent.is_dir():
        make_directory(path.parent, 0o755, fsync=fsync)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir() or path.is_symlink():  # otherwise another process was faster
            raise
    if fsync:
        sync(path.parent)


def write(
    path: Path, data: bytes, *, staging: Path | None = None, mode: int = 0o644, fsync: bool = False
) -> None:
    """Write `data` to `path` by one rename: a reader sees the old file or the new. Raises OSError.

    staging: directory for the temporary file, on the same file system; by default that of `path`.
    """
    temporary = (staging or path.parent) / f".{path.name}.{os.urandom(16).hex()}"
    try:
        temporary.write_bytes(data)
        temporary.chmod(mode)
        if fsync:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        delete(temporary)
        raise


def delete(path: Path) -> None:
    """Remove a file, or a directory with its content, as far as the system allows."""
    with contextlib.suppress(OSError):  # rmtree raises some errors despite `ignore_errors`
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
