"""Run a program, and record the calls that needed a kernel, for `jitkern prewarm --from`.

Every process that the program starts records into the same file. `JITKERN_RECORD=FILE` does the
same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from jitkern import config
from jitkern.cache_tools.check import counted
from jitkern.cli.output import print_json, say
from jitkern.cli.parser import UsageError


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=_file_to_write, default="jitkern-calls.jsonl", metavar="FILE",
        help="the file to append to (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="e.g. -- python app.py"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no command to record: add it, as in jitkern record -- python app.py")
    output = Path(os.path.normpath(args.output.absolute()))
    settings = config.current()
    environment = {
        **settings.environment,
        "JITKERN_RECORD": str(output),
        "JITKERN_CACHE_DIR": str(settings.cache_dir),
    }
    try:
        status = subprocess.run(command, env=environment, check=False).returncode
    except OSError as e:
        say(f"cannot run {command[0]!r}: {e.strerror}")
        return 127 if isinstance(e, FileNotFoundError) else 126
    status = status if status >= 0 else 128 - status
    calls = len({*output.read_bytes().splitlines()}) if output.is_file() else 0
    found = f"{counted(calls, 'call')} in {output}: jitkern prewarm --from {output}"
    print(found if calls else "no calls were recorded", file=sys.stderr)
    if args.json:
        print_json(calls=calls, file=str(output), status=status)
    return status


def _file_to_write(text: str) -> Path:
    """Return the path of a file that can be written. Raises ArgumentTypeError."""
    path = Path(text)
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: name a file in a writable directory"
        )
    return path
