"""The files a source depends on, found by reading text, with no compiler.

For C++ and CUDA: the source's files, the files that flags name by their paths, and every
`#include` that resolves in a searched directory, followed. `#if` is ignored, so the closure may
hold more files than needed. Where the text does not say which file it opens or asks for (an
`#include` or a `__has_include` of a macro), the closure holds every file of the kernel's folder and
the names of the files in the other directories. For Triton: the file and the modules of its own
package that it imports, read and not imported.

The files that compiler, assembler and linker opened are compared with this after each build
(`check`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jitkern import config, source as room
from jitkern.errors import CompileError, DeclarationError
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import Generated, Include, Source, shared_include

# Compiled on first use, like every pattern here: an import compiles none.
_DIRECTIVE = (
    rb"(?m)^[ \t]*(?:/\*[^\n]*?\*/[ \t]*)*(?:#|%:)[ \t]*(?:include|import|embed)(_next)?\b[ \t]*"
)
_INCLUDE = _DIRECTIVE + rb'(?:(["<])([^">\n]+)[">]|([^\s"<]))'  # a name, or a macro's first letter
_PROBE = rb"\b__has_(?:include|include_next|embed)\b"
_PROBED = _PROBE + rb'[ \t]*\([ \t]*()(["<])([^">\n]+)[">]'
_PROBE_OF_A_MACRO = (  # all but `__has_include("name")`, `#ifdef __has_include` and `defined`
    rb"(?<!ifdef )(?<!ifndef )(?<!defined )(?<!defined\()" + _PROBE + rb'(?![ \t]*\([ \t]*["<])'
)
_ABSOLUTE = rb'(?m)^[ \t]*(?:#|%:)[ \t]*(?:define|if|elif)\b.*[ \t(,"<]/[\w.]'
_BINARY = rb'\.incbin[ \t]*\\?"()()([^"\\\n]+)'
FORCED = ("-include", "-imacros", "--pre-include")
_SYSTEM = ("/usr/include", "/usr/lib")  # files there come with the compiler
_NO_SEARCH = ("-D", "-L", "-Wl,")
SITE = "/usr/local/include"  # compilers search this folder, but its files are not the compiler's
_NEVER_COMPILED = frozenset(  # suffixes of Python, and of files that scripts write beside them
    (".py", ".pyc", ".log", ".md", ".so", ".o", ".pt", ".pth", ".safetensors", ".npy", ".npz")
)
_CONTINUED = rb"\\\r?\n"


class Closure(NamedTuple):
    """All files of a source (label -> SHA-256), the versions of its versioned roots, and the paths.

    Labels are relative to the kernel's folder (or to the root a header was found in), so they are
    the same on any machine.
    """

    files: dict[str, str]
    versions: dict[str, str]
    paths: frozenset[Path]


def closure_of(source: Source) -> Closure:
    """Return the files that `source` is compiled from, with their digests.

    Raises DeclarationError for a file that does not exist.
    """
    if isinstance(source, Generated):
        digest = hashlib.sha256(source.text.encode()).hexdigest()
        return Closure({source.files[0]: digest}, {}, frozenset())
    for path in source.paths:
        if not path.is_file():
            raise DeclarationError(f"the kernel source {path} does not exist")
    walk = _modules(source) if source.kind == "triton" else _Headers(source).files()
    files = sorted(walk, key=lambda file: file.label)
    return Closure(
        {file.label: hashlib.sha256(file.data).hexdigest() for file in files},
        _versions(source),
        frozenset(file.path for file in files if file.path),
    )


def _versions(source: Source) -> dict[str, str]:
    """The versions of versioned roots, by the root's name; a second `include` is `include 2`."""
    versions: dict[str, str] = {}
    for root in source.roots:
        if root.version:
            name = Path(root.path).name
            count = sum(known.partition(" ")[0] == name for known in versions)
            versions[f"{name} {count + 1}" if count else name] = root.version
    return versions


def check(
    source: Source,
    closure: Closure,
    opened: Iterable[str | Path],
    toolchain: Iterable[str | Path],
    op: str,
) -> None:
    """Raise CompileError for a file that a tool opened and that the key does not cover.

    The same for a header of any path that a macro may have asked for.
    """
    own = [Path(root.path) for root in source.roots if not root.version]
    versioned = [Path(root.path) for root in source.roots if root.version]
    for path in beyond(closure, opened, own, [*versioned, *toolchain]):
        raise CompileError(
            f"{op}: the compiler opened {path}, which the cache key does not cover. "
            f"{_remedy(path, own)}",
            op=op,
        )
    for path in sorted(closure.paths):
        if probes_anywhere(path.read_bytes()):
            raise CompileError(
                f"{op}: {path} has a `__has_include` of a macro, which may name an absolute path "
                "that the cache key does not cover: write the header's name into `__has_include`",
                op=op,
            )


