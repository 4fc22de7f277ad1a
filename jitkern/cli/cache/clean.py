"""Make room: remove entries, and evict old or stale ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jitkern import cache_tools, config
from jitkern.cache import VERSION, layout
from jitkern.cache_tools.check import counted, human_bytes
from jitkern.cli.filters import add_filters, duration, named, opened, size, wanted
from jitkern.cli.output import agreed, on_screen, print_json
from jitkern.files import atomic


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the commands `prune` and `clear`."""
    text = "evict entries beyond the limits, the least recently used first"
    prune = commands.add_parser("prune", help=text, description=text, parents=[shared])
    prune.add_argument(
        "--max-size", type=size, metavar="SIZE", help="the size to keep to (default: the setting)"
    )
    prune.add_argument(
        "--older-than",
        type=duration,
        metavar="TIME",
        help="evict entries not used for this time (default: the setting)",
    )
    prune.add_argument(
        "--stale",
        action="store_true",
        help="evict entries for another Torch, CUDA, GPU or package version",
    )
    text = "remove entries (default: all)"
    clear = commands.add_parser("clear", help=text, description=text, parents=[shared])
    add_filters(clear)
    for parser, run in ((prune, run_prune), (clear, run_clear)):
        parser.add_argument(
            "--dry-run", action="store_true", help="only list the entries to remove"
        )
        parser.add_argument("--yes", action="store_true", help="do not ask")
        parser.set_defaults(run=run)


def run_prune(args: argparse.Namespace) -> int:
    cache = opened()
    settings = config.current()
    going = cache_tools.evictable(
        cache,
        max_size=settings.max_size if args.max_size is None else args.max_size,
        max_age=settings.max_age if args.older_than is None else args.older_than,
        stale=args.stale,
    )
    return _remove(args, [(use.path, use.bytes) for use in going], "evict")


def run_clear(args: argparse.Namespace) -> int:
    mine = config.current().cache_dir  # never what a read-only layer holds
    going = [
        (Path(row.path), row.bytes)
        for row in named(args, cache_tools.rows(opened(), wanted(args)))
        if Path(row.path).is_relative_to(mine)
    ]
    return _remove(args, going, "remove")


def _remove(args: argparse.Namespace, going: list[tuple[Path, int]], verb: str) -> int:
    """Remove these entries (path, bytes), after the user agrees."""
    total = sum(size for _, size in going)
    what = f"{counted(len(going), 'entry')}, {human_bytes(total)}, of {config.current().cache_dir}"
    shown, rest = on_screen(going, whole=args.json or args.level > 0)
    if args.dry_run:
        print(f"would {verb} {what}{rest}", file=sys.stderr)
    elif going and not args.yes and (refused := agreed(f"{verb} {what}")):
        return refused
    paths = [path for path, _ in going]
    if not args.dry_run:
        cache = opened()
        paths = cache_tools.remove(cache, paths)
        if layout.is_tagged(cache.root):
            atomic.delete(cache.root / VERSION / "run")  # what earlier versions kept of other JITs
        sizes = dict(going)
        total = sum(sizes[path] for path in paths)
        done = f"{verb.removesuffix('e')}ed {counted(len(paths), 'entry')}, {human_bytes(total)}"
        print(f"{done}, of {config.current().cache_dir}", file=sys.stderr)
    if args.json:
        print_json(removed=[*map(str, paths)], bytes=total, dry_run=args.dry_run)
    elif args.dry_run:
        print(*(f"{path}\n" for path, _ in shown), sep="", end="")
    return 0
