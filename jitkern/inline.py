"""What `load_inline` and `load` compile, and the files that it depends on.

The headers of Torch, CUDA and the system are not read: versions stand for them in the key.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jitkern.closure import FORCED, Closure, included
from jitkern.kernel import Include, Source
from jitkern.receipts import ENVIRONMENT
from jitkern.target import Target, this_abi

CUDA_SUFFIXES = (".cu", ".cuh")
_ROOTS = ("-isystem", "-iquote", "-idirafter", "--include-path", "-I")
_BINARY = rb'\.incbin[ \t]*\\?"([^"\\\n]+)'


class Inline(Source):
    """Units that Torch's headers are for, with the arguments of `torch.utils.cpp_extension`.

    files: names of the units, as messages and the key have them. name: TORCH_EXTENSION_NAME.
    texts: what the units hold, or places: where they lie. output: `module`, `library` or `program`.
    python: whether the artifact depends on Python's ABI. arch: nvcc's flags for the GPUs.
    """

    kind: ClassVar[str] = "inline"
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    one_file: ClassVar[bool] = False

    def __init__(
        self,
        files: Sequence[str],
        *,
        name: str,
        texts: Sequence[str] = (),
        places: Sequence[str] = (),
        output: str = "module",
        python: bool = True,
        with_cuda: bool = False,
        cflags: Sequence[str] = (),
        cuda_cflags: Sequence[str] = (),
        ldflags: Sequence[str] = (),
        arch: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        super().__init__(files, environment=ENVIRONMENT, **rest)
        self.name = name
        self.texts = tuple(texts)
        self.places = tuple(places)
        self.output = output
        self.python = python
        self.with_cuda = with_cuda
        self.cflags = tuple(cflags)
        self.cuda_cflags = tuple(cuda_cflags)
        self.ldflags = tuple(ldflags)
        self.arch = tuple(arch)

    @property
    def paths(self) -> list[Path]:
        """Where the units lie; none where they are texts."""
        return [Path(place) for place in self.places]

    @property
    def roots(self) -> list[Include]:
        """Directories that `#include` searches: those given, then those in the flags."""
        flags = [*_paths_after(_ROOTS, self.cflags), *_paths_after(_ROOTS, self.cuda_cflags)]
        return [*self.include, *(Include(path) for path in flags if os.path.isabs(path))]  # noqa: PTH117

    @property
    def units(self) -> list[tuple[str, str | Path]]:
        """(name, text or path) of each."""
        return list(zip(self.files, self.texts or self.paths))

    def is_cuda(self, file: str) -> bool:
        """Whether nvcc compiles the unit."""
        return self.with_cuda and has_cuda((file,))

    def exact(self, target: Target) -> Target:
        """`target` with what the artifact depends on: platform, C++ ABI, glibc, Python's tag."""
        return target.for_host_code(abi=target.abi or this_abi(python=self.python))

    def all_flags(self) -> tuple[str, ...]:
        """Versions and everything but the units; where an include root's path was, its number."""
        import torch

        numbers = {root.path: f"<{number}>" for number, root in enumerate(self.roots)}
        cuda = (f"cuda {torch.version.cuda}",) if self.with_cuda else ()
        python = (f"{sys.implementation.cache_tag}{sys.abiflags}",) if self.python else ()
        # A program holds the path of Torch's libraries; all else finds them loaded.
        place = (os.path.dirname(torch.__file__),) if self.output == "program" else ()  # noqa: PTH120
        return (
            *(f"{self.output} {self.name}", f"torch {torch.__version__}", *cuda, *python, *place),
            *("c++", *(_numbered(flag, numbers) for flag in self.cflags)),
            *("nvcc", *self.arch, *(_numbered(flag, numbers) for flag in self.cuda_cflags)),
            *("ld", *self.ldflags),
        )


def has_cuda(files: Sequence[str]) -> bool:
    """Whether one of them is nvcc's."""
    return any(file.endswith(CUDA_SUFFIXES) for file in files)


