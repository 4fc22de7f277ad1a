"""The shim of ninja and of the compilers on the PATH of a run.

A compiler is counted, or refused. Ninja knows paths and times: it would build again what came from
elsewhere, and not build again what has an older time. So a build below our folder leaves a record
beside its `build.ninja`: the text of that file, and the content of all that the compilers read and
made. Where these are the same, there is nothing to do; otherwise the real ninja builds all of it.
This file is imported by itself, with the standard library alone, of which as little as can be:
most often there is nothing to do.
"""

from __future__ import annotations

import contextlib
import getopt
import json
import os
import re
import sys
import time

TYPE_CHECKING = __name__ == "jitkern.adopt.shim"
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from jitkern.adopt import events, jits
else:
    import events  # which are beside it
    import jits

SEEN = ".ninja_jitkern"  # sizes and times of the files that were compared last, on this machine
_SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")  # folders of headers
_VARIABLES = (  # with these, all that compilers read of the environment
    *_SEARCHED, "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS", "NVCC_CCBIN",
)  # fmt: skip
_PACKAGES = re.compile(r"(/[^\s:\"'$]*?/(?:site|dist)-packages)(?=/|\s|$)")
_LIBRARY = re.compile("^/usr/|/(?:site|dist)-packages/")  # whose versions key the cache
_INCLUDES = re.compile(r"(?<=\s)-(?:I|isystem)\s*([^\s$]+)")


