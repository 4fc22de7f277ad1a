"""The files a source depends on, found by reading text, with no compiler.

For C++ and CUDA: the source's files, the files that flags name by their paths (see `flags`), and
every `#include` that resolves in a searched directory, followed (see `includes`). Where a macro
names an `#include`, the closure holds every file of the kernel's folder and the names of the files
in the other directories. For Triton: the file and the modules of its own package that it imports,
read and not imported.

Flags and directives that read anything else are refused. The files that compiler, assembler and
linker opened are compared with this after each build (`compilers.dependencies.check`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jitkern import config, source as source_room
from jitkern.errors import DeclarationError
from jitkern.files import trust
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import Generated, Include, Source, shared_include

if TYPE_CHECKING:
    from jitkern.source.includes import File, Name

_SYSTEM = ("/usr/include", "/usr/lib")  # files there come with the compiler
_NEVER_COMPILED = frozenset(  # suffixes of Python, and of files that scripts write beside them
    (".py", ".pyc", ".log", ".md", ".so", ".o", ".pt", ".pth", ".safetensors", ".npy", ".npz")
)
_Path = TypeVar("_Path", str, Path)
_known: ContextVar[dict[Source, Closure] | None] = ContextVar("_known", default=None)


class Closure(NamedTuple):
    """All files of a source (label -> SHA-256), the versions of its versioned roots, and the paths.

    Labels are relative to the kernel's folder, or to the root a header was found in, so they are
    the same on any machine. Only a file that a text or a flag names by its whole path has that for
    a label.

    paths: the files themselves. named: the paths that led to them, by way of links perhaps.
    absent: the paths that would change the closure if something came to be there; None if these
        cannot be listed, because a macro names an `#include`.
    """

    files: dict[str, str]
    versions: dict[str, str]
    paths: frozenset[Path]
    named: frozenset[str] = frozenset()
    absent: frozenset[str] | None = None


@contextlib.contextmanager
def each_once() -> Iterator[None]:
    """Read the files of each source once within the block, for all of its variants."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def closure_of(source: Source) -> Closure:
    """Return the files that `source` is compiled from, with their digests.

    Raises DeclarationError for a file that does not exist, and for a flag or directive that reads
    what the key cannot cover.
    """
    known = _known.get()
    if known is None:
        return _closure_of(source)
    if source not in known:
        known[source] = _closure_of(source)
    return known[source]


def _closure_of(source: Source) -> Closure:
    if isinstance(source, Generated):
        digest = hashlib.sha256(source.text.encode()).hexdigest()
        return Closure({source.files[0]: digest}, {}, frozenset(), absent=frozenset())
    for path in source.paths:
        if not path.is_file():
            raise DeclarationError(missing(path))
    follow: type[_Modules | _Headers] = _Modules if source.in_python else _Headers
    followed = follow(source)
    files = list(followed.files())
    paths = frozenset(Path(path) for _, path, _ in files if path)
    absent = None if followed.absent is None else frozenset(followed.absent)
    return Closure(digests(files), _versions(source), paths, frozenset(followed.named), absent)


def closures_of(sources: Sequence[Source]) -> list[Closure]:
    """Return the current closures of C++ or CUDA sources; shared files are read once.

    They have no `named` and no `absent`.
    """
    shared: dict[object, _Headers] = {}
    known: dict[bytes, str] = {}
    closures = []
    for source in sources:
        alike = source.home, source.include, source.flags, source.environment
        headers = shared[alike] = shared.get(alike) or _Headers(source)
        files = list(headers.files(source.paths))
        paths = frozenset(Path(path) for _, path, _ in files if path)
        closures.append(Closure(digests(files, known), _versions(source), paths))
    return closures


