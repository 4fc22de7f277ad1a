"""Names on disk: which files of a directory belong to a cache, and which do not.

    <root>/CACHEDIR.TAG
    <root>/v1/<target>/<label>-<digest>/{manifest.json, compile.log, artifacts}
    <root>/v1/tmp/<uuid>/      staging, on the same file system
    <root>/v1/bad/             quarantine, and the logs of failed builds
    <root>/v1/trash/           entries that were removed a moment ago
    <root>/v1/pruned           its time is that of the last look for what to evict
    <root>/receipts, <root>/v1/{pins,plans,prewarm,remote,run,stats,prune.json}: of earlier versions

A user may name any directory as the root, even one that holds other files. So files are deleted
only below a root with our tag, and only if they have names that jitkern gives; an entry must also
hold a manifest of ours. Links are never followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from jitkern.cache import VERSION
from jitkern.cache.manifest import BEGINS, NAME

TAG = "CACHEDIR.TAG"
TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This directory is a cache of jitkern: it may be deleted at any time.\n"
)
NOT_TARGETS = frozenset((
    "tmp", "bad", "trash", "pruned", "prewarm", "remote", "run", "pins", "plans", "stats",
    "prune.json",
))  # fmt: skip
_PLAIN = r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._+!-]*"
_TARGET = rf"{_PLAIN}-torch[A-Za-z0-9._+!-]+"
_ENTRY = rf"{_PLAIN}-[0-9a-f]{{16}}"
_STAGED = r"(\..+\.)?[0-9a-f]{32}|\.doctor-.+"
_SET_ASIDE = r"([0-9]{1,20})(\..+)?"  # Unix time in nanoseconds, and the former name
_AT_THE_TOP = rf"{VERSION}|{VERSION}\.bad\.[0-9]+|receipts|{TAG}|lost\+found|\..*"


def is_target(name: str) -> bool:
    """Return whether the folder of a target may have this name."""
    return re.fullmatch(_TARGET, name) is not None


def is_entry_name(name: str) -> bool:
    """Return whether the folder of an entry may have this name."""
    return re.fullmatch(_ENTRY, name) is not None


def check_place(target: str, name: str) -> None:
    """Raise ValueError if an entry may not have this target and folder name."""
    if not is_target(target) or not is_entry_name(name):
        raise ValueError(f"`{target}/{name}` is not a valid place for an entry")


def is_staged(name: str) -> bool:
    """Return whether jitkern gives this name to a file or folder in `tmp`."""
    return re.fullmatch(_STAGED, name) is not None


def set_aside_at(name: str) -> float | None:
    """Return the Unix time in a name that jitkern gives in `trash` or `bad`, or None."""
    match = re.fullmatch(_SET_ASIDE, name)
    return int(match[1]) / 1e9 if match else None


def is_tagged(root: Path) -> bool:
    """Return whether a root has the tag of a cache of jitkern."""
    data = _beginning(root / TAG, 4096)
    return data.startswith(TAG_TEXT.encode().splitlines()[0]) and b"jitkern" in data


def has_other_tag(root: Path) -> bool:
    """Return whether the tag's file has content other than zeros, which a power cut leaves."""
    tag = root / TAG
    if not os.path.lexists(tag):
        return False
    return not stat.S_ISREG(tag.lstat().st_mode) or bool(_beginning(tag, 4096).strip(b"\0"))


def holds_only_a_cache(root: Path) -> bool:
    """Return whether a root without a tag holds only cache files, so that it may get a tag.

    Hidden files and `lost+found` do not count: file systems make them. Raises OSError.
    """
    return all(re.fullmatch(_AT_THE_TOP, name) for name in os.listdir(root)) and all(
        name in NOT_TARGETS or is_target(name) for name in names(root / VERSION)
    )


def is_entry(path: Path) -> bool:
    """Return whether `<root>/v1/<target>/<label>-<digest>` is an entry, whole or not.

    The names must be valid, no folder of the path a link, and a manifest of ours must be there.
    """
    return (
        is_entry_name(path.name)
        and is_target(path.parent.name)
        and all(is_folder(place) for place in (path.parents[1], path.parent, path))
        and _beginning(path / NAME, len(BEGINS)) == BEGINS
    )


def is_folder(path: Path) -> bool:
    """Return whether a path is a directory, not a link to a directory."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def names(directory: Path) -> list[str]:
    """Return the sorted names in a directory; none if the path is missing, a link or a file."""
    try:
        return sorted(os.listdir(directory)) if is_folder(directory) else []
    except OSError:
        return []


def folders(directory: Path, wanted: Callable[[str], object]) -> list[str]:
    """Return the sorted names of `wanted` folders in a directory, without links."""
    if not is_folder(directory):
        return []
    try:
        with os.scandir(directory) as items:
            return sorted(
                item.name
                for item in items
                if wanted(item.name) and item.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _beginning(path: Path, size: int) -> bytes:
    """Return the first bytes of a regular file, or b"" for a link or a missing file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return os.read(descriptor, size) if regular else b""
        finally:
            os.close(descriptor)
    except OSError:
        return b""
