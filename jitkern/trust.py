"""Who could have written a directory that native code is loaded from.

Checksums find accidents; ownership finds other users. A process of the same user is out of scope.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrust_root(root: Path) -> str:
    """Why code must not be loaded from the user root `root`, or "" if it may.

    It is owned by this user and writable by no other; a directory above it may be writable by all
    only if it is sticky, as /tmp is. A root that does not exist yet is judged by what is above it.
    """
    if not hasattr(os, "geteuid"):
        return ""
    if root.exists():
        reason = distrust_entry(root.stat(), {os.geteuid()})
        if reason:
            return f"{root} {reason}"
    for parent in root.resolve().parents:
        if parent.exists():
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"{parent}, above it, is writable by every user"
    return ""


def distrust_layer(root: Path) -> str:
    """Why a read-only layer must not be used, or "" if it may.

    It must be owned by this user or root, and writable by no other.
    """
    if not hasattr(os, "geteuid"):
        return ""
    reason = distrust_entry(root.stat(), {os.geteuid(), 0})
    return f"{root} {reason}" if reason else ""


def distrust_entry(status: os.stat_result, owners: set[int]) -> str:
    """Why a file or directory with this status is not to be trusted, or ""."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""