def states(paths: Iterable[_Path]) -> dict[_Path, tuple[int, ...]]:
    """The state of each file that exists; any edit changes it."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = trust.state(os.stat(path))  # noqa: PTH116  of a text too
    return found


def missing(path: Path) -> str:
    """The message for a missing source, with the files of its kind in the folder."""
    if archive := next((str(p) for p in path.parents if p.is_file()), ""):
        return (
            f"the kernel source {path} lies in the file {archive}, and sources are read from "
            "folders: install the package unpacked, or declare the source by text="
        )
    beside = ", ".join(sorted(p.name for p in path.parent.glob(f"*{path.suffix}"))) or "none"
    return (
        f"the kernel source {path} does not exist (its folder has: {beside}): "
        "correct the name in the declaration, or restore the file (package data, in a wheel)"
    )


def digests(
    files: Iterable[tuple[str, str, bytes]], known: dict[bytes, str] | None = None
) -> dict[str, str]:
    """Label -> SHA-256 of files, given as (label, path, content).

    Where links lead to several files under one label, the later ones get a number. known: digests
    of contents, which grows.
    """
    known = {} if known is None else known
    owners: dict[str, str] = {}
    hashes: dict[str, str] = {}
    for label, path, data in files:
        unique, number = label, 1
        while owners.setdefault(unique, path) != path:
            number += 1
            unique = f"{label} {number}"
        hashes[unique] = known[data] = known.get(data) or hashlib.sha256(data).hexdigest()
    return dict(sorted(hashes.items()))


def _versions(source: Source) -> dict[str, str]:
    """The versions of versioned roots, by the root's name; a second `include` is `include 2`."""
    versions: dict[str, str] = {}
    for root in source.roots:
        if root.version:
            name = Path(root.path).name
            count = sum(known.partition(" ")[0] == name for known in versions)
            versions[f"{name} {count + 1}" if count else name] = root.version
    return versions


class _Headers:
    """The files of a C++ or CUDA source, followed from `#include` to `#include`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._flags = source_room.flags.words_of(source)
        added = self._added()
        self._roots = [*source.roots, *added, Include(source_room.includes.SITE)]
        self._all_matches = bool(added)  # a flag's directory may come before or after the others
        self._searched = [(root.path, root.version) for root in self._roots]
        self._is_searched = functools.cache(self._is_below_a_root)
        beside = Path(source.home).parent / "include"  # a root as soon as it is there
        self.absent: set[str] | None = set() if beside.is_dir() else {str(beside)}
        self.named: set[str] = set()
        self._memory = source_room.includes.Walked()

    def files(self, paths: Iterable[Path] = ()) -> Iterator[tuple[str, str, bytes]]:
        """Yield (label, path, content) of each file; of a listing of names, with no path.

        paths: of the units; by default those of the source.
        """
        queue = [self._file(path) for path in paths or self._source.paths]
        for name in source_room.flags.files(self._flags):
            queue += self._find(queue[0], source_room.includes.Name(name, quoted=True))
        whole, walk = False, source_room.includes.walk
        for label, path, data, computed in walk(queue, self._find, self._memory):
            yield label, path, data
            if computed and not whole:
                whole = True
                self.absent = None
                queue += self._folder()
                yield from self._listings(self._roots[:-1])

    def _added(self) -> list[Include]:
        """The directories searched because of flags, or of variables that the source names."""
        declared = [name for name in config.SEARCHED if name in self._source.environment]
        if not self._flags and not declared:
            return []
        known = [Path(root.path).resolve() for root in self._source.roots if root.version]
        known += map(Path, _SYSTEM)
        return [
            Include(path)
            for path in source_room.flags.searched(self._flags, declared)
            if not any(Path(path).resolve().is_relative_to(root) for root in known)
        ]

    def _file(self, path: Path) -> File:
        self.named.add(str(path))
        return source_room.includes.File(self._label(path), str(path))

    def _folder(self) -> list[File]:
        files = sorted(_files(Path(self._source.folder)))
        return [self._file(path) for path in files if path.suffix not in _NEVER_COMPILED]

    def _listings(self, roots: Iterable[Include]) -> Iterator[tuple[str, str, bytes]]:
        """List the names of the files in each root outside of the kernel's folder.

        The folder of jitkern's own headers is left out: it is searched last.
        """
        for root in roots:
            folder = Path(os.path.normpath(root.path))
            if root.path == shared_include():
                continue
            if root.version or folder.is_relative_to(self._source.folder) or not folder.is_dir():
                continue
            if names := sorted(os.path.relpath(path, folder) for path in _files(folder)):
                listing = "\0".join(names).encode(errors="surrogateescape")
                yield f"<{self._roots.index(root)}>/", "", listing

    def _find(self, includer: File, name: Name) -> list[File]:
        """Find the header of this name; several where the compiler may take any of them.

        A header of the toolchain or of a versioned root is left out.
        """
        above = os.path.dirname(includer.path)  # noqa: PTH120  an import has hundreds of such paths
        beside = [(above, "")] if name.quoted and self._is_searched(above) else []
        matches = []
        several = name.next_too or self._all_matches
        for folder, version in (*beside, *self._searched):
            path = os.path.join(folder, name.text)  # noqa: PTH118
            if os.path.isfile(path):  # noqa: PTH113  most are not
                matches.append((path, version))
            elif self.absent is not None and (several or not matches):
                self.absent.add(path)
        return [
            self._file(Path(path))
            for path, version in (matches if several else matches[:1])
            if not version
        ]

    def _is_below_a_root(self, folder: str) -> bool:
        path = Path(folder)
        return any(not root.version and path.is_relative_to(root.path) for root in self._roots)

    def _label(self, path: Path) -> str:
        """A label relative to the kernel's folder if the path is near, else to its root."""
        folder = self._source.folder
        if path.is_relative_to(shared := shared_include()) and not path.is_relative_to(
            Path(folder).parent / "include"
        ):
            return f"<jitkern>/{path.relative_to(shared).as_posix()}"  # even if the path is near
        relative = os.path.relpath(path, folder)
        if not relative.startswith(f"..{os.sep}.."):
            return Path(relative).as_posix()
        for number, root in enumerate(self._roots):
            if path.is_relative_to(root.path):
                return f"<{number}>/{path.relative_to(root.path).as_posix()}"
        return str(path)