def _remedy(path: Path, own: Iterable[Path]) -> str:
    if path.suffix == ".gch":
        return "It is a precompiled header, and compilers do not list those: delete it"
    if any(path.is_relative_to(root.resolve()) for root in own):
        return (
            "Nothing in the kernel's own files and flags names it: add an `#include`, or name it "
            "by its whole path in flags"
        )
    folder = repr(str(path.parent))
    return (
        f"If it is a header, declare its directory, e.g. include=[{folder}], or as "
        f"Include({folder}, version=...); else name it by its whole path in flags"
    )


def beyond(
    closure: Closure,
    opened: Iterable[str | Path],
    own: Iterable[str | Path],
    toolchain: Iterable[str | Path],
) -> Iterator[Path]:
    """The files of `opened` that are in neither the closure nor the toolchain.

    Precompiled headers are added: g++ opens them in place of headers without listing them. Where a
    folder of `own` and a folder of `toolchain` contain one another, the inner folder decides.
    """
    known = {Path(folder).resolve() for folder in toolchain}
    others = {Path(folder).resolve() for folder in (*own, SITE)} - known
    precompiled = (path.with_name(f"{path.name}.gch") for path in closure.paths)
    for name in (*map(Path, opened), *filter(Path.exists, precompiled)):
        path = name.resolve()
        if path in closure.paths:
            continue
        places = (path, name.parent.resolve() / name.name)  # the toolchain has links out of it
        homes = (
            next((f for f in place.parents if f in known or f in others), None) for place in places
        )
        if known.isdisjoint(homes):
            yield path


def probes_anywhere(text: bytes) -> bool:
    """Whether a macro may ask for a header by an absolute path; no tool lists such headers."""
    text = re.sub(_CONTINUED, b"", text) if b"__has_" in text else b""
    return bool(re.search(_PROBE_OF_A_MACRO, text) and re.search(_ABSOLUTE, text))


def pastes_unnamed(text: bytes) -> bool:
    """Whether the text has an `.incbin` whose file name is not written out."""
    return text.count(b"incbin") > len(re.findall(_BINARY, text))


class _File(NamedTuple):
    """A file with its path (free of links) and content; or no path, and the names in a folder."""

    label: str
    path: Path | None
    data: bytes


