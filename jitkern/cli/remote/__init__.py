"""Fill a remote with kernels, take kernels from it, and list what it holds.

A remote is a bucket, a directory or a web server, named by a URL: by default the first of the
setting `remote`. Credentials and endpoints of buckets come from AWS_*, GOOGLE_* and AZURE_*.
"""

from __future__ import annotations

import argparse

from jitkern.cli.remote import contents, transfer


def configure(parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for part in (transfer, contents):
        part.configure(commands, shared)
