"""Look at the cache directory, check it, clean it and ship it."""

from __future__ import annotations

import argparse

from jitkern.cli.cache import clean, entries, ship


def configure(parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for part in (entries, clean, ship):
        part.configure(commands, shared)
