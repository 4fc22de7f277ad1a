"""The parser of the command line: help in paragraphs, short errors, and the nearest right word."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from jitkern.cli.output import say
from jitkern.errors import JitkernError, meant, then


class UsageError(JitkernError):
    """The command line names what does not exist, or lacks something."""


def at_least_one(text: str) -> int:
    """Return a whole number from 1 up. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 up")
    return int(text)


def file_to_read(text: str) -> Path:
    """Return the path of a file that is there. Raises ArgumentTypeError."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def take_key(parser: argparse._ActionsContainer, text: str, *, required: bool = False) -> None:
    """Add the option `--key`, the file of a private key."""
    parser.add_argument("--key", type=file_to_read, required=required, metavar="FILE", help=text)


def take_targets(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option `--target`, which may be given several times."""
    parser.add_argument("--target", action="append", default=[], metavar="T", help=text)


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, and what was probably meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments of this command. Exits with 2 if one of them is unknown."""
        self._words = [*(sys.argv[1:] if args is None else args)]
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the command line, and exit with 2."""
        if "the following arguments are required" in message:
            if unknown := self._unknown_options():
                self._refuse(unknown)
            if "required: COMMAND" in message:
                self.print_help(sys.stderr)  # a bare `jitkern`
                sys.exit(2)
        choice = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if choice and (near := meant(choice[1], re.findall(r"[\w-]+", choice[2]))):
            message = message.partition(" (choose from")[0] + near
        say(then(message, f"see {self.prog} --help"))
        sys.exit(2)

    def _unknown_options(self) -> list[str]:
        """Return the options that this command does not have; some may be shortened."""
        known = "\n".join(["", *self._option_string_actions])
        options = itertools.takewhile(lambda word: word != "--", self._words)
        names = [word.partition("=")[0] for word in options if word.startswith("-")]
        return [n for n in names if f"\n{n if n.startswith('--') else n[:2]}" not in known]

    def _refuse(self, unknown: list[str]) -> NoReturn:
        wrong = unknown[0].partition("=")[0]
        known = self._option_string_actions if wrong.startswith("-") else ()
        near = meant(wrong, known)
        if not near and self._subparsers and wrong.startswith("-"):
            near = "; the options of a command follow its name"
        option = "--to" if "://" in wrong else "--op"
        if not wrong.startswith("-") and option in self._option_string_actions:
            near = f"; did you mean {option} {unknown[0]}?"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")


class _Help(argparse.HelpFormatter):
    """Help at most 80 columns wide, in which a blank line begins a paragraph."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("max_help_position", 28)
        super().__init__(prog, **options)
        self._width = min(self._width, 78)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        del groups  # of options, which the sections below list
        needed = [a for a in actions if a.required or not a.option_strings]
        text = super()._format_usage(usage, needed, [], prefix)
        named = self._prog + " [options]" * (prefix is None)  # else for the name of a subcommand
        return text.replace(self._prog, named, 1)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        rest = action.nargs == argparse.REMAINDER  # of which argparse says `...`
        return str(action.metavar) if rest else super()._format_args(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.strip())
        return "\n\n".join(
            textwrap.indent(textwrap.fill(" ".join(p.split()), width), indent) for p in paragraphs
        )
