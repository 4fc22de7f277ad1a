"""The files a source depends on, found by reading text, with no compiler.

For C++ and CUDA: the source's files, and every `#include` that resolves in the declared roots,
followed. `#if` is ignored, so this over-approximates. Where the text does not say what it opens (an
`#include` of a macro, `.incbin`, a search directory among the flags), every file of the kernel's
folder is in. For Triton: the file and the modules of its own package that it imports, read and not
imported. What a compiler really opened is compared with this after each build (`check`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jitkern.errors import CompileError, DeclarationError
from jitkern.kernel import Generated, Include, Source, shared_include
from jitkern.named_tuple import NamedTuple

# Compiled on first use, like every pattern here: an import compiles none.
_DIRECTIVE = (
    rb"(?m)^[ \t]*(?:/\*[^\n]*?\*/[ \t]*)*(?:#|%:)[ \t]*(?:include|import|embed)(_next)?\b[ \t]*"
)
_INCLUDE = _DIRECTIVE + rb'(?:(["<])([^">\n]+)[">]|([^\s"<]))'  # a name, or how a macro begins
_PROBED = rb'__has_(?:include|include_next|embed)[ \t]*\([ \t]*()(["<])([^">\n]+)[">]'
_BINARY = rb"\.incbin\b"
_SEARCHED = ("-I", "-iquote", "-isystem", "-idirafter", "--include-path", "@", "-optf")
FORCED = ("-include", "-imacros", "--pre-include")
_NEVER_COMPILED = frozenset(  # Python, and what programs leave in the folder of a script
    (".py", ".pyc", ".log", ".md", ".so", ".o", ".pt", ".pth", ".safetensors", ".npy", ".npz")
)
_CONTINUED = rb"\\\r?\n"


class Closure(NamedTuple):
    """`files`: label -> SHA-256; `versions`: versioned root -> version; `paths`: the files.

    Labels are relative to the kernel's folder (or to the root a header was found in), so they hold
    on any machine.
    """

    files: dict[str, str]
    versions: dict[str, str]
    paths: frozenset[Path]


def closure_of(source: Source) -> Closure:
    """Everything `source` is compiled from.

    Raises DeclarationError for a file that is not there.
    """
    if isinstance(source, Generated):
        digest = hashlib.sha256(source.text.encode()).hexdigest()
        return Closure({source.files[0]: digest}, {}, frozenset())
    if source.kind == "inline":
        from jitkern import inline, inputs

        assert isinstance(source, inline.Inline)
        return inputs.closure(source)
    for path in source.paths:
        if not path.is_file():
            raise DeclarationError(f"the kernel source {path} does not exist")
    found = _modules(source) if source.kind == "triton" else _headers(source)
    files = dict(sorted(found))
    return Closure(
        {label: hashlib.sha256(path.read_bytes()).hexdigest() for label, path in files.items()},
        _versions(source),
        frozenset(path.resolve() for path in files.values()),
    )


def _versions(source: Source) -> dict[str, str]:
    """Of versioned roots, by name; a second `include` is `include 2`."""
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
    known: Iterable[str | Path],
    op: str,
) -> None:
    """Raise CompileError for an opened file outside the closure, versioned and `known` roots."""
    roots = [Path(root.path).resolve() for root in source.roots if root.version]
    roots += [Path(root).resolve() for root in known]
    declared = [Path(root.path).resolve() for root in source.roots if not root.version]
    for name in opened:
        path = Path(name).resolve()
        if path in closure.paths or any(path.is_relative_to(root) for root in roots):
            continue
        remedy = (
            "No `#include` in the kernel's own files names it: add one"
            if any(path.is_relative_to(root) for root in declared)
            else f"Declare its directory, e.g. include=[{str(path.parent)!r}], "
            f"or as Include({str(path.parent)!r}, version=...)"
        )
        raise CompileError(
            f"{op}: the compiler opened {path}, which the cache key does not cover. {remedy}", op=op
        )


def _headers(source: Source) -> Iterator[tuple[str, Path]]:
    flags = [*source.flags, *(flag for unit in source.unit_flags for flag in unit.flags)]
    roots = source.roots
    queue = [(_label(source, roots, path), path) for path in source.paths]
    for name in _forced(flags):
        queue += _resolve(source, roots, source.paths[0], name, quoted=True)
    whole = any(flag.startswith(_SEARCHED) for flag in flags)
    queue += _folder(source, roots) if whole else []
    seen: set[Path] = set()
    while queue:
        label, path = queue.pop()
        resolved = path.resolve()
        if resolved in seen:
            continue
        seen.add(resolved)
        yield label, path
        named, computed = included(path.read_bytes())
        for following, quote, header in named:
            queue += _resolve(
                source, roots, path, header.decode(errors="surrogateescape"),
                quoted=quote == b'"', every=bool(following),
            )  # fmt: skip
        if not whole and computed:
            whole = True
            queue += _folder(source, roots)


@functools.lru_cache(maxsize=256)
def included(text: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """(`_next`, quote, name) of each header that it names, and whether it opens others too."""
    if b"\\" in text:
        text = re.sub(_CONTINUED, b"", text)
    opened = re.findall(_INCLUDE, text)
    named = [(following, quote, name) for following, quote, name, _ in opened if name]
    if b"__has_" in text:
        named += re.findall(_PROBED, text)
    computed = any(macro for *_, macro in opened)
    return named, computed or (b".incbin" in text and bool(re.search(_BINARY, text)))


def _forced(flags: Sequence[str]) -> Iterator[str]:
    """The headers that flags include: `-include x.h`, `--pre-include=x.h`."""
    for flag, following in zip(flags, [*flags[1:], ""]):
        name, _, value = flag.partition("=")
        if name in FORCED and (value or following):
            yield value or following


def _folder(source: Source, roots: Sequence[Include]) -> list[tuple[str, Path]]:
    return [
        (_label(source, roots, path), path)
        for path in _files(Path(source.folder))
        if path.suffix not in _NEVER_COMPILED
    ]


def _files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All files below, less hidden ones and those of virtual environments and caches."""
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


