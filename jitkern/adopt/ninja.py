"""Stands for ninja on the PATH of a run: a build that was laid is served if it is proven fresh.

Ninja knows paths and times, and would build again whatever came from elsewhere. So a build below
our folder leaves a record beside its `build.ninja`: the text of that file and the content of all
that the compilers read. Where both are the same, there is nothing to do. All else is left to the
real ninja. This file is run by itself, with the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType

RECORD = "jitkern.json"
SEEN = ".ninja_jitkern"  # sizes and times of the files that were compared last, on this machine
_PACKAGES = re.compile(r"(/[^\s:\"'$]*?/(?:site|dist)-packages)(?=/|\s|$)")
_INCLUDES = re.compile(r"(?<=\s)-(?:I|isystem)\s*([^\s$]+)")


def _beside(name: str) -> ModuleType:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    module = ModuleType(name)
    SourceFileLoader(name, path).exec_module(module)
    return module


events = _beside("events")


class NinjaBuild:
    """A build by ninja: the folder where it runs, and the file that it follows."""

    def __init__(self, folder: str, file: str) -> None:
        with open(file, encoding="utf-8", errors="surrogateescape") as opened:
            text = opened.read()
        self.folder = folder
        self.beside = os.path.dirname(os.path.abspath(file))
        self._includes = [*dict.fromkeys(_INCLUDES.findall(text))]
        anchors = {os.environ[events.CACHES]: "<caches>"}
        for name, paths in (("packages", _PACKAGES.findall(text)), ("include", self._includes)):
            for number, path in enumerate(dict.fromkeys(paths)):
                if os.path.isabs(path):
                    anchors.setdefault(path, f"<{name} {number}>")
        self._anchors = dict(sorted(anchors.items(), reverse=True))  # the inner folders first
        self.text = self._moved(text)

    def _moved(self, text: str) -> str:
        """Return a text without the paths in which machines may differ."""
        for path, anchor in self._anchors.items():
            text = re.sub(re.escape(path) + r"""(?=[/\s:"'$]|$)""", anchor, text)
        return text

    def _found(self, path: str) -> str:
        """Return the path on this machine of what `_moved` returned."""
        for place, anchor in self._anchors.items():
            if path.startswith(anchor):
                path = place + path[len(anchor) :]
        return os.path.normpath(os.path.join(self.folder, path))

    def is_fresh(self) -> bool:
        """Return whether the last build, here or elsewhere, is what a build would make now."""
        try:
            with open(os.path.join(self.beside, RECORD), encoding="utf-8") as file:
                record = json.load(file)
            if record["text"] != _sha256(self.text.encode(errors="surrogateescape")):
                return False
            read = {self._found(path): digest for path, digest in record["read"].items()}
            made = [self._found(path) for path in record["made"]]
            return all(map(os.path.isfile, made)) and self._unshadowed(read) and self._same(read)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False

    def _same(self, read: dict[str, str]) -> bool:
        """Return whether files have these digests; files as they were last time are not read."""
        path = os.path.join(self.beside, SEEN)
        try:
            with open(path, encoding="utf-8") as file:
                seen = json.load(file)
        except (OSError, ValueError):
            seen = {}
        now = {name: [*_stamp(name), digest] for name, digest in read.items()}
        for name, stamp in now.items():
            if seen.get(name) != stamp and _digest(name) != stamp[-1]:
                return False
        if now != seen:
            _write(path, now)
        return True

    def _unshadowed(self, read: dict[str, str]) -> bool:
        """Return whether no header lies where it would be found before one that was read."""
        roots = [os.path.normpath(os.path.join(self.folder, root)) for root in self._includes]
        for number, root in enumerate(roots):
            inner = [path[len(root) :] for path in read if path.startswith(f"{root}{os.sep}")]
            for earlier in roots[:number]:
                if any(
                    os.path.exists(f"{earlier}{path}") and f"{earlier}{path}" not in read
                    for path in inner
                ):
                    return False
        return True

    def keep_record(self, ninja: str, file: str, started: float) -> None:
        """Write down what a finished build depends on, if that can be told."""

        def ask(*what: str) -> list[str]:
            command = [ninja, "-C", self.folder, "-f", file, "-t", *what]
            done = subprocess.run(command, check=True, capture_output=True)
            return [
                line
                for line in os.fsdecode(done.stdout).splitlines()
                if not line.startswith("ninja: ")
            ]

        try:
            made = {line.rpartition(":")[0] for line in ask("targets", "all")}
            last = [line.rpartition(":")[0] for line in ask("targets", "depth", "1")]
            known = {line.strip() for line in ask("deps") if line.startswith("    ")}
            names = {*ask("inputs", *last), *known} - made
        except (OSError, subprocess.CalledProcessError):
            return
        paths = [os.path.normpath(os.path.join(self.folder, name)) for name in names]
        paths = [path for path in paths if os.path.isfile(path)]
        if any(_stamp(path)[1] >= started * 1e9 for path in paths):
            return  # edited while it was built
        record = {
            "text": _sha256(self.text.encode(errors="surrogateescape")),
            "read": {self._moved(path): _digest(path) for path in sorted(paths)},
            "made": [self._moved(path) for path in last if path in made],
        }
        _write(os.path.join(self.beside, RECORD), record)


def main() -> int:
    """Do what ninja would, or nothing where nothing is to do; return the exit code."""
    here, arguments = os.path.dirname(sys.argv[1]), sys.argv[2:]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    real = shutil.which("ninja", path=os.pathsep.join(f for f in folders if f != here))
    file = _file_of(arguments)
    if "--version" in arguments and not real:
        sys.stdout.write("1.11.1\n")  # what asks whether there is one, finds this one
        return 0
    if not file:
        return _exec(real, arguments)
    build = NinjaBuild(_option(arguments, "-C") or os.getcwd(), file)
    if build.is_fresh():
        events.note(served="ninja", what=build.beside)
        sys.stdout.write("ninja: no work to do.\n")
        return 0
    if os.environ.get(events.MODE):
        message = events.refusal("ninja", build.beside, f"process {os.getppid()}")
        sys.stderr.write(f"{message}\n")
        if os.environ[events.MODE] == "frozen":
            events.note(
                tool="ninja", what=build.beside, where=f"process {os.getppid()}", refused=True
            )
            return 1
    if not real:
        return _exec(real, arguments)
    started = time.time()
    code = subprocess.call([real, *arguments])
    if not code:
        events.note(tool="ninja", what=build.beside, seconds=round(time.time() - started, 3))
        build.keep_record(real, os.path.abspath(file), started)
    return code


def _file_of(arguments: list[str]) -> str:
    """Return the file of a plain build below the folder of our caches, or ""."""
    caches = os.environ.get(events.CACHES)
    named = [
        word
        for word in arguments
        if word.startswith("-") and word[:2] not in ("-C", "-f", "-j", "-v", "-k", "-l")
    ]
    folder = _option(arguments, "-C") or os.getcwd()
    file = os.path.join(folder, _option(arguments, "-f") or "build.ninja")
    below = caches and os.path.realpath(file).startswith(os.path.realpath(caches) + os.sep)
    return file if below and not named and os.path.isfile(file) else ""


def _option(arguments: list[str], letter: str) -> str:
    for number, word in enumerate(arguments):
        if word.startswith(letter):
            return word[2:] or (arguments[number + 1] if number + 1 < len(arguments) else "")
    return ""


def _exec(real: str | None, arguments: list[str]) -> int:
    if not real:
        sys.stderr.write("ninja: not found\n")
        return 127
    return os.execv(real, [real, *arguments])  # noqa: S606  no shell is wanted


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return _sha256(file.read())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _write(path: str, value: object) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, sort_keys=True)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
