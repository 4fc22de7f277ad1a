"""Run a command with the caches of its JITs laid, and keep what it adds to them.

The command is a child with our standard streams, in our process group, and gets our signals: we
wait for it, since what it compiled is to be kept, pushed and reported when it has ended. It dies
with us, and we end as it did.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitkern import cache as cache_room, config, jit, remote
from jitkern.adopt import events, folders, jits
from jitkern.adopt.folders import KIND, Folder
from jitkern.adopt.machine import machine_of
from jitkern.cache import VERSION, layout
from jitkern.cache.store import Cache
from jitkern.errors import CacheError, JitkernError
from jitkern.files import atomic
from jitkern.named_tuple import NamedTuple

EVERY = 300.0  # seconds between two times that what is new is kept, while the command runs
SETTLED = 10.0  # seconds without a change before a file counts as whole, while the command runs
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_HERE = Path(__file__).parent
Tell = Callable[[str], object]


class Report(NamedTuple):
    """What a run compiled, was served, and added to the cache.

    compiles: events with tool, what, where and seconds. refused: compiles that were refused.
    laid, kept: files that came from the cache, and that went there. served: builds that were fresh.
    left_out: files that are not kept, with the reasons.
    """

    code: int
    seconds: float
    compiles: list[dict[str, Any]]
    refused: list[dict[str, Any]]
    served: int
    laid: int
    kept: int
    left_out: list[str]

    @property
    def by_tool(self) -> dict[str, tuple[int, float]]:
        """The number and the seconds of compiles by tool."""
        sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for event in self.compiles:
            number, seconds = sums[event["tool"]]
            sums[event["tool"]] = number + 1, seconds + event.get("seconds", 0.0)
        return dict(sums)


class Run:
    """A command with its folders. Use as a context, in which `execute` is called once."""

    def __init__(
        self, command: Sequence[str], *, mode: str = "", tell: Tell = lambda _: None
    ) -> None:
        """Find the machine and the folders. mode: "", "warn" or "frozen". Raises JitkernError."""
        settings = config.current()
        self._command = [*command]
        self._mode = mode
        self._tell = tell
        self._environment = dict(settings.environment)
        self.machine = machine_of(command, self._environment)
        self.cache = _writable_cache()
        self._caches = self.cache.root / VERSION / layout.JITS / str(self.machine.target)
        self.folders = [
            Folder(self.cache, self.machine, row)
            for row in jits.JITS
            if row.variables and not {*row.variables} & {*self._environment}
        ]
        self._laid = 0
        self._kept = 0
        self._left_out: dict[str, None] = {}

    def lay(self) -> None:
        """Fill the folders from the remotes of the settings and from the cache."""
        for url in () if config.current().offline else config.current().remote:
            self._pull(url)
        target = str(self.machine.target)

        def named(place: str, name: str) -> bool:
            return place == target and name.startswith(f"{KIND}.")

        names = sorted({path.name for _, path in self.cache.places(named)})
        for folder in self.folders if names else ():
            try:
                if folder.missing(names):
                    with self._locked(folder):
                        self._laid += folder.lay(folder.missing(names))
            except CacheError as e:
                self._tell(f"the cache of {folder.jit.name} is not filled: {e}")

    def execute(self) -> Report:
        """Run the command, and keep what is new; return what happened."""
        started = time.monotonic()
        with _scratch(self.cache.root) as scratch:
            environment = {**self._environment, **self._variables(scratch)}
            code = self._supervised(environment)
            self.keep()
            folders.sweep(self.cache, config.current().max_age)
            happened = _events(scratch)
        return Report(
            code, time.monotonic() - started,
            [event for event in happened if "tool" in event and "refused" not in event],
            [event for event in happened if "refused" in event],
            sum("served" in event for event in happened),
            self._laid, self._kept, [*self._left_out],
        )  # fmt: skip

    def keep(self, *, settled: float = 0.0) -> None:
        """Publish what is new in the folders, as far as the cache can be written."""
        for folder in self.folders:
            if not folder.path.is_dir() or not folder.has_new():
                continue
            try:
                with self._locked(folder):
                    done = folder.keep(settled=settled)
            except CacheError as e:
                self._tell(f"what {folder.jit.name} compiled is not kept: {e}")
                continue
            self._kept += done.files
            if not settled:
                self._left_out.update(dict.fromkeys(done.left_out))

    def _pull(self, url: str) -> None:
        """Fetch what a remote has for this machine; a remote that fails is left alone."""
        try:
            store = remote.opening.opened(url)
            keys = remote.trust.keys_for(url, config.current())
            place = remote.layout.machine_of(str(self.machine.target))
            done = remote.pull.pull(self.cache, store, [place], keys)
        except (JitkernError, remote.store.Unavailable) as e:
            self._tell(f"the remote {url} is not used: {e}")
        else:
            for line in done.failed:
                self._tell(line)

    @contextlib.contextmanager
    def _locked(self, folder: Folder) -> Iterator[None]:
        """Hold the lock of a folder: the ranks of a host lay and keep one after the other."""
        with cache_room.lock.held(folder.lock, f"the cache of {folder.jit.name}", doing="filling"):
            yield

    def _variables(self, scratch: Path) -> dict[str, str]:
        """Return the environment of the command, beside that of the user."""
        path = self._environment.get("PATH", os.defpath)
        python = self._environment.get("PYTHONPATH")
        variables = {
            events.FOLDER: str(scratch),
            events.MODE: self._mode,
            events.CACHES: str(self._caches),
            events.COMMAND: shlex.join(["jitkern", "run", "--", *self._command]),
            "PATH": os.pathsep.join((str(_shims(scratch, path)), path)),
            "PYTHONPATH": os.pathsep.join(p for p in (str(_HERE / "site"), python) if p),
            **{k: v for folder in self.folders for k, v in folder.variables().items()},
        }
        nvcc = shutil.which("nvcc", path=path)
        if nvcc and not {"CUDA_HOME", "CUDA_PATH"} & {*self._environment}:
            variables["CUDA_HOME"] = str(Path(nvcc).parents[1])  # many look for nvcc on PATH
        if self._mode == "frozen" and "JITKERN_COMPILE" not in self._environment:
            variables["JITKERN_COMPILE"] = "never"
        if self.cache.root != config.current().cache_dir:  # that one cannot be written
            return variables
        return {"JITKERN_CACHE_DIR": str(self.cache.root), **variables}

    def _supervised(self, environment: Mapping[str, str]) -> int:
        """Run the command to its end; return its exit code, negative for a signal."""
        passed = [s for s in signal.valid_signals() if s not in _NOT_PASSED]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed, signal.SIGCHLD})
        try:
            child = _started(self._command, environment, before)
            due = time.monotonic() + EVERY
            while True:
                due = self._kept_until(due)
                got = signal.sigtimedwait(
                    {*passed, signal.SIGCHLD}, max(0.0, due - time.monotonic())
                )
                if got is not None and got.si_signo != signal.SIGCHLD:
                    if got.si_code <= 0:  # sent to us alone: a terminal sends to the whole group
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child, got.si_signo)
                    continue
                for done, status in _ended_children():  # as process 1, also of others
                    if done == child and os.WIFSTOPPED(status):
                        os.kill(os.getpid(), signal.SIGSTOP)
                        os.kill(child, signal.SIGCONT)
                    elif done == child:
                        return os.waitstatus_to_exitcode(status)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _kept_until(self, due: float) -> float:
        """Keep what is new, in another thread, if it is due; return when it is due again."""
        if time.monotonic() < due:
            return due
        threading.Thread(target=self.keep, kwargs={"settled": SETTLED}, daemon=True).start()
        return time.monotonic() + EVERY


_NOT_PASSED = {  # those that the kernel or a fault of ours sends, and those of a terminal's jobs
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGCHLD, signal.SIGTSTP,
    signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
}  # fmt: skip


def _started(command: list[str], environment: Mapping[str, str], mask: Iterable[int]) -> int:
    """Start a command that dies with us, with a mask of signals; return its process."""
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise FileNotFoundError(2, "there is no such command", command[0])
    end_with_parent = ctypes.CDLL(None).prctl
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        end_with_parent(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execve(program, command, environment)  # noqa: S606  no shell is wanted
    except OSError as e:
        os.write(2, f"jitkern run: {command[0]}: {e.strerror}\n".encode())
    os._exit(126)


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield each child that has ended or was stopped, with its status."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
            yield found


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """Yield a folder of this run alone, from which programs may be started."""
    temporary = Path(config.current().environment.get("TMPDIR", "/tmp"))  # noqa: S108
    usable = temporary.is_dir() and not os.statvfs(temporary).f_flag & os.ST_NOEXEC
    folder = (temporary if usable else root) / f"jitkern-run-{os.urandom(8).hex()}"
    try:
        folder.mkdir(0o700)
        yield folder
    finally:
        atomic.delete(folder)


def _shims(scratch: Path, path: str) -> Path:
    """Make a folder for PATH with ninja and the compilers that are there, in front of them."""
    folder = scratch / "bin"
    folder.mkdir()
    (scratch / "pids").mkdir()
    for name in jits.COMPILERS:
        if shutil.which(name, path=path):
            (folder / name).symlink_to(_HERE / "compiler.sh")
    ninja = folder / "ninja"
    ninja.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -SE {_HERE / "ninja.py"} "$0" "$@"\n'
    )
    ninja.chmod(0o700)
    return folder


def _events(scratch: Path) -> list[dict[str, Any]]:
    """Return what processes of a run have noted."""
    events_of = []
    with contextlib.suppress(OSError):
        for line in (scratch / events.FILE).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                events_of.append(json.loads(line))
    return [event for event in events_of if isinstance(event, dict)]


def _writable_cache() -> Cache:
    """Return the cache of the settings, or a private one above it if it cannot be written."""
    cache = jit.active_cache.open_cache()
    try:
        if os.access(cache.root / VERSION, os.W_OK):
            return cache
        with cache.staging():  # which makes the root
            return cache
    except CacheError as e:
        private = jit.active_cache.use_temporary(e)
        return Cache.private(
            (cache.root, *cache.layers), verify=private.verify, rules=private.rules
        )