def _resolve(
    source: Source,
    roots: Sequence[Include],
    includer: Path,
    name: str,
    *,
    quoted: bool,
    every: bool = False,
) -> list[tuple[str, Path]]:
    """(label, path) of the header; nothing for one of the toolchain or of a versioned root.

    every: all that the roots have of this name, of which `#include_next` takes one.
    """
    searched = [(root.path, root.version) for root in roots]
    if quoted and any(not r.version and includer.is_relative_to(r.path) for r in roots):
        searched.insert(0, (str(includer.parent), ""))
    found = [
        (path, version)
        for folder, version in searched
        if os.path.isfile(path := os.path.join(folder, name))  # noqa: PTH113, PTH118  most are not
    ]
    return [
        (_label(source, roots, Path(path)), Path(path))
        for path, version in (found if every else found[:1])
        if not version
    ]


def _label(source: Source, roots: Sequence[Include], path: Path) -> str:
    """Relative to the folder where that is near, else to the include root it was found in."""
    if path.is_relative_to(shared := shared_include()) and not path.is_relative_to(
        Path(source.folder).parent / "include"
    ):
        return f"<jitkern>/{path.relative_to(shared).as_posix()}"  # however near it is installed
    relative = os.path.relpath(path, source.folder)
    if not relative.startswith(f"..{os.sep}.."):
        return Path(relative).as_posix()
    for number, root in enumerate(roots):
        if path.is_relative_to(root.path):
            return f"<{number}>/{path.relative_to(root.path).as_posix()}"
    return path.name


def _modules(source: Source) -> Iterator[tuple[str, Path]]:
    folder = Path(source.folder)
    queue = source.paths
    seen: set[Path] = set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        yield Path(os.path.relpath(path, folder)).as_posix(), path
        for module in _imported(path.read_bytes()):
            queue += _module_files(source, path, module)


@functools.lru_cache(maxsize=256)
def _imported(text: bytes) -> list[tuple[int, str]]:
    """(level, dotted name) of each import; level 0 is absolute."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []  # Python itself reports it, with the line, when it is compiled
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = (f"{base}.{alias.name}".strip(".") for alias in node.names)
            found += [(node.level, name) for name in (base, *names)]
    return found


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
