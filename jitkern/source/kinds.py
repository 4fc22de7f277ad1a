"""Plain data: where a kernel's code comes from, and which specialisation of it to compile.

Nothing here imports Torch, so a compiler's child process reads it too.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jitkern import config, source as source_room
from jitkern.errors import DeclarationError, call_site, meant
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES, Constant

if TYPE_CHECKING:
    import inspect
    from typing import NoReturn, TypedDict

    from typing_extensions import Unpack

    class Options(TypedDict, total=False):
        """The keywords that each kind of source takes: the parameters of `Source`."""

        text: str
        include: Sequence[str | Include]
        flags: Sequence[str]
        environment: Sequence[str]
        min_compiler: str
        strided: bool
        folder: str
        package: str
        module: str
        unit_flags: Sequence[Unit]
        others: Sequence[str]
        written_at: Sequence[tuple[int, int, str, int]]


FUNCTION = "jitkern_function"  # the symbol of a library that calls its kernel, from addresses
DRIVER = "jitkern_driver"  # its table of functions of the CUDA driver, if it launches on a GPU
TEXT = 1024  # bytes that it has for the text of an exception


class Include(NamedTuple):
    """A directory that `#include` searches: `Include("cutlass/include", version="4.7")`.

    Its headers enter the key by content. With a `version` (CUTLASS, CCCL) the version enters the
    key instead.
    """

    path: str
    version: str = ""


class Unit(NamedTuple):
    """A file with compiler flags of its own: `Unit("b.cu", flags=("-maxrregcount=32",))`."""

    file: str
    flags: tuple[str, ...] = ()


@functools.cache
def shared_include() -> str:
    """The folder of jitkern's headers."""
    return str(Path(__file__).parents[1] / "kernels_src" / "include")


def _refusal(text: str) -> DeclarationError:
    """The error for a wrong declaration of a source, with its line."""
    return DeclarationError(call_site() + text)


def unknown_keyword(what: str, given: Iterable[str], known: Iterable[str]) -> str:
    """The message for keywords that a call does not take. what: the call, e.g. `Cpp('f.cpp')`."""
    name, known = next(iter(given)), sorted(known)
    return f"{what} takes {', '.join(known)}, got {name}{meant(name.lower(), known)}"


def strings(name: str, value: Sequence[Any], among: tuple[type, ...] = ()) -> tuple[str, ...]:
    """The strings of the list that was given as `name`. Raises DeclarationError.

    among: types of items that may stand among the strings.
    """
    if isinstance(value, str):
        raise _refusal(f"{name}={value!r} is a string: give a list, [{value!r}]")
    if isinstance(value, Mapping):
        remedy = 'what is for one file alone goes to its Unit("file.cu", flags=[...])'
        raise _refusal(f"{name}={value!r} is a dict: give a list; {remedy}")
    if not isinstance(value, Iterable):
        raise _refusal(f"{name}={value!r} is not a list: give a list of strings")
    if isinstance(value, AbstractSet):
        raise _refusal(f"{name}={value!r} is a set, of another order in each process: give a list")
    wrong = [item for item in value if not isinstance(item, (str, *among))]
    if wrong:
        remedy = f"write {str(wrong[0])!r}"
        raise _refusal(f"{name} lists strings, and {wrong[0]!r} is not one: {remedy}")
    return tuple(value)


def true_or_false(name: str, value: object) -> bool:
    """The value that was given as `name`. Raises DeclarationError if it is no bool."""
    if not isinstance(value, bool):
        raise _refusal(f"{name}={value!r}: write True or False")
    return value


CUDA = "cuda"  # a kernel that is launched with a grid
HOST = "host"  # a C function
CUDA_SUFFIXES = (".cu", ".cuh")  # of the files that nvcc compiles
ITSELF = "itself"  # a function that takes the arguments of the op: it needs no launch function


OURS = {"folder", "package", "module", "unit_flags", "others", "written_at"}  # not for authors


class _Signature:
    """The parameters of a kind of source, for `inspect`: its own ones, then those of `Source`."""

    def __get__(self, source: Source | None, kind: type[Source]) -> inspect.Signature:
        import inspect

        own, shared = (inspect.signature(c.__init__).parameters for c in (kind, Source))
        _, *listed = {**own, **shared, **own}.values()
        told = (p for p in listed if p.kind != p.VAR_KEYWORD and p.name not in OURS)
        return inspect.Signature([*told])


