"""Compare every kernel of an op with its PyTorch reference over the op's samples.

Kernels run from their Python launchers, with guard bytes around tensors, and then by C, also with
other layouts of tensors. Torch's opcheck follows, and gradients are compared with those of the
reference. Only ops are checked. What cannot run here is skipped, with the reason. Exit code 1
if a check failed, or if there was nothing to check. A kernel that crashes, or takes longer than
`--timeout`, fails its check.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import textwrap
from collections.abc import Callable, Container
from typing import Any, NoReturn

from jitkern import devtools
from jitkern._fork import DIE_WITH_PARENT
from jitkern.cache_tools.check import counted, headline
from jitkern.cli.choose import choose_ops, take_ops
from jitkern.cli.output import GREEN, RED, YELLOW, Progress, fitted, print_json, say, styled
from jitkern.cli.parser import at_least_one
from jitkern.devtools.op_check import OpCheck
from jitkern.target import unsupported

_OF_MEMORY = ": it uses memory that is not its own"
_CAUSES = {
    "SIGSEGV": _OF_MEMORY, "SIGBUS": _OF_MEMORY, "SIGFPE": ": a division by zero, perhaps",
    "SIGKILL": ": out of memory, perhaps",
}  # fmt: skip
Tell = Callable[[str, Any], object]


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    take_ops(parser, metavar="OP", required=True)
    parser.add_argument(
        "--timeout", type=at_least_one, default=0, metavar="SECONDS",
        help="fail a check that takes longer (default: no limit)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checks: list[OpCheck] = []
    broken: dict[str, str] = {}
    unimported: dict[str, str] = {}
    progress = Progress(quiet=args.level < 0)

    def take(what: str, value: Any) -> None:
        progress.clear()
        if what == "broken":
            broken.update(value)
        elif what == "unimported":
            unimported.update(value)
        elif what != "row":
            progress.show(f"checking {' '.join(filter(None, OpCheck(*value)[:4]))}")
        else:
            checks.append(check := OpCheck(*value))
            if not args.json and (args.level >= 0 or check.ok is False):
                _print(check, whole=args.level > 0)

    # The command itself has no Torch yet, whose threads a fork would lack.
    if args.own_process and not unsupported():
        _check_in_children(args.what, args.timeout, take)
    else:
        _check(args.what, (), take)
    failed = sum(check.ok is False for check in checks)
    done = sum(check.ok is True for check in checks)
    ok = not failed and bool(done) and not broken
    if args.json:
        print_json(
            ok=ok,
            checks=[check._asdict() for check in checks],
            broken=broken,
            unimported=unimported,
        )
    else:
        for op, module in unimported.items():
            package = module.partition(".")[0]
            say(f"`import {package}` does not declare {op}: it lacks `import {module}`")
        skipped = len(checks) - failed - done
        total = f"{counted(done, 'check')} passed, {failed} failed, {skipped} skipped"
        total += f"; not imported: {', '.join(broken)}" if broken else ""
        print(styled(total, GREEN if ok else RED))
    return 0 if ok else 1


def _check(what: list[str], seen: Container[str], tell: Tell) -> None:
    """Check the ops that are not `seen`, and tell of the broken packages and of each row."""
    import torch

    def begin(row: OpCheck) -> None:
        tell("call" if row.note else "begun", row)

    chosen = choose_ops(what)
    tell("broken", chosen.broken)
    tell("unimported", chosen.unimported)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for op in chosen.ops:
        if op.name in seen or op.module not in sys.modules:  # it failed in the midst of its import
            continue
        for row in devtools.check.checks_of(op, devices, begin):
            tell("row", row)


def _check_in_children(what: list[str], timeout: int, tell: Tell) -> None:
    """Check in a child, which a kernel may end; another child checks the ops that are left.

    timeout: seconds for a check; 0: no limit. Raises SystemExit if a child fails otherwise.
    """
    seen: set[str] = set()
    while True:
        reader, writer = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
            os.close(reader)
            _check_as_child(what, timeout, seen, writer)
        os.close(writer)
        last, begun = "", list[Any]()
        with open(reader) as pipe:
            for last, value in map(json.loads, pipe):
                if last != "ended":
                    tell(last, value)
                if last in ("begun", "call", "row"):
                    seen.add(value[0])
                    begun = value if last != "row" else []
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if last == "ended":
            return
        if not begun and not code:
            say("the import of the ops ended the process: does a module call `os._exit`?")
        if not begun:
            raise SystemExit(_end_as(code) or 1)
        how = f"it ended its process with the exit code {code}, and must return"
        if code == -signal.SIGALRM:
            how = f"it took more than {timeout} s"
        elif code < 0:
            name = signal.Signals(-code).name
            how = f"it ended its process by {name}{_CAUSES.get(name, '')}"
        tell("row", [*begun[:4], False, f"{begun[5]}: {how}" if begun[5] else how])
        tell("row", [*begun[:2], "", "others", None, "not tried after a check that did not end"])


def _end_as(code: int) -> int:
    """End this process as a child ended, if a signal ended that; otherwise return its code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _check_as_child(what: list[str], timeout: int, seen: Container[str], writer: int) -> NoReturn:
    """Check, tell the parent at the other end of a pipe, and end.

    Ctrl-C and the timeout end the process at once, also in a kernel that does not return.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(writer, "w") as pipe:

        def tell(*told: Any) -> None:
            if told[0] != "call":
                signal.alarm(timeout if told[0] == "begun" else 0)
            print(json.dumps(told), file=pipe, flush=True)

        _check(what, seen, tell)
        tell("ended", None)  # a kernel may end this process, with any code
    raise SystemExit(0)


def _print(check: OpCheck, *, whole: bool) -> None:
    marks = {True: (GREEN, "ok   "), False: (RED, "FAIL "), None: (YELLOW, "skip ")}
    color, mark = marks[check.ok]
    bad = check.ok is False
    first, more = headline(check.note)
    name = check.op.removeprefix("jitkern::")
    line = f"{name:16} {check.device:4} {check.source:9} {check.check:9}"
    line = line.rstrip() if bad else f"{line} {first}"
    print(fitted(line, whole=whole or bad, mark=mark, color=color), flush=True)
    if bad:
        print(f"     {styled(first, RED)}")
    if more and (whole or bad):
        print(textwrap.indent(more, "     "))
