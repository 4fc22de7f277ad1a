"""The `jitkern` command: one file per subcommand.

The only place where errors become text and exit codes.

Exit codes: 0 ok, 1 problems found or some builds failed, 2 usage, 3 cache unusable or untrusted,
130 interrupted. stdout carries data, stderr progress and errors.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jitkern import __version__, config
from jitkern.errors import CacheError, JitkernError, NotCached, SettingError, TargetError

COMMANDS = {
    "prewarm": "fill the cache, for this machine or any target",
    "record": "run a program, and record its calls for `prewarm --from`",
    "list": "the ops that are installed",
    "explain": "where an op's kernels come from, which are cached, and why others are not",
    "doctor": "what works on this machine, and for each problem a remedy",
    "init": "write a new package of kernels, or one kernel folder",
    "cache": "look at the cache directory and clean it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]  # `list` is a submodule here
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # paths may not be valid text
    try:
        with contextlib.ExitStack() as settings:
            args = _parse(arguments)
            if getattr(args, "cache_dir", None):
                path = Path(args.cache_dir).expanduser().absolute()
                origins = {"cache_dir": "--cache-dir"}
                settings.enter_context(config.using(cache_dir=path, origins=origins))
            code: int = args.run(args)
            return code
    except (JitkernError, OSError, ModuleNotFoundError, KeyboardInterrupt) as e:
        return _report(e)


def _report(e: BaseException) -> int:
    """Print an error, and return the exit code for it. Raises errors that are faults of ours."""
    if isinstance(e, BrokenPipeError):  # the reader of our stdout went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    code, message = 1, str(e)
    if isinstance(e, KeyboardInterrupt):
        code, message = 130, "interrupted; what was finished is kept"
    elif isinstance(e, ModuleNotFoundError):
        if e.name != "torch":
            raise e
        message = "this command needs PyTorch: pip install torch"
    elif isinstance(e, (TargetError, SettingError)):
        code = 2
    elif isinstance(e, CacheError) and not isinstance(e, NotCached):
        code = 3
    print(f"jitkern: {message}", file=sys.stderr)
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--cache-dir",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="the cache root (default: JITKERN_CACHE_DIR, else the user's cache)",
    )
    parser = argparse.ArgumentParser(
        prog="jitkern",
        description="PyTorch kernels that compile on first use, and never again.",
        epilog=__doc__,
    )
    parser.add_argument("--version", action="version", version=f"jitkern {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        # Import only the module of this command: `jitkern cache` must not wait for the others.
        chosen = name == next((a for a in arguments if not a.startswith("-")), None)
        module = importlib.import_module(f"jitkern.cli.{name}") if chosen else None
        command = commands.add_parser(
            name, help=summary, description=module.__doc__ if module else None, parents=[shared]
        )
        if module:
            module.configure(command, shared)
    return parser.parse_args(arguments)