def _files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All files below `folder`, without hidden files, virtual environments and caches."""
    above |= {folder.resolve()}
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in above and not any(  # a link may lead back
            (path / mark).exists() for mark in ("pyvenv.cfg", "CACHEDIR.TAG")
        ):
            yield from _files(path, above)


class _Modules:
    """The file and modules of a Triton source, followed from import to import in its package."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.absent: set[str] = set()
        self.named: set[str] = set()

    def files(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield (label, path, content) of each file."""
        folder = self._source.folder
        queue = [*map(str, self._source.paths)]
        queue += [os.path.join(folder, file) for file in self._source.others]  # noqa: PTH118
        while queue:
            path = queue.pop()
            if path in self.named:
                continue
            self.named.add(path)
            data = Path(path).read_bytes()
            label = os.path.relpath(path, folder).replace(os.sep, "/")
            yield label, os.path.realpath(path), data
            for module in imports_of(data):
                for candidate in module_files(self._source, path, module):
                    if os.path.isfile(candidate):  # noqa: PTH113  most are not
                        queue.append(candidate)
                    else:
                        self.absent.add(candidate)


@functools.lru_cache(maxsize=256)
def imports_of(text: bytes) -> list[tuple[int, str]]:
    """Return (level, dotted name) of each import statement of a text; level 0 is absolute."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []  # Python itself reports the error, with its line, when the file is compiled
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = (f"{base}.{alias.name}".strip(".") for alias in node.names)
            modules += [(node.level, name) for name in (base, *names)]
    return modules


def module_files(source: Source, importer: str, module: tuple[int, str]) -> list[str]:
    """The possible paths of a module of the source's package; none for other packages."""
    level, name = module
    parts = name.split(".") if name else []
    if parts[:1] == ["jitkern"] and parts[1:2] != ["kernels_src"]:
        return []  # jitkern itself is told by its version
    if level:
        base = os.path.join(importer, *[".."] * level)  # noqa: PTH118  texts import dozens
    else:
        package = source.package.split(".") if source.package else []
        shared = next(
            (i for i, (a, b) in enumerate(zip(parts, package)) if a != b),
            min(len(parts), len(package)),
        )
        if package and not shared:
            return []
        beside = str(source.paths[0].parent) if package else source.folder
        base = os.path.join(beside, *[".."] * (len(package) - shared))  # noqa: PTH118
        parts = parts[shared:]
    stem = os.path.normpath(os.path.join(base, *parts))  # noqa: PTH118
    return [f"{stem}.py", os.path.join(stem, "__init__.py")]  # noqa: PTH118
