"""Run a program with the caches of its JITs filled, and keep what they compile.

Triton, Inductor, torch.utils.cpp_extension, FlashInfer, tvm-ffi, Numba, CuPy and others get
folders of ours, which are filled from this cache, its layers and the remotes of the settings. What
a program compiles becomes entries of the cache. Variables that are set already stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from jitkern import adopt, cache_tools, config, remote
from jitkern._command import end_as
from jitkern.adopt.run import Report
from jitkern.cache_tools.check import counted
from jitkern.cli.connection import UNSIGNED, named_store, telling
from jitkern.cli.output import YELLOW, say
from jitkern.cli.parser import command_in, file_to_write, take_command, take_key
from jitkern.errors import JitkernError
from jitkern.remote.store import Store


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--frozen", action="store_const", const="frozen", dest="mode", default="",
        help="fail if anything compiles; print what, its caller, and how to prepare it",
    )  # fmt: skip
    modes.add_argument(
        "--warn", action="store_const", const="warn", dest="mode",
        help="print each compile to stderr, with its stack",
    )  # fmt: skip
    parser.add_argument(
        "--push", metavar="URL", help="at the end, push the cache for this machine to a remote"
    )
    take_key(
        parser,
        "a private key to sign with for --push (default: the setting sign_key, else unsigned)",
    )
    parser.add_argument(
        "--report", type=file_to_write, metavar="FILE",
        help="write what was compiled and served, as JSON",
    )  # fmt: skip
    take_command(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    command = command_in(args, "run")
    key = args.key or config.current().sign_key
    store = named_store(args.push, key) if args.push else None
    try:
        this = adopt.run.Run(command, mode=args.mode or "", tell=say)
        report = this.execute()
    except (FileNotFoundError, PermissionError) as e:
        say(f"cannot run {command[0]!r}: {e.strerror}")
        return 127 if isinstance(e, FileNotFoundError) else 126
    if args.report:
        _write(report, args.report)
    if args.level >= 0 and sys.stderr:
        with contextlib.suppress(OSError):  # nobody reads it
            _tell(report)
    if store:
        try:
            _push(this, store, key, quiet=args.level < 0)
        except JitkernError as e:  # the exit code is that of the program
            say(f"nothing was pushed: {e}")
    return end_as(report.code)


def _tell(report: Report) -> None:
    """Print a line about what was compiled, refused, served and kept."""
    tools = [f"{tool} {n} ({seconds:.1f} s)" for tool, (n, seconds) in report.by_tool.items()]
    parts = [f"compiled: {', '.join(tools) or 'nothing'}"]
    parts += [f"refused: {len(report.refused)}"] * bool(report.refused)
    parts += [f"from the cache: {counted(report.laid, 'file')}"] * bool(report.laid)
    parts += [f"builds served: {report.served}"] * bool(report.served)
    parts += [f"kept: {counted(report.kept, 'file')}"] * bool(report.kept)
    say("; ".join(parts), code="")


def _write(report: Report, path: Path) -> None:
    fields = {**report._asdict(), "by_tool": report.by_tool, "schema": 1}
    try:
        path.write_text(json.dumps(fields, indent=2) + "\n")
    except OSError as e:
        say(f"cannot write {path}: {e.strerror}")


def _push(this: adopt.run.Run, store: Store, key: Path | None, *, quiet: bool) -> None:
    """Push the entries for the machine of a run. Raises JitkernError."""
    machine = remote.layout.machine_of(str(this.machine.target))
    machines = (machine, remote.layout.host_of(machine))
    wanted = cache_tools.EntryFilter(target=f"*-torch{this.machine.target.torch}*")
    chosen = [
        entry
        for entry in cache_tools.chosen(this.cache, wanted)
        if remote.layout.machine_of(entry.path.parent.name) in machines
    ]
    if chosen:
        with telling(store):
            remote.publish.push(this.cache, chosen, store, key=key, unsigned=key is None)
        if key is None and not quiet:
            say(UNSIGNED, code=YELLOW)