class NinjaBuild:
    """A build by ninja: the folder where it runs, and the file that it follows."""

    def __init__(self, ninja: str | None, folder: str, file: str) -> None:
        with open(file, encoding="utf-8", errors="surrogateescape") as opened:
            text = opened.read()
        self.tool = [ninja or "", "-C", folder, "-f", file, "-t"]
        self.beside = os.path.dirname(file)
        self._folder = folder
        searched = os.pathsep.join(os.environ.get(name, "") for name in _SEARCHED)
        found = [*_INCLUDES.findall(text), *filter(None, searched.split(os.pathsep))]
        self._includes = [*dict.fromkeys(found)]
        places = (os.environ[events.CACHES], *_PACKAGES.findall(text), *self._includes)
        absolute = dict.fromkeys(filter(os.path.isabs, places))
        anchors = {path: f"<{number}>" for number, path in enumerate(absolute)}
        self._anchors = dict(sorted(anchors.items(), reverse=True))  # the inner folders first
        text += "".join(f"\n{name}={os.environ.get(name, '')}" for name in _VARIABLES)
        self._text = self._moved(text)

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
        return os.path.normpath(os.path.join(self._folder, path))

    def stale(self) -> str:
        """Return why the last build, here or elsewhere, would give something else now, or ""."""
        try:
            record = _read(os.path.join(self.beside, jits.RECORD))
            if record["text"] != self._text:
                return "its build.ninja or a variable for compilers differs"
            files = {self._found(path): digest for path, digest in record["files"].items()}
            new = self._beside(files).difference(map(self._found, record["beside"]))
            return f"{min(new)} is new" if new else self._changed(files, record["compilers"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return "there is no record of its last build"

    def _changed(self, files: dict[str, str], compilers: dict[str, str]) -> str:
        """Return which file has another digest, or which compiler here another version, or "".

        Files that are as they were last time are not read.
        """
        if gone := [path for path in files if not os.path.isfile(path)]:
            return f"{gone[0]} is not there"
        seen = {}
        with contextlib.suppress(OSError, ValueError):
            seen = _read(os.path.join(self.beside, SEEN))
        here = {path: compilers[word] for word in compilers if (path := _real(word))}
        now = {name: [*_stamp(name), told] for name, told in {**files, **here}.items()}
        for name, stamp in now.items():
            asked = _version if name in here else _digest
            if seen.get(name) != stamp and asked(name) != stamp[-1]:
                return f"{name} differs"
        if now != seen:
            _write(os.path.join(self.beside, SEEN), now)
        return ""

    def _beside(self, files: Iterable[str]) -> set[str]:
        """Return what lies where a compiler may look for one of these files, and is none of them.

        It looks in the folders of headers, and in that of the file that includes another one.
        """
        names: dict[str, list[str]] = {}  # of these files, by their folders
        for folder, name in map(os.path.split, files):
            names.setdefault(folder, []).append(name)
        places = {os.path.normpath(os.path.join(self._folder, root)) for root in self._includes}
        places |= {folder for folder in names if not _LIBRARY.search(f"{folder}/")}
        having: dict[str, list[str]] = {}  # places by the names of what is in them
        for place in places:
            with contextlib.suppress(OSError):
                for name in os.listdir(place):
                    having.setdefault(name, []).append(place)
        found: set[str] = set()
        for folder, some in names.items():
            found |= {f"{place}/{name}" for name in some for place in having.get(name, ())}
            parts = folder.split("/")
            for number, part in enumerate(parts):
                for place in having.get(part, ()):
                    inner = "/".join((place, *parts[number:]))
                    if inner != folder and os.path.isdir(inner):
                        found |= {f"{inner}/{name}" for name in some}
        return {path for path in found.difference(files) if os.path.isfile(path)}

    def keep_record(self, started: int) -> None:
        """Write down what a finished build depends on, if that can be told.

        started: when, in nanoseconds.
        """
        import subprocess

        def ask(*what: str) -> list[str]:
            return os.fsdecode(subprocess.check_output([*self.tool, *what])).splitlines()

        def files_of(names: set[str]) -> set[str]:
            return {*filter(os.path.isfile, map(self._found, names))}

        try:
            made = {line.rpartition(":")[0] for line in ask("targets", "all")}
            last = {line.rpartition(":")[0] for line in ask("targets", "depth", "1")}
            names = {line.strip() for line in (*ask("targets", "rule"), *ask("deps"))}
            words = {"gcc", *" ".join(ask("commands")).split()}  # which nvcc starts
        except (OSError, subprocess.CalledProcessError):
            return
        read = files_of(names - made)
        if any(_stamp(path)[2] >= started for path in read):
            return  # edited while it was built
        compilers = (
            word for word in words if re.fullmatch(events.COMPILERS, os.path.basename(word))
        )
        used = {word: path for word in compilers if (path := _real(word))}
        files = read | files_of(last)
        seen = {path: [*_stamp(path), _version(path)] for path in used.values()}
        seen |= {path: [*_stamp(path), _digest(path)] for path in files}
        record = {
            "text": self._text,
            "files": {self._moved(path): seen[path][-1] for path in files},
            "compilers": {word: seen[path][-1] for word, path in used.items()},
            "beside": [*map(self._moved, self._beside(files))],
        }
        _write(os.path.join(self.beside, SEEN), seen)
        _write(os.path.join(self.beside, jits.RECORD), record)


def main() -> int:
    """Do what a tool would, or nothing where nothing is to do; return the exit code."""
    name, arguments = os.path.basename(sys.argv[1]), sys.argv[2:]
    real, what, where = _real(name), "", ""
    asked = os.environ.pop(events.ASKED, "").partition(events.SEPARATOR)
    build = _build_in(real, arguments) if name == "ninja" else None
    if build:
        why = build.stale()
        if not why:
            events.note(served="ninja", what=build.beside)
            sys.stdout.write("ninja: no work to do.\n")
            return 0
        what = f"{build.beside}, since {why}"
    elif asked[0] != name:  # else its Python process counts it
        what = events.compile_in([name, *arguments])[1]
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        where = os.fsdecode(file.read(300)).replace("\0", " ").strip()
    where = asked[2] or where
    remark = "" if build else "what is compiled for none of the JITs in docs/run.md is never kept"
    if what and (message := events.begins(name, what, where, remark)):
        sys.stderr.write(f"{message}\n")
        if os.environ[events.MODE] == "frozen":
            return 1
    if not real and name == "ninja" and "--version" in arguments:
        sys.stdout.write("1.11.1\n")  # what asks whether there is one, finds this one
        return 0
    if not real:
        sys.stderr.write(f"{name}: not found\n")
        return 127
    if not what:
        return os.execv(real, [real, *arguments])  # noqa: S606  no shell is wanted
    import subprocess

    changed, started = time.time_ns(), time.monotonic()
    if build:
        subprocess.run([*build.tool, "clean"], stdout=subprocess.DEVNULL, check=False)
    code = subprocess.call([real, *arguments])
    events.ended(name, what, where, started)
    if build and not code:
        build.keep_record(changed)
    return code if code >= 0 else 128 - code


def _build_in(ninja: str | None, arguments: list[str]) -> NinjaBuild | None:
    """Return the plain build below our caches that arguments of ninja ask for."""
    try:
        options = dict(getopt.gnu_getopt(arguments, "C:f:j:k:l:v")[0])
    except getopt.GetoptError:
        return None
    folder = os.path.abspath(options.get("-C", ""))
    file = os.path.join(folder, options.get("-f", "build.ninja"))
    caches = os.path.realpath(os.environ.get(events.CACHES, os.devnull))
    below = os.path.realpath(file).startswith(f"{caches}{os.sep}") and os.path.isfile(file)
    return NinjaBuild(ninja, folder, file) if below else None


def _real(name: str) -> str | None:
    """Return the path of a tool itself."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    paths = (os.path.join(folder, name) for folder in folders if events.TOOLS not in folder)
    return next((p for p in paths if os.path.isfile(p) and os.access(p, os.X_OK)), None)


def _digest(path: str) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _version(compiler: str) -> str:
    """Return what a compiler says of itself."""
    import subprocess

    asked = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    return os.fsdecode(asked.stdout)


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]  # the last cannot be set


def _read(path: str) -> Any:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return json.load(file)


def _write(path: str, value: object) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, sort_keys=True)
    os.replace(temporary, path)
