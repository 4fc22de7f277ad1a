"""The options of `jitkern cache` commands that choose entries."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from jitkern import config
from jitkern.cache.store import Cache
from jitkern.cache_tools import EntryFilter
from jitkern.errors import CacheError


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
        help="only this target (and host code for it); `*` stands for anything",
    )
    parser.add_argument(
        "--kind",
        default="",
        metavar="K",
        help="nvrtc, triton, cc, extension, object, runtime, call, choice, shortcut",
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


def opened() -> Cache:
    """Return the cache of the settings. Raises CacheError."""
    root = config.current().cache_dir
    if root.exists() and not root.is_dir():
        raise CacheError(f"the cache {root} is a file; remove it, or name a directory")
    return Cache.open(config.current())


def duration(text: str) -> int:
    """Return the seconds of a text like `30d`."""
    return _parsed(text, config.duration_of, "30d, 12h or 90s")


def size(text: str) -> int:
    """Return the bytes of a text like `500MiB`."""
    return _parsed(text, config.size_of, "500MiB or 2G")


def _parsed(text: str, parse: Callable[[str], int], example: str) -> int:
    try:
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not usable: expected {example}") from None
