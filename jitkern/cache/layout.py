"""Names on disk: what in a directory belongs to a cache, told from what does not.

    <root>/CACHEDIR.TAG
    <root>/v1/<target>/<label>-<digest>/{manifest.json, compile.log, artifacts}
    <root>/v1/tmp/<uuid>/      staging, on the same file system
    <root>/v1/bad/             quarantine, and the logs of failed builds
    <root>/v1/trash/           what was removed a moment ago
    <root>/v1/{pins,stats,prune.json}    see cache_tools
    <root>/v1/prewarm/         see prewarm.records
    <root>/v1/plans/<target>/<label>/<digest>    an empty file for each entry that is a plan

A user may name any directory as the root, one that holds other files too. So nothing is deleted
except below a root that bears our tag, and there only what bears a name that jitkern gives; an
entry must also hold a manifest of ours. Links are never followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from jitkern.cache import RECEIPTS, VERSION
from jitkern.cache.manifest import BEGINS, NAME

TAG = "CACHEDIR.TAG"
TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This directory is a cache of jitkern: it may be deleted at any time.\n"
)
LISTS = "plans"
NOT_TARGETS = frozenset(("tmp", "bad", "trash", "pins", "stats", "prewarm", "prune.json", LISTS))
_PLAIN = r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._+!-]*"
_TARGET = rf"{_PLAIN}-torch[A-Za-z0-9._+!-]+"
_ENTRY = rf"{_PLAIN}-[0-9a-f]{{16}}"
_STAGED = r"(\..+\.)?[0-9a-f]{32}|\.doctor-.+"
_SET_ASIDE = r"([0-9]{1,20})(\..+)?"  # when, in nanoseconds, and the name that it had
_AT_THE_TOP = rf"{VERSION}|{VERSION}\.bad\.[0-9]+|{RECEIPTS}|{TAG}|lost\+found|\..*"


def is_target(name: str) -> bool:
    """Whether a folder of entries may have this name."""
    return re.fullmatch(_TARGET, name) is not None


def is_entry_name(name: str) -> bool:
    """Whether the folder of an entry may have this name."""
    return re.fullmatch(_ENTRY, name) is not None


def check_place(target: str, name: str) -> None:
    """Raise ValueError where no entry may lie in this folder for this target."""
    if not is_target(target) or not is_entry_name(name):
        raise ValueError(f"`{target}/{name}` is not a place of an entry")


def in_list(path: Path) -> Path:
    """Where an entry stands in the list of its label, if it is a plan."""
    label, _, digest = path.name.rpartition("-")
    return path.parents[1] / LISTS / path.parent.name / label / digest


def is_staged(name: str) -> bool:
    """Whether this names something in `tmp` that jitkern put there."""
    return re.fullmatch(_STAGED, name) is not None


def set_aside_at(name: str) -> float | None:
    """When jitkern put what bears this name into `trash` or `bad`; None if it did not."""
    match = re.fullmatch(_SET_ASIDE, name)
    return int(match[1]) / 1e9 if match else None


def is_tagged(root: Path) -> bool:
    """Whether a root bears the tag of a cache of jitkern."""
    data = _beginning(root / TAG, 4096)
    return data.startswith(TAG_TEXT.encode().splitlines()[0]) and b"jitkern" in data


def has_other_tag(root: Path) -> bool:
    """Whether what stands for the tag is not ours; a file of zeros is one that a power cut left."""
    tag = root / TAG
    if not os.path.lexists(tag):
        return False
    return not stat.S_ISREG(tag.lstat().st_mode) or bool(_beginning(tag, 4096).strip(b"\0"))


def holds_only_a_cache(root: Path) -> bool:
    """Whether all that a root without a tag holds has names of ours, so that it may be tagged.

    Hidden files and `lost+found` do not count: file systems put them there. Raises OSError.
    """
    return all(re.fullmatch(_AT_THE_TOP, name) for name in os.listdir(root)) and all(
        name in NOT_TARGETS or is_target(name) for name in names(root / VERSION)
    )


def is_entry(path: Path) -> bool:
    """Whether `<root>/v1/<target>/<label>-<digest>` is an entry, whole or not.

    That is: its names are such, no link is on the way to it, and it holds a manifest of ours.
    """
    return (
        is_entry_name(path.name)
        and is_target(path.parent.name)
        and all(is_folder(place) for place in (path.parents[1], path.parent, path))
        and _beginning(path / NAME, len(BEGINS)) == BEGINS
    )


def is_folder(path: Path) -> bool:
    """Whether a path is a directory, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def names(directory: Path) -> list[str]:
    """What a directory holds, sorted; nothing for one that is gone, a link or no directory."""
    try:
        return sorted(os.listdir(directory)) if is_folder(directory) else []
    except OSError:
        return []


def folders(directory: Path, wanted: Callable[[str], object]) -> list[str]:
    """The wanted names of directories in a directory, links left out, sorted."""
    if not is_folder(directory):
        return []
    try:
        with os.scandir(directory) as found:
            return sorted(
                item.name
                for item in found
                if wanted(item.name) and item.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _beginning(path: Path, size: int) -> bytes:
    """The first bytes of a regular file that is no link; none where there is no such file."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return os.read(descriptor, size) if regular else b""
        finally:
            os.close(descriptor)
    except OSError:
        return b""
