"""Child processes that do not outlive this one, however it ends.

A compiler has children of its own, and ninja puts each of its compilers into a process group, so
each child leads a session, all groups of which are killed. A shell waits on a pipe whose other end
only this process holds: when this process dies, by kill -9 too, the system closes the pipe, and the
shell kills them. Only a kill -9 between the starts of the child and of that shell leaves the child
alone. (PR_SET_PDEATHSIG reaches only a direct child, and is sent when the thread that started the
child ends.)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jitkern._fork import after_fork

GUARD = """\
read -r line && exit  # a line means: the child has ended
kill -9 "-$1"
for stat in /proc/[0-9]*/stat; do
  { read -r line < "$stat"; } 2> /dev/null || continue
  set -- "$1" ${line##*) }  # state, parent, group, session
  [ "$5" != "$1" ] || kill -9 "-$4"
done
"""
_starting = threading.Lock()
_lines: set[int] = set()  # our ends of the pipes
_running: set[Child] = set()
_ending = threading.Event()


class Child:
    """A started command. `process` has its pipes; call `close` when the command is done."""

    def __init__(self, command: Sequence[str], *, guarded: bool = True, **options: Any) -> None:
        self._owner = os.getpid()
        self._line: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            # Not while another thread forks: its child would keep the ends of our pipes open.
            with _uninterrupted(), _starting, contextlib.ExitStack() as undo:
                read_end = self._begin_watch(undo) if guarded else None
                self.process: subprocess.Popen[str] = subprocess.Popen(
                    command, text=True, start_new_session=True, **options
                )
                if read_end is not None:
                    self._watch(read_end)
                _running.add(self)
                undo.pop_all()
        except BaseException:
            if self in _running:
                self.close()
            raise
        if _ending.is_set():
            self.kill()

    def close(self) -> None:
        """Kill the session if the command did not end by itself, and wait for its end."""
        if self._owner != os.getpid():
            return  # we are a fork: the process is our parent's child
        if self.process.poll() is None or self.process.returncode < 0:  # killed, but not its own
            _kill_session(self.process.pid)
            self.process.wait()
        _running.discard(self)
        if self._line is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._line, b"\n")
        _lines.discard(self._line)
        os.close(self._line)
        self._line = None
        if self._guard:
            self._guard.wait()

    def kill(self) -> None:
        """Kill the session, if the command still runs."""
        if self.process.poll() is None:
            _kill_session(self.process.pid)

    def _begin_watch(self, undo: contextlib.ExitStack) -> int:
        """Make the pipe before the child, because a later failure would leave the child running."""
        read_end, self._line = os.pipe()
        _lines.add(self._line)
        undo.callback(os.close, read_end)
        undo.callback(os.close, self._line)
        undo.callback(_lines.discard, self._line)
        return read_end

    def _watch(self, read_end: int) -> None:
        with contextlib.suppress(OSError):  # there may be no shell
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", str(self.process.pid)],
                stdin=read_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        os.close(read_end)


def _kill_session(leader: int) -> None:
    """Kill all process groups of a session, first that of its leader, which starts the others."""
    _kill_group(leader)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, group, session, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(session) == leader:
                _kill_group(int(group))


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals to the end of the block: an exit inside it would leave the child behind."""
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only there do handlers run
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler) or handler == signal.SIG_DFL:
                handlers[number] = handler
                signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for told in came:
            signal.raise_signal(told)


def show(text: str) -> None:
    """Write to stderr, for a user who asked for verbose builds."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def run(
    command: Sequence[str],
    *,
    text: str = "",
    shown: bool = False,
    limit: float | None = None,
    **options: Any,
) -> tuple[int, str]:
    """Run a command to its end; returns its status and its output, stderr included.

    text: the standard input of the command. shown: whether the user sees the command, which reads
        nothing then, and each line of its output as it comes. limit: seconds after which a command
        that is not shown is killed.
    """
    child = Child(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace", **options,
    )  # fmt: skip
    try:
        if not shown:
            try:
                output, _ = child.process.communicate(text, limit)
            except subprocess.TimeoutExpired:
                child.kill()
                output, _ = child.process.communicate()
                output += f"\nerror: it did not end within {limit} seconds"
            return child.process.returncode, output
        show(f"$ {shlex.join(command)}\n")
        assert child.process.stdin and child.process.stdout
        child.process.stdin.close()
        lines = []
        with child.process.stdout as output_lines:
            for line in output_lines:
                show(line)
                lines.append(line)
        return child.process.wait(), "".join(lines)
    finally:
        child.close()


def kill_all() -> None:
    """Kill all running commands."""
    for child in tuple(_running):
        child.kill()


def end() -> None:
    """Kill all commands, also those that other threads start later: this process ends."""
    _ending.set()
    kill_all()


def _close_all() -> None:
    """Close the parent's pipes in a fork, where an open copy would keep a session alive."""
    for line in _lines:
        os.close(line)
    _lines.clear()
    _running.clear()


after_fork(_close_all, held=_starting)
