"""The `jitkern` command: one file per subcommand.

The only place where errors become text and exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from jitkern import config
from jitkern._version import __version__
from jitkern.cli.output import say, use_color
from jitkern.cli.parser import Parser, UsageError
from jitkern.errors import CacheError, JitkernError, NotCached, SettingError, TargetError

COMMANDS = {
    "prewarm": "fill the cache, for this machine or any target",
    "serve": "serve the cache over HTTP, and build what other machines miss",
    "check": "compare every kernel of an op with its reference",
    "record": "run a program, and record its calls for `prewarm --from`",
    "list": "list the installed ops",
    "explain": "show where an op's kernels come from, and why one is not cached",
    "doctor": "check this machine, and print a remedy for each problem",
    "init": "write a new package of kernels, or one kernel folder",
    "cache": "look at the cache directory and clean it",
    "remote": "push kernels to a bucket or directory, and pull kernels from there",
}
EXIT_CODES = """\
exit codes: 0 ok; 1 problems found, or some builds failed; 2 usage, a misspelt name too; 3 the cache
is unusable or untrusted; 126 and 127 a program that cannot be run; 130 interrupted. stdout carries
data, stderr progress and errors.
"""
_WITH_VALUE = ("--cache-dir", "--color")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]  # `list` is a submodule here
    if argv is None:
        sys.stdout, sys.stderr = (_Stream.of(stream) for stream in (sys.stdout, sys.stderr))
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # Torch's own: no use here
    try:
        if "_ARGCOMPLETE" in config.current().environment:
            _complete()
        with contextlib.ExitStack() as settings:
            args = _parse(arguments)
            args.own_process = argv is None
            use_color(args.color)
            if getattr(args, "cache_dir", None):
                origins = {"cache_dir": "--cache-dir"}
                settings.enter_context(config.using(cache_dir=args.cache_dir, origins=origins))
            code: int = args.run(args)
            sys.stdout.flush()
            return code
    except (JitkernError, OSError, ImportError, KeyboardInterrupt) as e:
        return _report(e)
    finally:
        use_color("auto")


class _Stream(io.FileIO):
    """A stream to print on; if its reader goes away, the command keeps its exit code.

    If it cannot be written otherwise, the command fails once, and not again at its end.
    """

    @classmethod
    def of(cls, stream: TextIO) -> TextIO:
        """Return a stream in place of this one, for paths that may not be valid text, too."""
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        raw = io.BufferedWriter(cls(stream.fileno(), "w", closefd=False))
        return io.TextIOWrapper(
            raw, stream.encoding, "surrogateescape", line_buffering=stream.line_buffering
        )

    def write(self, data: Any) -> int:
        """Write until the reader goes away, then discard. Raises OSError for what else fails."""
        try:
            return super().write(data)
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(e, BrokenPipeError):
                raise OSError(f"the output cannot be written: {e.strerror}") from e
            return super().write(data)


def _report(e: BaseException) -> int:
    """Print an error, and return the exit code for it. Raises errors of jitkern itself."""
    code, message = 1, str(e)
    if isinstance(e, KeyboardInterrupt):
        code, message = 130, "interrupted; what was finished is kept"
    elif _is_of_torch(e):
        message = f"this command needs PyTorch, which cannot be imported: {e}: pip install torch"
    elif isinstance(e, ImportError):
        raise e
    elif isinstance(e, (TargetError, SettingError, UsageError)):
        code = 2
    elif isinstance(e, CacheError) and not isinstance(e, NotCached):
        code = 3
    say(message)
    return code


def _is_of_torch(e: BaseException) -> bool:
    """Return whether an import of Torch failed: it or one of its libraries is missing."""
    import traceback

    frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
    bodies = {f.f_globals["__name__"] for f in frames if f.f_code.co_name == "<module>"}
    return getattr(e, "name", "") == "torch" or "torch" in bodies


def _parse(arguments: list[str]) -> argparse.Namespace:
    args = parser(arguments).parse_args(arguments)
    for name, value in (("level", 0), ("color", "auto"), ("json", False)):
        vars(args).setdefault(name, value)
    return args


def parser(arguments: list[str]) -> Parser:
    """Return the parser, with the options of the command that the arguments name."""
    before = ["", *arguments]
    named = next(
        (a for a, b in zip(arguments, before) if a[:1] != "-" and b not in _WITH_VALUE), None
    )
    shared = Parser(add_help=False)
    everywhere = shared.add_argument_group("options of every command")
    everywhere.add_argument(
        "--cache-dir",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="the cache root (default: JITKERN_CACHE_DIR, else the user's cache)",
    )
    for letter, name, level, text in (
        ("-v", "--verbose", 1, "print more: every row, whole names"),
        ("-q", "--quiet", -1, "print no progress, and no remarks"),
    ):
        everywhere.add_argument(
            letter, name, dest="level", action="store_const", const=level,
            default=argparse.SUPPRESS, help=text,
        )  # fmt: skip
    everywhere.add_argument(
        "--color", choices=("auto", "always", "never"), default=argparse.SUPPRESS, metavar="WHEN",
        help="auto (default: on a terminal), always or never",
    )  # fmt: skip
    everywhere.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object"
    )
    parser = Parser(
        prog="jitkern",
        description="PyTorch kernels that compile on first use, and are cached.",
        epilog=EXIT_CODES,
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"jitkern {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        # Import only the module of this command: `jitkern cache` must not wait for the others.
        module = importlib.import_module(f"jitkern.cli.{name}") if name == named else None
        command = commands.add_parser(
            name, help=summary, description=module.__doc__ if module else None, parents=[shared]
        )
        if module:
            module.configure(command, shared)
    return parser


def _complete() -> None:
    """Answer a shell that completes a command line: `pip install jitkern[completion]`."""
    import argcomplete

    words = config.current().environment.get("COMP_LINE", "").split()[1:]
    argcomplete.autocomplete(parser(words), always_complete_options="long")
