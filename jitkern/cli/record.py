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
from jitkern.cli.parser import command_in, file_to_write, take_command


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=file_to_write, default="jitkern-calls.jsonl", metavar="FILE",
        help="the file to append to (default: %(default)s)",
    )  # fmt: skip
    take_command(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    command = command_in(args, "record")
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
