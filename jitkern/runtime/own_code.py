"""The files of jitkern itself on which kept plans depend."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator

from jitkern import __version__
from jitkern.files import owned

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  imports less
_OF_A_TRACE = (  # beside the rooms launch and trace
    "calls/call_class.py", "calls/signature.py", "runtime/linker.py", "runtime/plans.py",
    "source/defining_file.py", "source/dtypes.py", "source/kinds.py",
    "source/triton_decorators.py", "source/triton_text.py",
)  # fmt: skip
_OF_A_KEY = (  # what turns sources, the machine and the text of the runtime into names of entries
    "cache/facts.py", "cache/key.py", "cache/receipts.py", "compilers/__init__.py",
    "compilers/cpp/cc.py", "compilers/cpp/generated.py", "compilers/cuda/nvrtc.py",
    "compilers/triton/compiler.py", "jit/request.py", "runtime/program.c", "runtime/recall.py",
    "runtime/runtime.c",
    "source/closure.py", "source/includes.py", "source/variant_key.py", "target.py",
)  # fmt: skip


def _files_of_a_trace() -> Iterator[str]:
    """Yield the paths of the files that decide what a trace gives."""
    for name in _OF_A_TRACE:
        yield f"{_PACKAGE}/{name}"
    folders = [f"{_PACKAGE}/launch", f"{_PACKAGE}/trace"]
    for folder in folders:  # it grows
        for item in os.scandir(folder):
            if item.name.endswith((".py", ".h")):
                yield item.path
            elif item.name != "__pycache__" and item.is_dir():
                folders.append(item.path)


@functools.cache
def of_a_trace() -> str:
    """Return a digest of the code of jitkern that decides what a trace gives."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(_files_of_a_trace()):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


@functools.cache
def state() -> str:
    """Return the digest that `look` gave when this process first asked."""
    return look()[0]


def look() -> tuple[str, int]:
    """Return a digest of the files that decide which entries serve a call, and when one changed.

    The digest is of their sizes, times and inodes, by which a change shows without a read; the
    number of a device may be another one after the next start. The time is that of the latest
    change, in nanoseconds since 1970.
    """
    paths = [*sorted(_files_of_a_trace()), *(f"{_PACKAGE}/{name}" for name in _OF_A_KEY)]
    identities = [owned.identity(os.stat(path))[1:] for path in paths]  # noqa: PTH116  sixty
    text = repr((__version__, paths, identities))
    latest = max(max(times) for *_, times in ((i[:-2], i[-2:]) for i in identities))
    return hashlib.sha256(text.encode()).hexdigest(), latest
