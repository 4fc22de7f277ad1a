"""Run a program with the caches of its JITs filled, and keep what they compile.

Triton, Inductor, torch.utils.cpp_extension, FlashInfer, tvm-ffi, Numba, CuPy and others get
folders of ours, which are filled from this cache, its layers and the remotes of the settings. What
a program compiles becomes entries of the cache. Variables that are set already stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
from pathlib import Path

from jitkern import adopt, cache_tools, config, remote
from jitkern.adopt.run import Report
from jitkern.cli.output import say


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
    parser.add_argument(
        "--key", type=Path, metavar="FILE",
        help="a private key to sign with for --push (default: the setting sign_key, else unsigned)",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write what was compiled and served, as JSON"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="e.g. -- python app.py"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        say("no command to run: add it, as in jitkern run -- python app.py")
        return 2
    this = adopt.run.Run(command, mode=args.mode or "", tell=say)
    this.lay()
    try:
        report = this.execute()
    except FileNotFoundError as e:
        say(f"cannot run {command[0]}: {e.strerror}")
        return 127
    if args.report:
        _write(report, args.report)
    if args.level >= 0:
        _tell(report)
    if args.push:
        _push(this, args)
    if report.code < 0:
        _die_of(-report.code)
    return report.code


def _tell(report: Report) -> None:
    """Print a line about a run in which something was compiled, refused, served or kept."""
    tools = [f"{tool} {n} ({seconds:.1f} s)" for tool, (n, seconds) in report.by_tool.items()]
    parts = [f"compiled: {', '.join(tools) or 'nothing'}"]
    parts += [f"refused: {len(report.refused)}"] * bool(report.refused)
    parts += [f"laid: {report.laid} files"] * bool(report.laid)
    parts += [f"builds served: {report.served}"] * bool(report.served)
    parts += [f"kept: {report.kept} files"] * bool(report.kept)
    if len(parts) > 1 or tools:
        say("; ".join(parts))


def _write(report: Report, path: Path) -> None:
    fields = {**report._asdict(), "by_tool": report.by_tool, "schema": 1}
    try:
        path.write_text(json.dumps(fields, indent=2) + "\n")
    except OSError as e:
        say(f"cannot write {path}: {e.strerror}")


def _push(this: adopt.run.Run, args: argparse.Namespace) -> None:
    """Push the entries for the machine of a run. Raises JitkernError."""
    connection = importlib.import_module("jitkern.cli.remote.connection")  # for a push alone
    key = args.key or config.current().sign_key
    store = connection.writable(connection.opened(args.push))
    target = this.machine.target
    hosts = {f"*-torch{target.torch}-{target.platform}*", str(target.for_device_code())}
    chosen = {
        entry.path: entry
        for pattern in sorted(hosts)
        for entry in cache_tools.chosen(this.cache, cache_tools.EntryFilter(target=pattern))
    }
    if chosen:
        remote.publish.push(this.cache, chosen.values(), store, key=key, unsigned=key is None)


def _die_of(number: int) -> None:
    """End as the command did, by a signal."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