class _Headers:
    """The files of a C++ or CUDA source, followed from `#include` to `#include`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._flags = [*source.flags, *(flag for unit in source.unit_flags for flag in unit.flags)]
        if self._flags:
            self._flags = list(room.flags.expanded(self._flags))
        added = self._added()
        self._roots = [*source.roots, *added, Include(SITE)]
        self._all_matches = bool(added)  # a flag's directory may come before or after the others

    def files(self) -> Iterator[_File]:
        """Yield each file once."""
        source = self._source
        queue = [(self._label(path), path) for path in source.paths]
        queue += self._files_of_flags() if self._flags else []
        visited: set[Path] = set()
        whole = False
        while queue:
            label, path = queue.pop()
            resolved = path.resolve()
            if resolved in visited:
                continue
            visited.add(resolved)
            data = path.read_bytes()
            yield _File(label, resolved, data)
            if b"\0" in data[:4096]:  # an object, or a file for `.incbin`
                continue
            headers, computed = included(data)
            for following, quote, header in headers:
                name = header.decode(errors="surrogateescape")
                queue += self._resolve(path, name, quoted=quote == b'"', next_too=bool(following))
            if computed and not whole:
                whole = True
                queue += self._folder()
                yield from self._listings(self._roots[:-1])
            if computed and b"__has_" in data:
                yield from self._listings(self._roots[-1:])

    def _added(self) -> list[Include]:
        """The directories searched because of flags, or of variables that the source names."""
        paths: list[str] = []
        if self._flags:
            searching = [word for word in self._flags if not word.startswith(_NO_SEARCH)]
            paths += [path for word in searching for path in room.flags.paths_in(word)]
        declared = [name for name in config.SEARCHED if name in self._source.environment]
        if declared:
            environment = config.current().environment
            paths += [path for name in declared for path in environment.get(name, "").split(":")]
        known = [Path(root.path).resolve() for root in self._source.roots if root.version]
        known += map(Path, _SYSTEM)
        return [
            Include(path)
            for path in dict.fromkeys(paths)
            if Path(path).is_absolute()
            and not Path(path).is_file()
            and not any(Path(path).resolve().is_relative_to(root) for root in known)
        ]

    def _files_of_flags(self) -> Iterator[tuple[str, Path]]:
        """The files that flags name: headers to include, and any file by its whole path."""
        for name in room.flags.paths_after(FORCED, self._flags):
            yield from self._resolve(self._source.paths[0], name, quoted=True)
        for word in self._flags:
            for path in map(Path, room.flags.paths_in(word)):
                if path.is_file() and ("plugin" in word or not room.flags.is_loaded(path)):
                    yield str(path), path

    def _folder(self) -> list[tuple[str, Path]]:
        return [
            (self._label(path), path)
            for path in _files(Path(self._source.folder))
            if path.suffix not in _NEVER_COMPILED
        ]

    def _listings(self, roots: Iterable[Include]) -> Iterator[_File]:
        """The names of the files in each root that lies outside of the kernel's folder."""
        for root in roots:
            folder = Path(os.path.normpath(root.path))
            if root.version or folder.is_relative_to(self._source.folder) or not folder.is_dir():
                continue
            if names := sorted(os.path.relpath(path, folder) for path in _files(folder)):
                listing = "\0".join(names).encode(errors="surrogateescape")
                yield _File(f"<{self._roots.index(root)}>/", None, listing)

    def _resolve(
        self, includer: Path, name: str, *, quoted: bool, next_too: bool = False
    ) -> list[tuple[str, Path]]:
        """(label, path) of the header; none for a header of the toolchain or of a versioned root.

        next_too: return the headers of this name in all roots, since `#include_next` takes any of
        them.
        """
        searched = [(root.path, root.version) for root in self._roots]
        if quoted and any(not r.version and includer.is_relative_to(r.path) for r in self._roots):
            searched.insert(0, (str(includer.parent), ""))
        matches = [
            (path, version)
            for folder, version in searched
            if os.path.isfile(path := os.path.join(folder, name))  # noqa: PTH113, PTH118  most are not
        ]
        return [
            (self._label(Path(path)), Path(path))
            for path, version in (matches if next_too or self._all_matches else matches[:1])
            if not version
        ]

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


@functools.lru_cache(maxsize=256)
def included(text: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """(`_next`, quote, name) of each file that the text names; whether it may ask for others."""
    if b"\\" in text:
        text = re.sub(_CONTINUED, b"", text)
    directives = re.findall(_INCLUDE, text)
    names = [(following, quote, name) for following, quote, name, _ in directives if name]
    computed = any(macro for *_, macro in directives)
    if b"__has_" in text:
        names += re.findall(_PROBED, text)
        computed = computed or bool(re.search(_PROBE_OF_A_MACRO, text))
    if b".incbin" in text:
        names += re.findall(_BINARY, text)
        computed = computed or pastes_unnamed(text)
    return names, computed


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


def _modules(source: Source) -> Iterator[_File]:
    folder = Path(source.folder)
    queue = source.paths
    visited: set[Path] = set()
    while queue:
        path = queue.pop()
        if path in visited:
            continue
        visited.add(path)
        data = path.read_bytes()
        yield _File(Path(os.path.relpath(path, folder)).as_posix(), path.resolve(), data)
        for module in _imported(data):
            queue += _module_files(source, path, module)


@functools.lru_cache(maxsize=256)
def _imported(text: bytes) -> list[tuple[int, str]]:
    """(level, dotted name) of each import statement; level 0 is absolute."""
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


def _module_files(source: Source, importer: Path, module: tuple[int, str]) -> list[Path]:
    level, name = module
    parts = name.split(".") if name else []
    if level:
        base = importer.parents[level - 1]
    else:
        package = source.package.split(".") if source.package else []
        shared = next(
            (i for i, (a, b) in enumerate(zip(parts, package)) if a != b),
            min(len(parts), len(package)),
        )
        if package and not shared:
            return []
        base = Path(source.folder, *[".."] * (len(package) - shared))
        parts = parts[shared:]
    stem = Path(os.path.normpath(base.joinpath(*parts)))
    return [
        path for path in (stem.with_name(stem.name + ".py"), stem / "__init__.py") if path.is_file()
    ]