class Source:
    """Files of one kind in a kernel's folder, and how to compile them.

    files: names relative to the folder that declares the kernel, or `Unit`s. Each of several is
        compiled separately; an Extension links them.
    include: more directories for `#include`; the folder and the `include` beside it are always
        searched.
    flags: more compiler flags; they enter the key unchanged.
    text: the content of the file, in place of a file; `#include` still searches the folder that
        declares the kernel.
    environment: names of variables the build depends on; their values are passed on and enter
        the key.
    min_compiler: the oldest compiler version that may build the files, e.g. "12.8".
    strided: whether the kernels take tensors of any strides. Those of other sources take contiguous
        tensors alone. Not for an Extension, which gets whole tensors.
    """

    kind: ClassVar[str] = ""
    suffixes: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[tuple[str, ...]] = ()  # that it may be declared for
    runs: ClassVar[str] = ""  # CUDA, HOST or ITSELF
    in_python: ClassVar[bool] = False  # whether its kernels are functions of one Python file
    declares: ClassVar[bool] = False  # whether launches need what these functions declare
    flat: ClassVar[bool] = False  # whether a tensor is passed as its address, sizes and strides
    compiler: ClassVar[str] = ""  # `module:class`, see jitkern.compilers.Compiler
    seconds: ClassVar[float] = 0.4  # that a compile usually takes
    function: str = ""  # of an Extension
    __signature__ = _Signature()

    def __init_subclass__(cls) -> None:
        if cls.__doc__ and (base := cls.__mro__[1].__doc__):  # not under -OO
            cls.__doc__ = "\n".join((cls.__doc__.rstrip(), base.partition("\n")[2]))

    # Not a dataclass: an import makes these classes, and each would take half a millisecond.
    def __init__(
        self,
        files: str | Unit | Sequence[str | Unit] = (),
        *,
        text: str = "",
        include: Sequence[str | Include] = (),
        flags: Sequence[str] = (),
        environment: Sequence[str] = (),
        min_compiler: str = "",
        strided: bool = False,
        folder: str = "",
        package: str = "",
        module: str = "",
        unit_flags: Sequence[Unit] = (),
        others: Sequence[str] = (),
        written_at: Sequence[tuple[int, int, str, int]] = (),
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            kind = type(self).__name__
            raise _refusal(unknown_keyword(f"{kind}({files!r})", unknown, self._keywords()))
        if not isinstance(text, str):
            raise _refusal(f"text={text!r:.80} is not a string: give the content of a file")
        if text and not files:
            files = f"text{self.suffixes[0]}"
        if not isinstance(files, (str, Unit, list, tuple)):
            raise _refusal(f"{type(self).__name__} takes names of files, got {files!r:.80}")
        units = [files] if isinstance(files, (str, Unit)) else list(files)
        own = [*(unit for unit in units if not isinstance(unit, str)), *unit_flags]
        self.files = tuple(unit if isinstance(unit, str) else unit[0] for unit in units)
        self.unit_flags = tuple(Unit(file, strings("flags", more)) for file, more in own if more)
        self.others = tuple(others)
        strings("include", include, among=(tuple, list))
        self.include = tuple(Include(i) if isinstance(i, str) else Include(*i) for i in include)
        self.flags = strings("flags", flags)
        self.environment = strings("environment", environment)
        if not isinstance(min_compiler, str):
            raise _refusal(f"min_compiler={min_compiler!r} is not a string: write '{min_compiler}'")
        self.min_compiler = min_compiler
        self.strided = true_or_false("strided", strided)
        if strided and self.runs == ITSELF:
            raise _refusal("strided=True is for no Extension: it reads the strides of its tensors")
        self.text = text
        self.written_at = tuple(written_at)
        self.home = folder
        self.package = package
        self.module = module
        if text and (len(self.files) != 1 or Path(self.files[0]).name != self.files[0]):
            raise _refusal(f"a text is one file, with a name and no folder, got {self.files}")
        wrong = [file for file in self.files if not file.endswith(self.suffixes)]
        if wrong or not self.files or (self.in_python and len(self.files) > 1):
            what = "one file" if self.in_python else "files"
            raise _refusal(
                f"{type(self).__name__} takes {what} ending in {' or '.join(self.suffixes)}, "
                "or the text of one, got "
                + (f"`{', '.join(self.files)}`" if any(self.files) else "neither")
            )
        if len(set(self.files)) != len(self.files):
            raise _refusal(f"a file is given twice: `{', '.join(self.files)}`")
        if len(self.files) == 1:
            self.flags, self.unit_flags = self.flags_of(self.files[0]), ()

    @classmethod
    def _keywords(cls) -> list[str]:
        """The keywords that authors write."""
        parameters = cls.__signature__.parameters.values()
        return sorted(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)

    def flags_of(self, file: str) -> tuple[str, ...]:
        """The flags for one of the files: the flags for all files, then its own."""
        own = (flag for unit in self.unit_flags if unit.file == file for flag in unit.flags)
        return (*self.flags, *own)

    @property
    def every_flag(self) -> tuple[str, ...]:
        """The flags for all files, then those of single files."""
        return (*self.flags, *(flag for unit in self.unit_flags for flag in unit.flags))

    def unit(self, file: str) -> Source:
        """Return one of the files as a separate source; `others` names the rest, for messages."""
        rest = tuple(other for other in self.files if other != file)
        return self.replace(files=(file,), flags=self.flags_of(file), unit_flags=(), others=rest)

    @property
    def owner(self) -> str:
        """The name of the artifacts of all ops in the cache; "" if each op gives them its own."""
        return ""

    def fields(self) -> dict[str, Any]:
        """The arguments of the source: `type(source)(**source.fields()) == source`."""
        return {"folder" if name == "home" else name: value for name, value in vars(self).items()}

    def replace(self, **fields: Any) -> Source:
        """A copy of the source with these fields changed."""
        copied = copy.copy(self)
        if "folder" in fields:
            fields["home"] = fields.pop("folder")
        copied.__dict__.update(fields)
        return copied

    def placed(self, folder: str, place: tuple[str, int], **fields: str) -> Source:
        """A copy as the folder declares it, at a place: a Python file or cell, and a line."""
        written_at = {"written_at": ((0, 0, *place),)} if self.text else {}
        return self.replace(folder=folder, **fields, **written_at)

    def on_disk(self) -> Source:
        """The source as files that another process can read, whether or not it was a text."""
        if not self.text:
            return self
        include = () if self.in_python else tuple(Include(*root) for root in self.roots[1:])
        return self.replace(text="", folder=self.folder, include=include)

    @property
    def folder(self) -> str:
        """The folder of the files; of a text, a temporary folder that holds it as a file.

        Raises CacheError where no directory for a text can be written.
        """
        return source_room.texts.folder_of({self.files[0]: self.text}) if self.text else self.home

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items() if v)})"
        )

    @property
    def paths(self) -> list[Path]:
        """The paths of the files."""
        return [Path(self.folder, file) for file in self.files]

    @property
    def roots(self) -> list[Include]:
        """The directories that `#include` searches, in order; for kernels, jitkern's is last."""
        shared = Path(self.home).parent / "include"
        last = [Include(str(shared))] if shared.is_dir() else []
        if self.runs in (CUDA, HOST):
            last.append(Include(shared_include()))
        inside = dict.fromkeys(str(path.parent) for path in self.paths)
        return [
            *(Include(path) for path in inside if Path(path) != Path(self.home)),
            Include(self.home),
            *(Include(str(Path(self.home, i.path)), i.version) for i in self.include),
            *last,
        ]

    @property
    def searched(self) -> list[str]:
        """The roots that exist as directories: gcc refuses one inside of a zip file."""
        return [root.path for root in self.roots if Path(root.path).is_dir()]


