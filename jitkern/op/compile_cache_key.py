"""The digest of the declarations and sources of ops, for the keys of Torch's compile caches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jitkern._version import __version__
from jitkern.cache.key import canonical
from jitkern.errors import DeclarationError
from jitkern.source.closure import closure_of
from jitkern.source.kinds import Source, Triton
from jitkern.trace.description import description_of


def digest(ops: Mapping[str, Any]) -> str:
    """Return a digest of the current state of these ops, by their names."""
    each = [_digest_of(_parts(op)) for _, op in sorted(ops.items())]
    return hashlib.sha256(canonical([__version__, _own(), *each])).hexdigest()[:16]


def _parts(op: Any) -> tuple[Any, ...]:
    """Return the parts of an op: declaration, sources, and the functions that Torch may trace."""
    declared = op.declaration
    functions = [declared.reference, declared.fake, *declared.launchers.values()]
    functions += [op.gradient.function] if op.gradient else []
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    files = {code.co_filename for code in codes}
    in_files = tuple(sorted(file for file in files if Path(file).is_file()))
    sources = tuple(source for listed in declared.sources.values() for source in listed)
    by_op = op.gradient.op.name if op.gradient and op.gradient.op else ""
    traced = (declared.fusible, by_op, *declared.nondifferentiable)
    text = description_of(declared.module, functions)
    return op.schema, traced, declared.module, sources, in_files, text


@functools.lru_cache(maxsize=4096)
def _digest_of(op: tuple[Any, ...]) -> str:
    """Return the digest of an op by its parts; its files are read once."""
    schema, traced, module, sources, in_files, text = op
    sha256 = hashlib.sha256(canonical([schema, traced, *map(_files, sources)]))
    package = module.rpartition(".")[0]
    for path in in_files:
        folder, name = str(Path(path).parent), Path(path).name
        written = Triton(name, folder=folder, package=package)  # Python, read as text
        sha256.update(canonical(_files(written)))
    sha256.update(text.encode(errors="surrogatepass"))
    return sha256.hexdigest()


def forget() -> None:
    """Read all files again, because an op was declared again."""
    _digest_of.cache_clear()


def _files(source: Source) -> dict[str, str]:
    try:
        return closure_of(source).files
    except DeclarationError:  # a file that is gone: the op says so when it is called
        return {}


@functools.cache
def _own() -> list[str]:
    """Return digests of this folder's files: Torch traces how they record and run references."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
