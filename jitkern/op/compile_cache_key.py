"""The digest of the declarations and sources of ops, for the keys of Torch's compile caches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jitkern import __version__
from jitkern.cache.key import canonical
from jitkern.errors import DeclarationError
from jitkern.source.closure import closure_of
from jitkern.source.kinds import Source, Triton

# The files of jitkern that Torch traces: how a gradient is recorded, and how a reference runs.
_OWN = ("autograd.py", "gradient.py", "op.py")


def digest(ops: Mapping[str, Any]) -> str:
    """Return a digest of these ops, by their names, as they are now."""
    return _digest_of(tuple(_parts(op) for _, op in sorted(ops.items())))


def _parts(op: Any) -> tuple[Any, ...]:
    """Return the parts of an op: declaration, sources, and the functions that Torch may trace."""
    declared = op.declaration
    functions = [declared.reference, declared.fake, *declared.launchers.values()]
    functions += [op.gradient.function] if op.gradient else []
    codes = (getattr(function, "__code__", None) for function in functions)
    sources = tuple(source for listed in declared.sources.values() for source in listed)
    written = tuple(code for code in codes if code)
    return op.schema, declared.fusible, declared.module, sources, written


@functools.lru_cache(maxsize=4)
def _digest_of(ops: tuple[tuple[Any, ...], ...]) -> str:
    sha256 = hashlib.sha256(canonical([__version__, *map(_own, _OWN)]))
    for schema, fusible, module, sources, codes in ops:
        sha256.update(canonical([schema, fusible, *(_files(source) for source in sources)]))
        package = module.rpartition(".")[0]
        for path in sorted({code.co_filename for code in codes}):
            if Path(path).is_file():
                folder, name = str(Path(path).parent), Path(path).name
                written = Triton(name, folder=folder, package=package)  # Python, read as text
                sha256.update(canonical(_files(written)))
        for code in codes:  # code that was typed at a prompt has no file
            sha256.update(code.co_code + repr(code.co_consts).encode())
    return sha256.hexdigest()[:16]


def _files(source: Source) -> dict[str, str]:
    try:
        return closure_of(source).files
    except DeclarationError:  # a file that is gone: the op says so when it is called
        return {}


def _own(name: str) -> str:
    return hashlib.sha256(Path(__file__).with_name(name).read_bytes()).hexdigest()
