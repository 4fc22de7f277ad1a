"""Run compilers side by side with ninja, as many at once as `parallelism` allows.

A build starts in an empty folder, so ninja finds nothing there that it could leave out.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers import dependencies, parallelism
from jitkern.compilers.child_process import Child, show
from jitkern.compilers.torch_extension.commands import Command
from jitkern.errors import CompileError, CompilerNotFound
from jitkern.named_tuple import NamedTuple

_ROOM = 4 << 30  # bytes for a compiler that does not look for memory it can free
_REMEDY = "pip install ninja"
_RULE = """\
rule step
  command = . ./$out.sh > $out.log 2>&1 || { : > $out.failed; exit 1; }
  description = $out
"""


class Done(NamedTuple):
    """A command that ended. number: its place among the steps."""

    number: int
    command: list[str]
    output: str
    failed: bool


def run(
    steps: Sequence[Command],
    folder: Path,
    environment: Mapping[str, str],
    ended: Callable[[int], None] = lambda _: None,
) -> list[Done]:
    """The steps that ended, in order: all, or up to the first failure, which ends the others.

    ended: called at once with the number of each step that ended well. Raises CompilerNotFound
    without ninja, and CompileError where ninja itself fails.
    """
    done: list[Done] = []
    with parallelism.places(len(steps)) as jobs:
        roomy = (parallelism.free_memory() or 0) > _ROOM * jobs
        left = {n: [*s.command, *(s.roomy if roomy else ())] for n, s in enumerate(steps)}
        while True:
            for number, command in left.items():
                script = shlex.join(command) + ("" if steps[number].needed else " || :")
                (folder / f"{number}.sh").write_bytes(os.fsencode(script))
                (folder / f"{number}.failed").unlink(missing_ok=True)
            done += _ended(left, jobs, folder, environment, ended)
            last = done[-1]
            if not last.failed:
                return sorted(done)
            if dependencies.without_refused(last.command, last.output) == last.command:
                return sorted(done)
            del done[-1]
            for step in done:
                left.pop(step.number, None)
            left = {n: dependencies.without_refused(c, last.output) for n, c in left.items()}


def _ended(
    commands: Mapping[int, list[str]], jobs: int, folder: Path, environment: Mapping[str, str],
    ended: Callable[[int], None],
) -> list[Done]:  # fmt: skip
    """Run the commands; returns those that ended, in that order. Only the last may have failed."""
    builds = (f"build {number}: step\n" for number in commands)
    (folder / "build.ninja").write_text("".join((_RULE, *builds)))
    child = Child(
        [_tool(), "-j", str(jobs)], cwd=folder, env={**environment, "NINJA_STATUS": ""},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace",
    )  # fmt: skip
    done: list[Done] = []
    said: list[str] = []
    try:
        assert child.process.stdout
        with child.process.stdout as lines:
            for line in map(str.strip, lines):
                if not line.isdigit():
                    said.append(line)
                    continue
                command = commands[int(line)]
                output = (folder / f"{line}.log").read_text(errors="replace")
                done.append(Done(int(line), command, output, (folder / f"{line}.failed").exists()))
                if config.current().verbose:
                    show(f"$ {shlex.join(command)}\n{output}")
                if done[-1].failed:
                    return done
                ended(done[-1].number)
    finally:
        child.close()
    if len(done) < len(commands):
        raise CompileError(f"ninja failed: {' '.join(said) or child.process.returncode}")
    return done


def _tool() -> str:
    """The path of ninja: of its package, else on PATH. Raises CompilerNotFound."""
    folders = [config.current().environment.get("PATH", "")]
    with contextlib.suppress(ImportError):
        import ninja

        folders.insert(0, ninja.BIN_DIR)
    tool = shutil.which("ninja", path=os.pathsep.join(folders))
    if not tool:
        raise CompilerNotFound(f"no ninja, which runs the compilers: {_REMEDY}", remedy=_REMEDY)
    return tool
