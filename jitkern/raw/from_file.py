"""Kernels called without an op: functions of a `.cu` or `.cpp` file.

No op is declared and no launch function written: outputs are arguments, and gradients do not see
the call. Compiled kernels are cached under `raw::<file>`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jitkern.cache.entry import Entry
from jitkern.errors import DeclarationError, LaunchError
from jitkern.launch.call import Call, variant_of
from jitkern.raw.kernel import RawKernel, place_of, target_of
from jitkern.source import cpp_text
from jitkern.source.closure import closure_of
from jitkern.source.kinds import CUDA, Cpp, Cuda, Include, Source, Variant
from jitkern.target import Target


class FileKernel(RawKernel):
    """A kernel of a C++ or CUDA file; `k[template arguments]` is one instantiation.

    Template arguments are dtypes, bools and ints, in order or by name: `k[torch.float32, 128]`,
    `k[{"T": torch.float32}]`.
    """

    def __init__(
        self, source: Source, function: str, target: Target | None, names: Sequence[str]
    ) -> None:
        super().__init__(source, function, target)
        self._names = names
        self._template: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, template: Any) -> Any:
        bound = copy.copy(self)
        if isinstance(template, Mapping):
            bound._template = tuple(template.items())
            return bound
        values = template if isinstance(template, (tuple, list)) else (template,)
        if self._names and len(values) > len(self._names):
            raise LaunchError(
                f"{self!r} has {len(self._names)} template parameters "
                f"({', '.join(self._names)}), got {len(values)}"
            )
        names = self._names or [str(number) for number in range(len(values))]
        bound._template = tuple(zip(names, values))
        return bound

    @property
    def variant(self) -> Variant:
        """The variant that is compiled for these template arguments."""
        return variant_of(self.op, self.source, self._call((), {}))[0]

    def compile(self, target: Target | str | None = None) -> Entry:
        """Return the kernel's entry in the cache, built if need be; a named target needs no device.

        Raises the errors of `jit.ensure`.
        """
        return self._ensure(self.variant, self._target(target))

    def _call(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
        return Call(self.function, self._template, args, keywords)


class CudaKernel(FileKernel):
    """A `__global__` function of a `.cu` file."""

    def __call__(
        self,
        *args: Any,
        grid: Any,
        block: Any,
        smem: int = 0,
        cluster: Any = None,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> None:
        """Launch the kernel on the current stream of its tensors' device.

        Raises LaunchError for arguments that do not fit its parameters: nothing is ever truncated.
        """
        keywords = {"grid": grid, "block": block, "smem": smem}
        keywords |= {"cooperative": cooperative, "pdl": pdl}
        keywords |= {} if cluster is None else {"cluster": cluster}
        self._start(self._call(args, keywords))


class CppKernel(FileKernel):
    """A function of a `.cpp` file, which runs on the CPU."""

    device = "cpu"

    def __call__(self, *args: Any) -> None:
        """Run the function. Raises LaunchError for arguments that do not fit its parameters."""
        self._start(self._call(args, {}))


def cuda_kernel(
    path: str | Path = "",
    name: str = "",
    *,
    text: str = "",
    template: Any = (),
    include: Sequence[str | Include] = (),
    flags: Sequence[str] = (),
    environment: Sequence[str] = (),
    arch_specific: bool = False,
    target: Target | str | None = None,
) -> CudaKernel:
    """Return a `__global__` function of a `.cu` file, to be called with `grid` and `block`.

    path: relative to the folder of the calling file, or else to the current directory.
    name: `scale`, `ns::scale`, `scale<float>`, or for one of several overloads `scale(float*)`.
    text: the source itself, in place of `path`: `cuda_kernel(text=..., name="scale")`.
    template: template arguments, see `FileKernel`.
    include: directories for `#include`, beside the file or found like `path`.
    flags, environment, arch_specific: the same as for a declared source.

    Host code needs nvcc, or `#ifndef __CUDACC_RTC__` around it. Raises DeclarationError.
    """
    source = _source(
        Cuda, path, name, text, include=include, flags=flags, environment=environment,
        arch_specific=arch_specific,
    )  # fmt: skip
    name, names = _function_in(source, name, "`__global__` function")
    kernel = CudaKernel(source, name, target_of(target), names)
    return kernel[template] if template else kernel


def cpp_kernel(
    path: str | Path = "",
    name: str = "",
    *,
    text: str = "",
    template: Any = (),
    include: Sequence[str | Include] = (),
    flags: Sequence[str] = (),
    environment: Sequence[str] = (),
    native: bool = False,
    openmp: bool = False,
    target: Target | str | None = None,
) -> CppKernel:
    """Return a function of a C++ file that returns nothing, to be called on CPU tensors.

    The function may be `extern "C"`, plain C++ or a template; for the parameters see `cuda_kernel`
    and `Cpp`. Raises DeclarationError.
    """
    source = _source(
        Cpp, path, name, text, include=include, flags=flags, environment=environment,
        native=native, openmp=openmp,
    )  # fmt: skip
    name, names = _function_in(source, name, "function")
    kernel = CppKernel(source, name, target_of(target), names)
    return kernel[template] if template else kernel


def _source(
    kind: type[Source], path: str | Path, name: str, text: str, *,
    include: Sequence[str | Include], **rest: Any,
) -> Source:  # fmt: skip
    """Return the source at a path, or of a text. Raises DeclarationError."""
    if bool(path) == bool(text) or not name:
        raise DeclarationError(
            f'give either a file and a function, ("scale{kind.suffixes[0]}", "scale"), or a text '
            'and a function, (text=..., name="scale")'
        )
    frame = sys._getframe(2)
    if text:
        plain = re.sub(r"\W.*", "", cpp_text.last_name(name))
        file = f"{plain or 'text'}{kind.suffixes[0]}"
        folder = Path(frame.f_globals.get("__file__", "text")).absolute().parent
        rest |= {"text": text, "written_at": [(0, 0, frame.f_code.co_filename, frame.f_lineno)]}
    else:
        place = place_of(path, depth=3)
        file, folder = place.name, place.parent
    source = kind(file, folder=str(folder), include=include, **rest)
    roots = []
    for root in source.include:
        beside = folder / root.path
        found = beside if beside.is_dir() else place_of(root.path, depth=3, folder=True)
        roots.append(root._replace(path=str(found)))
    return source.replace(include=tuple(roots))


def _function_in(source: Source, name: str, what: str) -> tuple[str, Sequence[str]]:
    """Return the function as C++ names it, and the names of its template parameters.

    Raises DeclarationError for a function that the file and its headers do not have.
    """
    path = source.paths[0]
    text = cpp_text.read(path)
    functions = cpp_text.kernels_in(text) if source.runs == CUDA else cpp_text.functions_in(text)
    matches = cpp_text.named(functions, name)
    if not matches and source.runs == CUDA:  # a header may define a macro for `__global__`
        functions = cpp_text.kernels_in(text, map(cpp_text.read, closure_of(source).paths))
        matches = cpp_text.named(functions, name)
    plain = cpp_text.plain_name(name)
    names = list(dict.fromkeys(f.name for f in matches))
    listed = ", ".join(dict.fromkeys(f.display_name for f in functions)) or "none"
    if len(names) > 1 and plain not in names:
        raise DeclarationError(f"{path} has several {what}s `{name}`: {', '.join(names)}")
    if not matches and (
        cpp_text.named(cpp_text.functions_in(text), name) or not _may_define(source, plain)
    ):
        raise DeclarationError(f"{path} has no {what} `{name}`; it has: {listed}")
    if len(names) == 1:
        name = names[0] + name[name.index(plain) + len(plain) :]
    templates = [f.template for f in matches if f.template]
    return name, max(templates, key=len, default=())


def _may_define(source: Source, plain: str) -> bool:
    """Whether a macro of the file or its headers may define a function: it is named, or pasted."""
    word = re.compile(rf"\b{re.escape(plain.rpartition('::')[2])}\b")
    texts = [cpp_text.read(path) for path in closure_of(source).paths]
    pastes = any("##" in body for _, body in cpp_text.macros_in(texts))
    return pastes or any(word.search(text) and word.search(cpp_text.masked(text)) for text in texts)
