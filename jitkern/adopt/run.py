"""Run a command with the caches of its JITs laid, and keep what it adds to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import marshal
import os
import pickle
import re
import shlex
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jitkern import cache as cache_room, config, jit, remote
from jitkern.adopt import events, folders, jits, start
from jitkern.adopt.folders import Folder
from jitkern.adopt.machine import machine_of
from jitkern.cache import VERSION, layout
from jitkern.cache.store import Cache
from jitkern.errors import CacheError, JitkernError
from jitkern.files import atomic
from jitkern.named_tuple import NamedTuple

_ROOM = 1 << 16  # bytes that a cache must have room for
EVERY = 300.0  # seconds between two times that what is new is kept, while the command runs
UNKEPT = 600 * 10**9  # nanoseconds after which a run that still goes on has kept what it wrote
SETTLED = 10.0  # seconds without a change before a file counts as whole, while the command runs
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
    """A command with its folders; `execute` is called once."""

    def __init__(
        self, command: Sequence[str], *, mode: str = "", tell: Tell = lambda _: None
    ) -> None:
        """Find the machine and the folders. mode: "", "warn" or "frozen".

        Raises JitkernError, and FileNotFoundError where there is no such command.
        """
        self._words = [*command]
        self._mode = mode
        self._tell = tell
        self._environment = dict(config.current().environment)
        if start.begun:
            self.machine = pickle.loads(start.begun[0].note[2])  # noqa: S301  of a note of ours
        else:
            self.machine = machine_of(command, self._environment)
        self.cache = _writable_cache(tell)
        self._lasts = self.cache.root == config.current().cache_dir  # else private
        self._target = str(self.machine.target)
        self._caches = self.cache.root / VERSION / layout.JITS / self._target
        self.folders = [
            Folder(self.cache, self.machine, row)
            for row in jits.JITS
            if row.variables and not {*row.variables} & {*self._environment}
        ]
        self._laid = 0
        self._kept = 0
        self._differ: tuple[str, ...] = ()
        self._left_out: dict[str, None] = {}

    def lay(self) -> None:
        """Fill the folders from the remotes of the settings and from the cache."""
        for url in config.current().remotes:
            self._pull(url)
        for folder in self.folders:
            try:
                self._laid += folder.lay()
            except CacheError as e:
                self._tell(f"the cache of {folder.jit.name} is not filled: {e}")

    def execute(self) -> Report:
        """Lay and run the command, unless it is `begun`, keep what is new; return what happened."""
        settings = config.current()
        command = start.begun.pop() if start.begun else self._begin()
        try:
            while (code := command.wait(time.monotonic() + EVERY)) is None:
                with contextlib.suppress(OSError):  # the cache was deleted
                    os.utime(command.scratch)  # it is in use
                # In a thread: a signal must not wait.
                arguments = SETTLED, command.began
                threading.Thread(target=self.keep, args=arguments, daemon=True).start()
            happened = _events(command.scratch)
            if not command.left_nothing():
                paths = [str(folder.path) for folder in self.folders]
                newest = [(path, start.newest(path)) for path in paths]
                lost = command.began - (0 if code else UNKEPT)
                self.keep(began=command.began, lost=lost if command.is_alone() else 0)
                folders.sweep(self.cache, max_size=settings.max_size, max_age=settings.max_age)
                self._leave_note(newest, command)
        finally:
            command.close()
        return Report(
            code, time.monotonic() - command.started,
            [event for event in happened if "tool" in event and "refused" not in event],
            [event for event in happened if "refused" in event],
            sum("served" in event for event in happened),
            self._laid, self._kept, [*self._left_out],
        )  # fmt: skip

    def keep(self, settled: float = 0.0, began: int = 0, lost: int = 0) -> None:
        """Publish what is new in the folders, as far as the cache can be written.

        The arguments are those of `Folder.keep`.
        """
        for folder in self.folders:
            try:
                done = folder.keep(settled, began, lost)
            except CacheError as e:
                self._tell(f"what {folder.jit.name} compiled is not kept: {e}")
                self._left_out[f"{folder.jit.name}: {e}"] = None
                continue
            self._kept += done.files if self._lasts else 0
            if not settled:
                self._left_out.update(dict.fromkeys(done.left_out))
                self._differ += done.differ
                for line in done.differ:
                    self._tell(f"{folder.path}/{line}")

    def _begin(self) -> start.RunningCommand:
        own = self._variables()
        facts = self._found(own["PATH"].partition(os.pathsep)[0])
        self.lay()
        program = shutil.which(self._words[0], path=own["PATH"]) or self._words[0]
        variables = {**self._environment, **own}
        command = start.RunningCommand(program, self._words, variables, self._mode)
        command.note = facts, own, pickle.dumps(self.machine)
        return command

    def _pull(self, url: str) -> None:
        """Fetch what a remote has for this machine; a remote that fails is left alone."""
        try:
            store = remote.opening.opened(url)
            keys = remote.trust.keys_for(url, config.current())
            place = remote.layout.machine_of(self._target)
            done = remote.pull.pull(self.cache, store, [place], keys)
        except (JitkernError, remote.store.Unavailable) as e:
            self._tell(f"the remote {url} is not used: {e}")
        else:
            for line in done.failed:
                self._tell(line)

    def _variables(self) -> dict[str, str]:
        """Return the environment of the command, beside that of the user."""
        for place in (self._caches, self.cache.root / VERSION / "tmp"):
            atomic.make_directory(place, 0o755, fsync=False)
        path = self._environment.get("PATH", os.defpath)
        python = self._environment.get("PYTHONPATH")
        variables = {
            events.CACHES: str(self._caches),
            "PATH": os.pathsep.join((*self._tools(path), path)),
            "PYTHONPATH": os.pathsep.join(p for p in (str(_HERE / "site"), python) if p),
        }
        for folder in self.folders:
            row = {**dict.fromkeys(folder.jit.variables, str(folder.path)), **dict(folder.jit.also)}
            variables |= {n: value for n, value in row.items() if n not in self._environment}
        nvcc = shutil.which("nvcc", path=path)
        if nvcc and not {"CUDA_HOME", "CUDA_PATH"} & {*self._environment}:
            variables["CUDA_HOME"] = str(Path(nvcc).parents[1])  # many look for nvcc on PATH
        if self._lasts:  # otherwise that cannot be written
            variables = {"JITKERN_CACHE_DIR": str(self.cache.root), **variables}
        return variables

    def _tools(self, path: str) -> list[str]:
        """Return the folder with the shims of ninja and the compilers on PATH, made if need be.

        None where no folder of ours may hold programs.
        """
        programs: set[str] = set()
        for folder in path.split(os.pathsep):
            with contextlib.suppress(OSError):
                programs.update([] if events.TOOLS in folder else os.listdir(folder))
        names = sorted(filter(re.compile(events.COMPILERS).fullmatch, programs))
        main = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import shim; sys.exit(shim.main())"
        words = [sys.executable, "-SI", "-c", main]
        text = f'#!/bin/sh\nexec {shlex.join(words)} "$0" "$@"\n'
        name = f"{events.TOOLS}{hashlib.sha256(f'{names} {text}'.encode()).hexdigest()[:16]}"
        place: Path | None = self._caches.parent
        if os.pathsep in str(place) or os.statvfs(self._caches).f_flag & os.ST_NOEXEC:
            place = cache_room.lock.lock_directory(config.current())
        if place is None or os.statvfs(place).f_flag & os.ST_NOEXEC:
            return []
        tools = place / name
        if not (tools / "ninja").exists():
            tools.mkdir(0o700, exist_ok=True)
            for compiler in names:
                with contextlib.suppress(FileExistsError):  # another process was faster
                    (tools / compiler).symlink_to("ninja")
            atomic.write(tools / "ninja", text.encode(), mode=0o700)
        return [str(tools)]

    def _found(self, tools: str) -> list[tuple[str, str, str]]:
        """Return the facts of which the environment and the folders follow; see `start.fact`."""
        program, *places = self.machine.places
        files = [
            *self._environment.get("PATH", os.defpath).split(os.pathsep), program, *places, tools,
            *filter(os.path.isabs, sys.path), *_HERE.rglob("*.py"),
            config.settings.SYSTEM_FILE, config.settings.user_file(self._environment),
            *self.cache.layers,
        ]  # fmt: skip
        rows = (name for row in jits.JITS for name in (*row.variables, *dict(row.also)))
        owned = (self.cache.root, *self.cache.root.parents)
        return [
            *self._facts("machine", [""]), *self._facts("variables", {*_VARIABLES, *rows}),
            *self._facts("file", files), *self._facts("owner", owned),
        ]  # fmt: skip

    def _facts(self, kind: str, names: Iterable[str | Path]) -> list[tuple[str, str, str]]:
        return [(kind, name, start.fact(kind, name, self._environment)) for name in map(str, names)]

    def _leave_note(self, newest: list[tuple[str, int]], command: start.RunningCommand) -> None:
        """Leave what `start` needs for the next run of this program, if that has nothing to lay.

        newest: the last changes of which everything is kept.
        """
        path = Path(start.note_of(self._words, self._environment))
        if config.current().remotes or not path.is_relative_to(self.cache.root):
            return
        roots = (self.cache.root, *self.cache.layers)
        entries = self._facts("file", [root / VERSION / self._target for root in roots])
        if not self._differ and not any(folder.missing() for folder in self.folders):
            with contextlib.suppress(OSError):
                atomic.make_directory(path.parent, 0o700, fsync=False)
                content = command.note, entries, newest, command.program
                atomic.write(path, marshal.dumps(content))


_VARIABLES = (  # those that begin so matter to what a run finds out
    "JITKERN_", "XDG_", "CUDA_", "PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "HOME",
    "TMPDIR",
)  # fmt: skip


def _events(scratch: str) -> list[dict[str, Any]]:
    """Return what processes of a run have noted."""
    noted = []
    with contextlib.suppress(OSError):
        for line in Path(scratch, events.FILE).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # it was cut by a full disk
                noted.append(json.loads(line))
    return noted


def _writable_cache(tell: Tell) -> Cache:
    """Return the cache of the settings, or a private one above it if it cannot be written."""
    cache = jit.active_cache.open_cache()
    try:
        with cache.staging() as staging:  # which makes the root
            (staging / "room").write_bytes(bytes(_ROOM))
            return cache
    except (CacheError, OSError) as e:
        why = e if isinstance(e, CacheError) else cache.write_error(e)
        if config.current().fallback == "raise":
            raise why from e
        tell(f"nothing is kept: {why}")
        return Cache.private((cache.root, *cache.layers), verify=cache.verify, rules=cache.rules)