def words(flags: Sequence[str]) -> Iterator[str]:
    """What a shell makes of the flags, each of which may hold several; `$$` is ninja's `$`.

    A directory or a macro's value may hold spaces, too.
    """
    for flag in flags:
        try:
            import shlex

            parts = shlex.split(flag)
        except ValueError:  # a lone quote
            parts = [flag.strip()]
        whole = flag.strip()
        spaced = len(parts) > 1 and not any(part.startswith("-") for part in parts[1:])
        if spaced and (
            (whole.startswith("-D") and whole[2:3].strip())
            or (whole[:2] in ("-I", "-L") and Path(whole[2:]).is_dir())
        ):
            parts = [whole]
        yield from (part.replace("$$", "$") for part in parts)


def names_of(places: Sequence[str]) -> tuple[str, ...]:
    """A name for each source, free of where it lies."""
    folders = list(dict.fromkeys(os.path.dirname(place) for place in places))  # noqa: PTH120
    return tuple(
        f"{folders.index(folder)}/{file}" if len(folders) > 1 else file
        for folder, file in map(os.path.split, places)
    )


def closure(source: Inline) -> Closure:
    """The units and every file that they include from the given roots or from beside them."""
    files: dict[str, str] = {}
    seen: set[Path] = set()
    queue: list[tuple[str, Path | None, bytes]] = [
        (name, unit, unit.read_bytes()) if isinstance(unit, Path) else (name, None, unit.encode())
        for name, unit in source.units
    ]
    seen.update(path.resolve() for path in source.paths)
    forced = [*_paths_after(FORCED, source.cflags), *_paths_after(FORCED, source.cuda_cflags)]
    if forced:
        queue.append(("flags", None, b"".join(b'#include "%s"\n' % f.encode() for f in forced)))
    roots = [Path(root.path) for root in source.roots]
    while queue:
        label, path, data = queue.pop(0)
        files[label] = hashlib.sha256(data).hexdigest()
        searched = path or roots or any(opening in data for opening in (b'"/', b"</"))
        for quoted, name in _opened(data) if searched else ():
            found = _resolve(roots, label, path if quoted else None, name)
            if found and (resolved := found[1].resolve()) not in seen:
                seen.add(resolved)
                queue.append((*found, found[1].read_bytes()))
    for label, path in _archives(source.ldflags):
        files[label] = hashlib.sha256(path.read_bytes()).hexdigest()
    return Closure(files, {}, frozenset(seen))


def _opened(data: bytes) -> Iterator[tuple[bool, str]]:
    """(in quotes, name) of every file that a text may ask for."""
    named, _ = included(data)
    headers = [(quote == b'"', name) for _, quote, name in named]
    for quoted, name in (*headers, *((False, name) for name in re.findall(_BINARY, data))):
        yield quoted, name.decode(errors="surrogateescape")


def _resolve(
    roots: Sequence[Path], label: str, includer: Path | None, name: str
) -> tuple[str, Path] | None:
    """(label, path) of a header, or None for one of the toolchain."""
    if includer and (beside := includer.parent / name).is_file():
        return f"{label.rpartition('/')[0]}/{name}".removeprefix("/"), beside
    for number, root in enumerate(roots):
        path = root / name
        if path.is_file():
            return f"<{number}>/{name}", path
    absolute = Path(name)
    return (name, absolute) if absolute.is_absolute() and absolute.is_file() else None


def _archives(ldflags: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Object files and archives, whose content becomes a part of what is linked."""
    folders = [Path(path) for path in _paths_after(("-L",), ldflags)]
    for number, word in enumerate(ldflags):
        if word.endswith((".a", ".o")) and not word.startswith("-"):
            found = [Path(word)]
        elif word.startswith("-l") and len(word) > 2:
            names = (f"lib{word[2:]}.so", f"lib{word[2:]}.a")
            found = [f / name for f in folders for name in names if (f / name).is_file()][:1]
        else:
            continue
        yield from (
            (f"<ld{number}>/{path.name}", path)
            for path in found
            if path.suffix != ".so" and path.is_file()
        )


def _paths_after(options: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """The arguments of these options, joined to them or following."""
    for number, flag in enumerate(flags):
        option = next((o for o in options if flag.startswith(o)), "")
        if option:
            joined = flag[len(option) :].removeprefix("=")
            following = flags[number + 1] if number + 1 < len(flags) else ""
            yield joined or following


def _numbered(flag: str, numbers: dict[str, str]) -> str:
    option = next((o for o in _ROOTS if flag.startswith(o)), "")
    joined = flag[len(option) :].removeprefix("=")
    if flag in numbers:
        return numbers[flag]
    return option + numbers[joined] if option and joined in numbers else flag