class Cuda(Source):
    """`.cu` files of `__global__` functions, compiled by NVRTC (by nvcc if NVRTC refuses them).

    Of several files, the file that defines a kernel is compiled for it.

    arch_specific: compile for the features of one arch only (wgmma, setmaxnreg, tcgen05): for
        `sm_90a` if the target is `sm_90`, and so on from `sm_90` on. It does not change an
        older arch, which has no such features.
    """

    kind: ClassVar[str] = "nvrtc"
    suffixes: ClassVar[tuple[str, ...]] = (".cu",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    runs: ClassVar[str] = CUDA
    compiler: ClassVar[str] = "jitkern.compilers.cuda.nvrtc:Nvrtc"

    def __init__(
        self,
        files: str | Unit | Sequence[str | Unit] = (),
        *,
        arch_specific: bool = False,
        **rest: Unpack[Options],
    ) -> None:
        super().__init__(files, **rest)
        if not isinstance(arch_specific, bool):
            raise _refusal(
                f"arch_specific={arch_specific!r}: write True or False; the target names the arch"
            )
        self.arch_specific = arch_specific


class Cpp(Source):
    """C++ for the CPU: functions and templates over raw pointers, no Torch header.

    Of several files, the file that defines a kernel is compiled for it.

    native: compile for the instruction set of the machine (or of the target, if it names one).
    openmp: compile and link with OpenMP.
    """

    kind: ClassVar[str] = "cc"
    suffixes: ClassVar[tuple[str, ...]] = (".cpp", ".cc", ".cxx")
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    runs: ClassVar[str] = HOST
    compiler: ClassVar[str] = "jitkern.compilers.cpp.cc:Cc"

    def __init__(
        self,
        files: str | Unit | Sequence[str | Unit] = (),
        *,
        native: bool = False,
        openmp: bool = False,
        **rest: Unpack[Options],
    ) -> None:
        super().__init__(files, **rest)
        self.native = true_or_false("native", native)
        self.openmp = true_or_false("openmp", openmp)


class PythonSource(Source):
    """A `.py` file of kernels, which only the compiler's process imports."""

    suffixes: ClassVar[tuple[str, ...]] = (".py",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    runs: ClassVar[str] = CUDA
    seconds: ClassVar[float] = 1.0
    in_python: ClassVar[bool] = True

    def placed(self, folder: str, place: tuple[str, int], **fields: str) -> Source:
        """A copy as the folder declares it, in the package of its file."""
        placed = super().placed(folder, place, **fields)
        parts = placed.package.split(".") if placed.package else []
        if parts and os.sep in self.files[0]:
            for folder_name in Path(os.path.normpath(self.files[0])).parent.parts:
                parts = parts[:-1] if folder_name == ".." else [*parts, folder_name]
        return placed.replace(package=".".join(parts))


class Triton(PythonSource):
    """A `.py` file of `@triton.jit` functions, or one such function of a file or a cell."""

    kind: ClassVar[str] = "triton"
    compiler: ClassVar[str] = "jitkern.compilers.triton.compiler:TritonCompiler"
    declares: ClassVar[bool] = True

    def __init__(self, files: Any = (), **rest: Unpack[Options]) -> None:
        if callable(files) or hasattr(files, "fn"):  # a JITFunction, or a decorator over it
            files, more = source_room.declarations.source_of(files)
            rest = {**more, **rest}  # type: ignore[typeddict-item]
        super().__init__(files, **rest)

    def placed(self, folder: str, place: tuple[str, int], **fields: str) -> Source:
        """A copy as the folder declares it; a function stays where it is, and in its package."""
        placed = super().placed(folder, place, **fields)
        if self.text:
            return placed.replace(written_at=self.written_at or placed.written_at, package="")
        if Path(self.files[0]).is_absolute():
            file = os.path.relpath(self.files[0], folder)
            return placed.replace(files=(file,), package=self.package)
        return placed


class ImportedSource(PythonSource):
    """A file whose build imports it, and of which nothing but what the key covers counts.

    packages: the versions of other packages that the file imports, e.g. `{"numpy": "2.3.4"}`. They
        enter the key; a build refuses packages that are not named, and other versions.
    """

    flat: ClassVar[bool] = True
    language: ClassVar[tuple[str, ...]] = ()  # the modules that it may import without a version
    options: ClassVar[tuple[str, ...]] = ()  # of the compiler, that `flags` may give
    variables: ClassVar[tuple[str, ...]] = ()  # of the compiler, that `environment` may name
    prefix: ClassVar[str] = "-"  # of all variables of the compiler
    keywords: ClassVar[tuple[str, ...]] = ()  # that a launch takes
    takes: ClassVar[str]  # what messages say of keywords

    def __init__(
        self,
        files: str | Sequence[str] = (),
        *,
        packages: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        **rest: Unpack[Options],
    ) -> None:
        super().__init__(files, **rest)
        pairs = packages.items() if isinstance(packages, Mapping) else packages
        if any(isinstance(pair, str) for pair in pairs):
            raise _refusal(f'packages={packages!r}: say the versions, as in {{"numpy": "2.3.4"}}')
        self.packages = tuple(sorted((str(name), str(version)) for name, version in pairs))
        if self.include:
            raise _refusal(f"include={self.include!r}: a file in Python includes none")
        if wrong := [flag for flag in self.flags if not flag.startswith(self.options)]:
            known = ", ".join(self.options) or "none: options stand at `@ct.kernel(...)`"
            raise _refusal(f"flags={wrong}: of the compiler's options it takes {known}")
        own = (name for name in self.environment if name.startswith(self.prefix))
        if wrong := [name for name in own if name not in self.variables]:
            raise _refusal(
                f"environment={wrong}: jitkern sets it, or it changes nothing that is compiled; of "
                f"{self.prefix}* it takes {', '.join(self.variables)}"
            )

    @property
    def requirements(self) -> tuple[str, ...]:
        """The packages as pip names them."""
        return tuple(f"{name}=={version}" for name, version in self.packages)


class CuTile(ImportedSource):
    """A `.py` file of `@ct.kernel` functions of `cuda.tile`."""

    kind: ClassVar[str] = "cutile"
    compiler: ClassVar[str] = "jitkern.compilers.cutile.compiler:CuTileCompiler"
    language: ClassVar[tuple[str, ...]] = ("cuda.tile",)
    keywords: ClassVar[tuple[str, ...]] = ("grid",)
    takes: ClassVar[str] = (
        "a cuTile kernel takes a `grid` alone: options like num_ctas stand at `@ct.kernel(...)`"
    )


class Cute(ImportedSource):
    """A `.py` file of `@cute.jit` functions of the CuTe DSL, whose last parameter is the stream."""

    kind: ClassVar[str] = "cute"
    compiler: ClassVar[str] = "jitkern.compilers.cute.compiler:CuteCompiler"
    language: ClassVar[tuple[str, ...]] = ("cutlass", "cuda.bindings")
    runs: ClassVar[str] = HOST
    options: ClassVar[tuple[str, ...]] = (
        "--opt-level", "--ptxas-options", "--enable-assertions", "--generate-line-info",
    )  # fmt: skip
    variables: ClassVar[tuple[str, ...]] = (
        "CUTE_DSL_AUTO_M2S", "CUTE_DSL_COMPILER_BACKEND", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_DEBUG",
        "CUTE_DSL_ENABLE_ASSERTIONS", "CUTE_DSL_ENABLE_PYIR", "CUTE_DSL_LINEINFO",
        "CUTE_DSL_LOC_TRACEBACKS", "CUTE_DSL_TOLERATE_M2M", "CUTE_DSL_WARNINGS_AS_ERRORS",
    )  # fmt: skip
    prefix: ClassVar[str] = "CUTE_DSL_"
    takes: ClassVar[str] = "a function of CuTe takes no keyword: it computes its grid itself"


class Extension(Source):
    """C++ or CUDA with Torch's headers that registers itself; one library of all its files.

    Ops whose Extensions differ only in `function` share one build.

    function: `ns::name` for an op the source registers (TORCH_LIBRARY, STABLE_TORCH_LIBRARY), a
        plain name for a pybind function (the source holds its PYBIND11_MODULE). The function takes
        the arguments of the op.
    name: its name in the cache; the last part is TORCH_EXTENSION_NAME. The default is the name of
        the first file.
    libraries: names of libraries to link with: `foo` for libfoo.so or libfoo.a.
    library_dirs: directories to find them in, before the system's; relative to the folder. The
        libraries there enter the key by content, and shared ones are loaded before the extension.
    ldflags: more linker flags; they enter the key unchanged.
    """

    kind: ClassVar[str] = "extension"
    suffixes: ClassVar[tuple[str, ...]] = (".cpp", ".cc", ".cxx", ".cu")
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    runs: ClassVar[str] = ITSELF
    compiler: ClassVar[str] = "jitkern.compilers.torch_extension.extension:ExtensionCompiler"
    seconds: ClassVar[float] = 20.0

    def __init__(
        self,
        files: str | Unit | Sequence[str | Unit] = (),
        *,
        function: str,
        name: str = "",
        libraries: Sequence[str] = (),
        library_dirs: Sequence[str] = (),
        ldflags: Sequence[str] = (),
        **rest: Unpack[Options],
    ) -> None:
        super().__init__(files, **rest)
        self.function = function
        self.name = name
        self.libraries = strings("libraries", libraries)
        self.library_dirs = strings("library_dirs", library_dirs)
        self.ldflags = strings("ldflags", ldflags)
        parts = function.split("::") if isinstance(function, str) else ()
        if len(parts) not in (1, 2) or not all(map(str.isidentifier, parts)):
            raise _refusal(
                f"function={function!r}: write `ns::name` for an op that the source registers, or "
                "`name` for a function that its PYBIND11_MODULE binds"
            )
        if name and not (isinstance(name, str) and all(map(str.isidentifier, name.split(".")))):
            raise _refusal(f"name={name!r} is not a name of a module, such as `mylib._C`")
        for library in self.libraries:
            if library.startswith("-") or "/" in library:
                raise _refusal(
                    f"libraries=[{library!r}]: write `foo` for libfoo.so, its directory in "
                    "library_dirs, and flags and whole paths in ldflags"
                )

    @property
    def shared_build(self) -> Extension:
        """The same for all ops that share a build."""
        function = "::" if "::" in self.function else ""
        build = self.replace(function=function, module="", package="")
        assert isinstance(build, Extension)
        return build

    @property
    def owner(self) -> str:
        """The name of the extension."""
        stem = re.sub(r"\W+|^(?=\d)", "_", Path(self.files[0]).stem, flags=re.ASCII)
        return self.name or stem

    @property
    def link_words(self) -> tuple[str, ...]:
        """The linker's words for the libraries, free of paths, and `ldflags`."""
        return (*(f"-l{library}" for library in self.libraries), *self.ldflags)

    @property
    def library_folders(self) -> list[str]:
        """The paths of `library_dirs`."""
        return [str(Path(self.home, folder)) for folder in self.library_dirs]

    @property
    def pybind(self) -> bool:
        """Whether the artifact is a Python module rather than a library that registers ops."""
        return "::" not in self.function

    def is_cuda(self, file: str) -> bool:
        """Whether nvcc compiles the file."""
        return file.endswith(CUDA_SUFFIXES)


class Generated(Source):
    """Plain C without headers that jitkern wrote itself: the launch runtime."""

    kind: ClassVar[str] = "runtime"
    suffixes: ClassVar[tuple[str, ...]] = (".c",)
    devices: ClassVar[tuple[str, ...]] = ()
    runs: ClassVar[str] = HOST
    compiler: ClassVar[str] = "jitkern.compilers.cpp.generated:GeneratedCompiler"

    def __init__(self, files: str | Sequence[str], *, text: str, **rest: Any) -> None:
        super().__init__(files, **rest)
        self.text = text

    @property
    def folder(self) -> str:
        """No folder: the compiler writes the text to its staging directory."""
        return ""


SOURCES: dict[str, type[Source]] = config.KINDS  # so that the setting `prefer` may name each kind
SOURCES.update({kind.kind: kind for kind in (Cuda, Cpp, Triton, CuTile, Cute, Extension)})


class Variant(NamedTuple):
    """One specialisation of one source of one op: the unit of compilation.

    function: the `__global__`, `extern "C"`, `@triton.jit`, `@ct.kernel` or `@cute.jit` function;
    empty for an Extension.
    template: template arguments, macros, constexprs or constants, by name, in order.
    signature: Triton's classes of the other arguments, e.g. `*f32:16`, `i32:16`, `1`; those of
    cuTile and CuTe, see `argument_classes`.
    options: Triton's compile options, e.g. num_warps.
    facts: what an import of a Triton file reads, and finds; see `import_facts`.
    """

    op: str
    source: Source
    function: str = ""
    template: tuple[tuple[str, Constant], ...] = ()
    signature: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    facts: tuple[tuple[str, Any], ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant) or not tuple.__eq__(self, other):
            return False
        return repr(self.template) == repr(other.template)  # 1 == 1.0 == True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    @property
    def label(self) -> str:
        """A short readable name, not unique: `f32`, `rows.f16.BLOCK1024`."""
        base = self.op.split("::")[-1]
        values = [v if v in DTYPES else f"{name}{v}" for name, v in self.template]
        if self.source.in_python:
            codes = {part.strip("*").partition(":")[0] for part in self.signature if part[0] == "*"}
            values = sorted(codes) + values
        parts = ([self.function] if self.function not in ("", base) else []) + values
        text = ".".join(parts) or (self.source.kind if self.source.runs == ITSELF else "")
        return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)[:80]
