"""The start of `jitkern run` where nothing is new, which imports next to nothing.

A run leaves a note: the machine and the environment of its command, and the facts that these
follow from. While they hold, the command starts at once. `run` and all that it needs is imported
while the command runs, and not at all for one that ends soon and leaves nothing to keep or to tell.
"""

from __future__ import annotations

import _thread
import fcntl
import marshal
import os
import sys
import time

import jitkern._command as command_room
import jitkern.adopt.events as events  # noqa: PLR0402

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

SOON, LATE = 0.1, 1.0  # seconds after which `run` is imported, and takes over
MODES = {"--frozen": "frozen", "--warn": "warn"}
QUIET = ("-q", "--quiet")
LOCK = "lock"  # in the folder of a run, held while it goes on
USED = ".used"  # behind the name of a folder: a file whose time is that of its last use
begun: list[RunningCommand] = []  # what runs already when `run` is imported


class RunningCommand(command_room.ChildCommand):
    """A command with a folder in which its processes note what happens.

    note: its facts, variables and machine. folders: with their last changes, if begun by a note.
    """

    note: tuple[Any, Any, Any]
    folders: Sequence[tuple[str, int]] = ()

    def __init__(
        self, program: str, words: Sequence[str], environment: Mapping[str, str], mode: str
    ) -> None:
        """Start it. environment: also says where the caches are. Raises OSError."""
        self.program = program
        version = os.path.dirname(os.path.dirname(environment[events.CACHES]))
        self.scratch = os.path.join(version, "tmp", os.urandom(16).hex())  # swept as staging is
        os.mkdir(self.scratch, 0o700)
        self.began = os.stat(self.scratch).st_mtime_ns  # by the clock of that disk
        self._lock = os.open(f"{self.scratch}/{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        try:  # noqa: SIM105  contextlib would take longer to import
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:
            pass  # this disk has no locks, and none may say that it is alone
        frozen = {"JITKERN_COMPILE": "never"} if mode == "frozen" else {}  # an outer one set it
        self._outer = environment.get(events.FOLDER)  # of a run that this one is part of
        modes = {mode, environment.get(events.MODE, "")}
        own = {
            events.FOLDER: self.scratch,
            events.MODE: next((m for m in ("frozen", "warn") if m in modes), ""),
            events.COMMAND: events.SEPARATOR.join(("jitkern", "run", "--", *words)),
        }
        super().__init__(program, words, {**frozen, **environment, **own})

    def left_nothing(self) -> bool:
        """Return whether all is as a note said; if so, the folders have been used."""
        noted = not self.folders or os.path.exists(f"{self.scratch}/{events.FILE}")
        if noted or any(newest(name) != before for name, before in self.folders):
            return False
        for name, before in self.folders:
            if before:
                open(f"{name}{USED}", "w").close()  # its time is that of the last use
        return True

    def is_alone(self) -> bool:
        """Return whether no other run with this cache goes on, as far as can be told."""
        folder, own = os.path.split(self.scratch)
        try:
            for name in {*os.listdir(folder)} - {own}:
                if os.path.exists(f"{folder}/{name}/{LOCK}"):
                    other = os.open(f"{folder}/{name}/{LOCK}", os.O_RDWR)
                    try:
                        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    finally:
                        os.close(other)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Delete what the processes noted, hand it to an outer run, and take signals again."""
        try:
            if self._outer and os.path.exists(f"{self.scratch}/{events.FILE}"):
                with (
                    open(f"{self.scratch}/{events.FILE}", "rb") as noted,
                    open(f"{self._outer}/{events.FILE}", "ab") as file,
                ):
                    file.write(noted.read())
            for name in os.listdir(self.scratch):
                os.unlink(f"{self.scratch}/{name}")
            os.rmdir(self.scratch)
        except OSError:
            pass  # a process that outlives the command notes something right now
        os.close(self._lock)
        super().close()


def note_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the path of the note about a program, or "" if it depends on the current directory."""
    home = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    root = environment.get("JITKERN_CACHE_DIR") or f"{home}/jitkern"
    search = [environment.get("PATH", ""), environment.get("PYTHONPATH") or "/"]
    places = [root, *os.pathsep.join(search).split(os.pathsep)]
    if not words or words[0].find("/") > 0 or not all(map(os.path.isabs, places)):
        return ""
    return f"{root}/v1/run/starts/{words[0].replace('/', '%')}"


def fact(kind: str, name: str, environment: Mapping[str, str]) -> str:
    """Return what is so now of a file, its owner and mode, variables that begin so, or the machine.

    Raises OSError.
    """
    if kind == "variables":
        return str(sorted(item for item in environment.items() if item[0].startswith(name)))
    if kind == "machine":
        devices = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia"))
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{os.uname()} {os.geteuid()} {devices} {file.read()}"
    try:
        status = os.stat(name)
    except OSError:
        return ""
    if kind == "owner":
        return f"{status.st_dev} {status.st_ino} {status.st_mode} {status.st_uid}"
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def newest(folder: str) -> int:
    """Return when something below a folder was last changed, in nanoseconds; 0 without one."""
    try:
        latest = os.stat(folder).st_ctime_ns
        with os.scandir(folder) as items:
            for item in items:
                inner = item.is_dir(follow_symlinks=False)
                changed = item.stat(follow_symlinks=False).st_ctime_ns
                latest = max(latest, newest(item.path) if inner else changed)
    except OSError:
        return time.time_ns() if os.path.isdir(folder) else 0
    return latest


def begin(arguments: Sequence[str], load: Callable[[], object]) -> int | None:
    """Begin the command of `jitkern run` if nothing is new; return its code if nothing came of it.

    load: imports `run`. None: the command is not `begun`, or `run` has something to do at its end.
    """
    words, mode, quiet = _command_in(arguments)
    try:
        with open(note_of(words, os.environ), "rb") as file:
            note, entries, folders, program = marshal.load(file)  # noqa: S302  it is ours
        facts, variables, _ = note
        if any(fact(kind, name, os.environ) != value for kind, name, value in (*facts, *entries)):
            return None
        if any(newest(n) != last or (last and not os.access(n, os.W_OK)) for n, last in folders):
            return None
        command = RunningCommand(program, words, {**os.environ, **variables}, mode)
    except (OSError, ValueError, EOFError, TypeError):
        return None
    command.note, command.folders = note, folders
    begun.append(command)
    code = command.wait(command.started + SOON)
    loaded = _thread.allocate_lock()
    if code is None:
        loaded.acquire()
        _thread.start_new_thread(_load, (load, loaded))
        code = command.wait(command.started + LATE)
    if code is None or not command.left_nothing():
        loaded.acquire()  # two threads that import may meet modules that are not whole
        return None
    begun.pop().close()
    if sys.stderr and not quiet:
        try:  # noqa: SIM105  contextlib would take longer to import
            os.write(2, b"jitkern: compiled: nothing\n")
        except OSError:
            pass  # nobody reads it
    return code


def _load(load: Callable[[], object], loaded: _thread.LockType) -> None:
    try:
        load()
    except Exception:  # noqa: BLE001, S110  the main thread meets it again, and tells it
        pass
    finally:
        loaded.release()


def finish() -> None:
    """Wait for a command that is `begun` still: what should have waited for it has failed."""
    while begun:
        while begun[0].wait(time.monotonic() + 3600.0) is None:
            pass
        begun.pop().close()


def _command_in(arguments: Sequence[str]) -> tuple[Sequence[str], str, bool]:
    """Return the command of plain arguments of `jitkern run`, the mode, and whether it is quiet.

    No command of other arguments.
    """
    options, words = [], [*arguments]
    while words and words[0] in (*MODES, *QUIET):
        options.append(words.pop(0))
    modes = {MODES[option] for option in options if option in MODES}
    ends = words[:1] == ["--"]
    unknown = not ends and "".join(words[:1]).startswith("-")
    if unknown or len(modes) > 1 or "_ARGCOMPLETE" in os.environ:
        return (), "", False
    return words[ends:], "".join(modes), any(option in QUIET for option in options)
