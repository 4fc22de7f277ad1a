"""The source of `load_inline` and `load`: units, flags, and the directories of their headers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jitkern import config
from jitkern.compilers.cuda import toolkit
from jitkern.source.build_environment import ENVIRONMENT
from jitkern.source.includes import SEARCHING, searched
from jitkern.source.kinds import ITSELF, Include, Source
from jitkern.target import Target, this_abi

CUDA_SUFFIXES = (".cu", ".cuh")


class Inline(Source):
    """Units that include Torch's headers, with the arguments of `torch.utils.cpp_extension`.

    files: names of the units, for messages and the key.
    name: TORCH_EXTENSION_NAME.
    texts: the texts of the units, or places: their paths.
    output: `module`, `library` or `program`.
    place: distinguishes identical sources whose headers live in different directories; or "".
    python: whether the artifact depends on Python's ABI.
    arch: nvcc's flags for the GPUs.
    """

    kind: ClassVar[str] = "inline"
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    runs: ClassVar[str] = ITSELF
    compiler: ClassVar[str] = "jitkern.compilers.torch_extension.inline:InlineCompiler"
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
        place: str = "",
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
        self.place = place

    @property
    def paths(self) -> list[Path]:
        """The paths of the units; none if they are texts."""
        return [Path(place) for place in self.places]

    @property
    def every_flag(self) -> tuple[str, ...]:
        """The flags of the compilers."""
        return (*self.cflags, *self.cuda_cflags)

    @property
    def roots(self) -> list[Include]:
        """The directories that `#include` may search: declared, or named by a flag or a variable.

        Directories of Torch and the toolkit have a version. A macro's value is no directory.
        """
        declared = [root.path for root in self.include if os.path.isabs(root.path)]  # noqa: PTH117
        added = searched(self.compiler_words, config.SEARCHED)
        return [Include(path, _version(path)) for path in dict.fromkeys((*declared, *added))]

    def is_cuda(self, file: str) -> bool:
        """Whether nvcc compiles the unit."""
        return self.with_cuda and has_cuda((file,))

    def exact(self, target: Target) -> Target:
        """`target` with all that the artifact depends on: platform, C++ ABI, glibc, Python tag."""
        return target.for_host_code(abi=target.abi or this_abi(python=self.python))

    def all_flags(self) -> tuple[str, ...]:
        """Versions and all flags; the path of an include root is replaced by its number."""
        import torch

        numbers = {root.path: f"<{number}>" for number, root in enumerate(self.roots)}
        cuda = (f"cuda {torch.version.cuda}",) if self.with_cuda else ()
        python = (f"{sys.implementation.cache_tag}{sys.abiflags}",) if self.python else ()
        # A program holds the path of Torch's libraries; all else finds them loaded.
        of_torch = (os.path.dirname(torch.__file__),) if self.output == "program" else ()  # noqa: PTH120
        place = (f"place {self.place}",) if self.place else ()
        return (
            *(f"{self.output} {self.name}", f"torch {torch.__version__}", *cuda, *python),
            *(*of_torch, *place),
            *("c++", *(_numbered(flag, numbers) for flag in self.cflags)),
            *("nvcc", *self.arch, *(_numbered(flag, numbers) for flag in self.cuda_cflags)),
            *("ld", *self.ldflags),
        )


def has_cuda(files: Sequence[str]) -> bool:
    """Whether nvcc compiles one of the files."""
    return any(file.endswith(CUDA_SUFFIXES) for file in files)


def _version(root: str) -> str:
    """The version of Torch's or the toolkit's own headers in this root; "" for other roots."""
    import torch

    path = Path(root).resolve()
    if path.is_relative_to(Path(torch.__file__).parent.resolve()):
        return torch.__version__
    for folder in toolkit.include_directories():
        own = folder.resolve()
        shared = not any("cuda" in part or part == "nvidia" for part in own.parts)  # with others'
        if path.is_relative_to(own) and not shared:
            return f"cuda {torch.version.cuda}"
    return ""


def names_of(places: Sequence[str]) -> tuple[str, ...]:
    """A name for each source, free of its path."""
    folders = list(dict.fromkeys(os.path.dirname(place) for place in places))  # noqa: PTH120
    return tuple(
        f"{folders.index(folder)}/{file}" if len(folders) > 1 else file
        for folder, file in map(os.path.split, places)
    )


def _numbered(flag: str, numbers: dict[str, str]) -> str:
    option = next((o for o in SEARCHING if flag.startswith(o)), "")
    joined = flag[len(option) :].removeprefix("=")
    if flag in numbers:
        return numbers[flag]
    return option + numbers[joined] if option and joined in numbers else flag
