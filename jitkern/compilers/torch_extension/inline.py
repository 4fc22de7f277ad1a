"""What `load_inline` and `load` compile: an Extension with the flags that Torch would use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jitkern import compilers, config, source as source_room
from jitkern.compilers import torch_extension
from jitkern.compilers.cuda import toolkit
from jitkern.compilers.torch_extension.extension import ExtensionCompiler
from jitkern.errors import DeclarationError
from jitkern.source.closure import Closure
from jitkern.source.flags import ENVIRONMENT, NotSupported, is_loaded, numbered, searched, words_of
from jitkern.source.kinds import Extension, Include, Source, Unit, Variant
from jitkern.target import Target, this_abi

if TYPE_CHECKING:
    from jitkern.compilers.result import Built
    from jitkern.compilers.torch_extension.commands import Build


class Inline(Extension):
    """Units with the arguments of `torch.utils.cpp_extension`, as texts or as files.

    files: names of the units, for messages and the key.
    name: TORCH_EXTENSION_NAME.
    texts: the texts of the units, or places: their paths.
    output: `module`, `library` or `program`.
    python: whether the artifact depends on Python's ABI.
    arch: nvcc's flags for the GPUs.
    """

    kind: ClassVar[str] = "inline"
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    compiler: ClassVar[str] = "jitkern.compilers.torch_extension.inline:InlineCompiler"
    owner = ""

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
        include: Sequence[str | Include] = (),
    ) -> None:
        folder = os.path.dirname(places[0]) if places else ""  # noqa: PTH120
        Source.__init__(self, files, include=include, environment=ENVIRONMENT, folder=folder)
        self.name = name
        self.texts = tuple(texts)
        self.places = tuple(places)
        self.output = output
        self.python = python
        self.with_cuda = with_cuda
        self.cflags = tuple(cflags)
        self.cuda_cflags = tuple(cuda_cflags)
        self.libraries = self.library_dirs = ()
        self.ldflags = tuple(ldflags)
        self.arch = tuple(arch)

    @property
    def folder(self) -> str:
        """The folder of the first file; of texts, a temporary folder that holds them as files."""
        texts = dict(zip(self.files, self.texts))
        return source_room.texts.folder_of(texts) if texts else self.home

    @property
    def paths(self) -> list[Path]:
        """The paths of the units."""
        return [Path(place) for place in self.places] or super().paths

    @property
    def every_flag(self) -> tuple[str, ...]:
        """The flags of the compilers."""
        return (*self.cflags, *self.cuda_cflags)

    @property
    def named_roots(self) -> list[Include]:
        """The directories that arguments, flags or variables have `#include` search.

        Directories of Torch and the toolkit have a version. A macro's value is not a directory.
        """
        declared = [root.path for root in self.include if os.path.isabs(root.path)]  # noqa: PTH117
        added = searched(words_of(self), config.SEARCHED)
        return [Include(path, _version(path)) for path in dict.fromkeys((*declared, *added))]

    @property
    def roots(self) -> list[Include]:
        """The directories that `#include` may search, in order; those of the units are last."""
        folders = dict.fromkeys(str(path.parent) for path in self.paths)
        return [*self.named_roots, *map(Include, folders)]

    def is_cuda(self, file: str) -> bool:
        """Whether nvcc compiles the unit."""
        return self.with_cuda and super().is_cuda(file)


class InlineCompiler(ExtensionCompiler):
    """The compiler of an `Inline`. What reads files that the key does not cover is for Torch."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Inline)
        return target.for_host_code(abi=target.abi or this_abi(python=source.python))

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        """Versions and all flags; the path of an include root is replaced by its number."""
        import torch

        assert isinstance(source, Inline)
        roots = [root.path for root in source.named_roots]
        cuda = (f"cuda {torch.version.cuda}",) if source.with_cuda else ()
        python = (f"{sys.implementation.cache_tag}{sys.abiflags}",) if source.python else ()
        # A program holds the path of Torch's libraries; all else finds them loaded.
        program = source.output == "program"
        of_torch = (os.path.dirname(torch.__file__),) if program else ()  # noqa: PTH120
        return (
            *(f"{source.output} {source.name}", f"torch {torch.__version__}", *cuda, *python),
            *of_torch,
            *("c++", *numbered(source.cflags, roots)),
            *("nvcc", *source.arch, *numbered(source.cuda_cflags, roots)),
            *("ld", *source.ldflags),
        )

    def closure(self, source: Source) -> Closure:
        """The files that the key covers. Raises NotSupported where the build may read others."""
        try:
            return super().closure(source)
        except DeclarationError as e:
            raise NotSupported(str(e)) from None

    def library_digest(self, path: Path) -> str:
        """The digest of a library for the key, which has shared ones by their names."""
        return "" if is_loaded(path) else super().library_digest(path)

    def build_of(self, source: Extension, target: Target) -> Build:
        """The build of the source, with Torch's split of flags between c++ and nvcc."""
        assert isinstance(source, Inline)

        def flags(file: str) -> tuple[str, ...]:
            return (*source.arch, *source.cuda_cflags) if source.is_cuda(file) else source.cflags

        names = source.places or source.files
        return torch_extension.commands.Build(
            name=source.name,
            output=source.output,
            python=source.python,
            units=[Unit(name, flags(file)) for file, name in zip(source.files, names)],
            texts=dict(zip(source.files, source.texts)),
            include=[root.path for root in source.include],
            with_cuda=source.with_cuda,
            ldflags=source.ldflags,
            environment=source.environment,
        )

    def compile_parts(self, variant: Variant, *args: Any, **options: Any) -> Built:
        assert isinstance(variant.source, Inline)
        named = variant._replace(function=variant.source.name)  # for messages
        try:
            return super().compile_parts(named, *args, **options)
        except compilers.dependencies.UncoveredError as e:
            raise NotSupported(str(e)) from None

    def refuse(self, variant: Variant, build: Build, target: Target) -> None:
        """Refuse nothing that Torch takes."""


def names_of(places: Sequence[str]) -> tuple[str, ...]:
    """A name for each source, free of its path."""
    folders = list(dict.fromkeys(map(os.path.dirname, places)))
    return tuple(
        f"{folders.index(folder)}/{file}" if len(folders) > 1 else file
        for folder, file in map(os.path.split, places)
    )


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
