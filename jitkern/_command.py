"""A command that this process runs as if it were the command itself.

It has our standard streams, is in our process group, gets our signals, and dies with us. Linux
alone. `jitkern run` starts with this module, so it imports next to nothing.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import os
import time
from errno import ENOEXEC

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PASSED = signal.valid_signals() - {  # all but those of the kernel, of our faults, and of terminals
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGCHLD, signal.SIGTSTP,
    signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
}  # fmt: skip


class ChildCommand:
    """A command that runs: our child."""

    def __init__(self, program: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a program; from now on its signals are not ours. Raises OSError."""
        self.started = time.monotonic()
        self.code: int | None = None
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED, signal.SIGCHLD})
        self._child = _forked(program, words, environment, self._mask)

    def wait(self, until: float) -> int | None:
        """Return the exit code, negative for a signal, or None at `until`, by time.monotonic()."""
        while self.code is None:
            left = max(0.0, until - time.monotonic())
            got = signal.sigtimedwait({*_PASSED, signal.SIGCHLD}, left)
            if got is None:
                break
            for done, status in _ended_children():  # as process 1, also of others
                if done == self._child and os.WIFSTOPPED(status):
                    os.kill(os.getpid(), signal.SIGSTOP)
                    os.kill(done, signal.SIGCONT)
                elif done == self._child:
                    self.code = os.waitstatus_to_exitcode(status)
            if self.code is None and got.si_signo != signal.SIGCHLD and got.si_code <= 0:
                try:  # sent to us alone: a terminal sends to the whole group
                    os.kill(self._child, got.si_signo)
                except ProcessLookupError:
                    pass
        return self.code

    def close(self) -> None:
        """Take signals again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _forked(
    program: str, words: Sequence[str], environment: Mapping[str, str], mask: Iterable[int]
) -> int:
    """Start a program that dies with us, with a mask of signals; return its process."""
    from _ctypes import call_function, dlopen, dlsym  # `ctypes` takes as long as all the rest

    prctl = dlsym(dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        call_function(prctl, (DIE_WITH_PARENT, signal.SIGKILL))
        if os.getppid() == parent:
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
                signal.signal(ignored, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            try:
                os.execve(program, [*words], environment)  # noqa: S606  no shell is wanted
            except OSError as e:
                if e.errno != ENOEXEC:
                    raise
                os.execve("/bin/sh", ["sh", program, *words[1:]], environment)  # noqa: S606  as execvp
    except Exception as e:  # noqa: BLE001  also of audit hooks; the caller's code is the parent's
        os.write(2, f"{words[0]}: {getattr(e, 'strerror', e)}\n".encode())
    os._exit(126)


def _ended_children() -> Iterable[tuple[int, int]]:
    """Yield each child that has ended or was stopped, with its status."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
            yield found
    except ChildProcessError:
        pass


def end_as(code: int) -> int:
    """End as a command did, if it was ended by a signal; otherwise return its code."""
    if code < 0:
        import resource  # where it is needed alone

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        try:
            signal.signal(-code, signal.SIG_DFL)
        except (OSError, ValueError):
            pass  # SIGKILL, which has no handler
        os.kill(os.getpid(), -code)
    return code
