"""Compare every kernel of an op with its PyTorch reference over the op's samples.

Kernels run from their Python launchers, with guard bytes around tensors, and then by C, also with
tensors that lie in other ways. Torch's opcheck follows, and gradients are compared with those of
the reference. Only ops are checked. What cannot run here is skipped, with the reason. Exit code 1
if a check failed, or if there was nothing to check.
"""

from __future__ import annotations

import argparse
import sys
import textwrap

from jitkern import devtools
from jitkern.cache_tools.check import counted, headline
from jitkern.cli.choose import choose_ops, take_ops
from jitkern.cli.output import GREEN, RED, YELLOW, columns, cut, print_json, styled


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    take_ops(parser, metavar="OP", required=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    chosen = choose_ops(args.what)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    checks = []
    for op in chosen.ops:
        for check in devtools.check.checks_of(op, devices):
            checks.append(check)
            if not args.json and (args.level >= 0 or check.ok is False):
                _print(check, whole=args.level > 0)
    failed = sum(check.ok is False for check in checks)
    done = sum(check.ok is True for check in checks)
    ok = not failed and bool(done) and not chosen.broken
    if args.json:
        print_json(ok=ok, checks=[check._asdict() for check in checks], broken=chosen.broken)
    else:
        skipped = len(checks) - failed - done
        color = GREEN if ok else RED
        print(styled(f"{counted(done, 'check')} passed, {failed} failed, {skipped} skipped", color))
    return 0 if ok else 1


def _print(check: devtools.check.OpCheck, *, whole: bool) -> None:
    color, mark = {True: (GREEN, "ok  "), False: (RED, "FAIL"), None: (YELLOW, "skip")}[check.ok]
    bad = check.ok is False
    first, more = headline(check.note)
    name = check.op.removeprefix("jitkern::")
    line = f"{name:16} {check.device:4} {check.source:9} {check.check:9}"
    line = line.rstrip() if bad else f"{line} {first}"
    if not bad and not whole and sys.stdout.isatty():
        line = cut(line, columns(sys.stdout) - len(mark) - 1)
    print(f"{styled(mark, color)} {line}", flush=True)
    if bad:
        print(f"     {styled(first, RED)}")
    if more and (whole or bad):
        print(textwrap.indent(more, "     "))
