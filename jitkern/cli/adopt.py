"""Make entries of the caches that JITs have on this machine already, e.g. of `~/.triton/cache`.

The files stay where they are. What is left out is listed with the reason.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jitkern import adopt, config
from jitkern.adopt.folders import Folder
from jitkern.adopt.jits import JITS, Jit
from jitkern.cache.store import Cache
from jitkern.cache_tools.check import counted, human_bytes
from jitkern.cli.filters import opened
from jitkern.cli.output import print_json, say
from jitkern.cli.parser import UsageError
from jitkern.errors import meant

_SHOWN = 5  # reasons a JIT


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument("jit", nargs="*", metavar="JIT", help="only these (default: all)")
    parser.add_argument(
        "--from", dest="folder", type=Path, metavar="DIR", help="the cache folder of the one JIT"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="EXE",
        help="the Python that the caches are for (default: the one that runs this command)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="only print what would be adopted")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [*_rows(args.jit)]
    if args.folder and len(rows) != 1:
        raise UsageError("--from is the folder of one JIT: name it, as in jitkern adopt triton")
    if args.folder and not args.folder.is_dir():
        raise UsageError(f"--from {args.folder}: there is no such folder")
    try:
        machine = adopt.machine.machine_of([args.python], config.current().environment)
    except (FileNotFoundError, PermissionError) as e:
        raise UsageError(f"--python {args.python}: {e.strerror}") from e
    if machine.places[0] != machine.places[1]:  # the program, and the Python that runs it
        raise UsageError(f"--python {args.python}: it is no Python")
    cache = Cache.private() if args.dry_run else opened(new=True)
    found = []
    for jit in rows:
        for place in [args.folder] if args.folder else _places(jit):
            done = Folder(cache, machine, jit, place).keep()
            told = {"files": done.files, "bytes": done.bytes, "left_out": done.left_out}
            found.append({"jit": jit.name, "folder": str(place), **told})
            would = "would be " * args.dry_run
            files = f"{counted(done.files, 'file')} {would}adopted, {human_bytes(done.bytes)}"
            print(f"{jit.name}  {place}  {files}", file=sys.stderr)
            for line in done.left_out if args.level > 0 else done.left_out[:_SHOWN]:
                say(f"left out: {line}")
            if len(done.left_out) > _SHOWN and args.level <= 0:
                say(f"left out: {len(done.left_out) - _SHOWN} more; see them with -v")
    if not found:
        say(f"found no cache of a known JIT: {', '.join(jit.name for jit in rows)}")
    if args.json:
        print_json(adopted=found, target=str(machine.target), dry_run=args.dry_run)
    return 0 if found else 1


def _rows(names: list[str]) -> Iterator[Jit]:
    """Yield the rows of these names, or all. Raises UsageError."""
    known = {jit.name: jit for jit in JITS if jit.variables}
    for name in names:
        if name not in known:
            raise UsageError(f"no JIT is called `{name}`{meant(name, known)}: {', '.join(known)}")
    yield from (known[name] for name in names or known)


def _places(jit: Jit) -> Iterator[Path]:
    """Yield the folders where a JIT has its cache without `jitkern run`."""
    environment = config.current().environment
    for variable in jit.variables:
        if variable in environment:
            yield Path(environment[variable])
            return
    for place in jit.places:
        pattern = os.path.expanduser(place.format(user=environment.get("USER", "root")))  # noqa: PTH111
        yield from (Path(path) for path in sorted(glob.glob(pattern)) if Path(path).is_dir())  # noqa: PTH207
