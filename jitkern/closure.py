"""The files a source depends on, found by reading text, with no compiler.

For C++ and CUDA: every file of the kernel's folder (Python files apart, which no C compiler opens)
and every `#include` that resolves in the declared roots. `#if` is ignored, so this
over-approximates. For Triton: the file and the modules of its own package that it imports, read and
not imported. What a compiler really opened is compared with this after each build (`check`).
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jitkern.errors import CompileError, DeclarationError
from jitkern.kernel import Generated, Source

# Compiled on first use, like every pattern here: an import compiles none.
_INCLUDE = (
    rb'(?m)^[ \t]*(?:#|%:)[ \t]*(?:include|include_next|import|embed)[ \t]*(["<])([^">\n]+)[">]'
)
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
    for path in source.paths:
        if not path.is_file():
            raise DeclarationError(f"the kernel source {path} does not exist")
    found = _modules(source) if source.kind == "triton" else _headers(source)
    files = dict(sorted(found))
    return Closure(
        {label: hashlib.sha256(path.read_bytes()).hexdigest() for label, path in files.items()},
        {Path(root.path).name: root.version for root in source.roots if root.version},
        frozenset(path.resolve() for path in files.values()),
    )


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
    for name in opened:
        path = Path(name).resolve()
        if path not in closure.paths and not any(path.is_relative_to(root) for root in roots):
            raise CompileError(
                f"{op}: the compiler opened {path}, which the cache key does not cover. "
                f"Declare its directory, e.g. include=[{str(path.parent)!r}], "
                f"or as Include({str(path.parent)!r}, version=...)",
                op=op,
            )


def _headers(source: Source) -> Iterator[tuple[str, Path]]:
    folder = Path(source.folder)
    queue = [
        (path.relative_to(folder).as_posix(), path)
        for path in _files(folder)
        if path.suffix not in _NEVER_COMPILED
    ]
    seen: set[Path] = set()
    while queue:
        label, path = queue.pop()
        resolved = path.resolve()
        if resolved in seen:
            continue
        seen.add(resolved)
        yield label, path
        for quote, name in re.findall(_INCLUDE, re.sub(_CONTINUED, b"", path.read_bytes())):
            header = _resolve(
                source, path, name.decode(errors="surrogateescape"), quoted=quote == b'"'
            )
            if header:
                queue.append(header)


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


def _resolve(source: Source, includer: Path, name: str, *, quoted: bool) -> tuple[str, Path] | None:
    """(label, path) of the header, or None for one of the toolchain or of a versioned root."""
    roots = source.roots
    if quoted:
        for root in roots:
            if not root.version and includer.is_relative_to(root.path):
                beside = includer.parent / name
                if beside.is_file():
                    return _label(source, beside), beside
    for root in roots:
        path = Path(root.path, name)
        if path.is_file():
            return None if root.version else (_label(source, path), path)
    return None


def _label(source: Source, path: Path) -> str:
    """Relative to the folder where that is near, else to the include root it was found in."""
    relative = os.path.relpath(path, source.folder)
    if not relative.startswith(f"..{os.sep}.."):
        return Path(relative).as_posix()
    for number, root in enumerate(source.roots):
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
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # Python itself reports it, with the line, when it is compiled
        for module in _imported(tree):
            queue += _module_files(source, path, module)


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(level, dotted name) of each import; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield node.level, base
            yield from ((node.level, f"{base}.{alias.name}".strip(".")) for alias in node.names)


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
