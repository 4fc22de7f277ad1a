"""The options of commands that choose entries of a cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from jitkern import cache_tools, config
from jitkern.cache.store import Cache
from jitkern.cache_tools import EntryFilter
from jitkern.cli.parser import UsageError
from jitkern.errors import CacheError, meant, meant_op

KINDS = (
    "nvrtc", "triton", "cutile", "cute", "cc", "extension", "object", "runtime", "call", "choice",
    "declaration", "shortcut",
)  # fmt: skip
T = TypeVar("T")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose entries."""
    parser.add_argument(
        "--op",
        action="append",
        default=[],
        help="only this op, which may be given several times; `*` stands for anything",
    )
    parser.add_argument(
        "--target",
        default="",
        help="only this target (and host code for it), or its beginning, as in sm_90; `*` stands "
        "for anything",
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="", metavar="K", help=f"one of {', '.join(KINDS)}"
    )
    parser.add_argument("--layer", default="", metavar="DIR", help="only entries of this root")
    parser.add_argument(
        "--older-than", type=duration, default=0, metavar="TIME", help="not used for this time: 30d"
    )
    parser.add_argument(
        "--larger-than", type=size, default=0, metavar="SIZE", help="of at least this size: 1MiB"
    )


def wanted(args: argparse.Namespace, *, problem: bool = False) -> EntryFilter:
    """Return the filter that the options describe."""
    return EntryFilter(
        args.op, args.target, args.kind, args.layer, args.older_than, args.larger_than, problem
    )


def named(args: argparse.Namespace, chosen: list[T]) -> list[T]:
    """Return what was chosen. Raises UsageError for an op, target or root of no entry at all.

    A pattern with `*` may fit nothing, and so may a name in an empty cache.
    """
    names = [*(("op", op) for op in args.op), ("target", args.target), ("layer", args.layer)]
    if (chosen and len(args.op) < 2) or not (every := cache_tools.rows(opened(), verify="none")):
        return chosen
    for field, name in names:
        wanted = EntryFilter(**{field: name})
        if "*" not in name and not cache_tools.rows(opened(), wanted, verify="none"):
            known = {getattr(row, field) for row in every}
            near = ""
            if field == "op":
                spaces = {f"{op.partition('::')[0]}::*" for op in known if "::" not in name}
                near = meant(name, spaces) or meant_op(name, known)
            if field == "target":  # and what it may leave out
                parts = [target.split("-")[start:] for target in known for start in (0, 1)]
                known = {"-".join(some[:end]) for some in parts for end in range(1, len(some) + 1)}
            raise UsageError(
                f"no entry of {config.current().cache_dir} has the {field} `{name}`"
                + (near or meant(name, known))
            )
    return chosen


def opened(*, new: bool = False) -> Cache:
    """Return the cache of the settings. Raises CacheError.

    new: whether the root may be missing; else it may only where no command line names it.
    """
    settings = config.current()
    root = settings.cache_dir
    if root.exists() and not root.is_dir():
        raise CacheError(f"the cache {root} is a file; remove it, or name a directory")
    if not (new or root.exists()) and settings.cache_dir_origin == "--cache-dir":
        raise CacheError(f"there is no cache at {root}")
    return Cache.open(settings)


def duration(text: str) -> int:
    """Return the seconds of a text like `30d`."""
    if text.isdigit():  # of days, perhaps
        raise argparse.ArgumentTypeError(f"`{text}` has no unit: expected {text}d or {text}s")
    return _parsed(text, config.duration_of, "30d, 12h or 90s")


def size(text: str) -> int:
    """Return the bytes of a text like `500MiB`."""
    return _parsed(text, config.size_of, "500MiB or 2G")


def _parsed(text: str, parse: Callable[[str], int], example: str) -> int:
    try:
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not usable: expected {example}") from None
