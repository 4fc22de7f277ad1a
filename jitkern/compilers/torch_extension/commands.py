"""The command lines of `torch.utils.cpp_extension`, for the Torch that is installed.

Three things differ: flags that keep the artifact free of paths (-ffile-prefix-map), a flag that
lets g++ use more memory, and a library without -g keeps no symbols that nothing links to.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers import dependencies
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.cuda import toolkit
from jitkern.errors import CompilerNotFound
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import CUDA_SUFFIXES, Unit

NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
_ROOMY = "--param=ggc-min-heapsize=1048576"
NVCC_REMEDY = (
    "install the CUDA toolkit (apt-get install cuda-nvcc-13-0, or pip's cuda-toolkit[nvcc]), and "
    "set CUDA_HOME where it is not on PATH"
)


class Build(NamedTuple):
    """A module, library or program, and all that it is made of.

    name: TORCH_EXTENSION_NAME.
    output: `module`, `library` or `program`.
    python: whether the artifact depends on Python's ABI.
    units: each with all its flags; its file is an absolute path, or a name with a text in `texts`.
    environment: the names of variables that the compilers get.
    """

    name: str
    output: str
    python: bool
    units: Sequence[Unit]
    texts: Mapping[str, str]
    include: Sequence[str]
    with_cuda: bool
    ldflags: Sequence[str] = ()
    environment: tuple[str, ...] = ()

    def is_cuda(self, unit: Unit) -> bool:
        """Whether nvcc compiles the unit."""
        return self.with_cuda and unit.file.endswith(CUDA_SUFFIXES)


class Command(NamedTuple):
    """A command, the file that it writes, and flags to add where memory is plentiful.

    needed: whether the build fails if this command fails.
    """

    command: list[str]
    output: Path
    roomy: tuple[str, ...] = ()
    needed: bool = True


def compile_step(build: Build, number: int, folder: Path, *, gcc: bool = False) -> Command:
    """The step that compiles the unit of this number in `folder`. Raises CompilerNotFound."""
    unit = build.units[number]
    output = folder / f"{number}.o"
    listing = dependencies.listing(str(number), gcc=gcc, nvcc=build.is_cuda(unit))
    command = [*_command("-c", build, unit, folder, listing), "-o", output.name]
    prefix = "-Xcompiler=" if build.is_cuda(unit) else ""
    roomy = f"{prefix}{_ROOMY}"
    return Command(command, output, (roomy,) if gcc else ())


def expand_step(build: Build, number: int, folder: Path) -> Command:
    """The step that runs only the preprocessor on the unit, as for the CPU."""
    unit, output = build.units[number], folder / f"{number}.ii"
    host = ("-Xcompiler=-U__CUDA_ARCH__",) if build.is_cuda(unit) else ()
    command = [*_command("-E", build, unit, folder, host), "-o", output.name]
    return Command(command, output, needed=False)


def _command(step: str, build: Build, unit: Unit, folder: Path, own: Sequence[str]) -> list[str]:
    """The compiler, all flags and the file; `own` are the flags of the step."""
    maps = _prefix_maps(build, unit, folder)
    what = step, os.path.join(os.curdir, unit.file)  # noqa: PTH118  `__FILE__` has a folder
    if build.is_cuda(unit):
        handed_on = [f"-Xcompiler={flag}" for flag in maps if "," not in flag]
        return [*nvcc()[0], *own, *_nvcc_flags(build, unit), *handed_on, *what]
    tool = shlex.split(config.current().cxx)
    standard = ("-fPIC", f"-std={standard_of_torch()}")
    return [*tool, *own, *_common_flags(build), *standard, *maps, *unit.flags, *what]


def link_step(build: Build, objects: Sequence[Path], linked: Path) -> Command:
    """The step that links `objects` into the library or program `linked`."""
    libraries = torch_folder() / "lib"
    program = build.output == "program"
    cuda = build.with_cuda
    flags = [*build.ldflags, *(flag for unit in build.units for flag in unit.flags)]
    debugged = any(f.startswith("-g") and not f.startswith("-gencode") for f in flags)
    command = [
        *shlex.split(config.current().cxx),
        *(path.name for path in objects),
        *(() if program else ("-shared",)),
        *(() if debugged else ("-Wl,-s",)),
        *build.ldflags,
        *(f"-L{libraries}", "-lc10", *(("-lc10_cuda",) if cuda else ()), "-ltorch_cpu"),
        *(*(("-ltorch_cuda",) if cuda else ()), "-ltorch"),
        *((f"-Wl,-rpath,{libraries}",) if program else ("-ltorch_python",)),
        *(_cuda_libraries(build) if cuda else ()),
        *(dependencies.LINKERS_LIST, "-o", linked.name),
    ]
    return Command(command, linked)


def nvcc() -> tuple[list[str], tuple[int, int]]:
    """The command and version of nvcc; PYTORCH_NVCC sets the command. Raises CompilerNotFound."""
    tool = toolkit.nvcc()
    if not tool:
        raise CompilerNotFound(f"a CUDA source needs nvcc: {NVCC_REMEDY}", remedy=NVCC_REMEDY)
    command = config.current().environment.get("PYTORCH_NVCC")
    return shlex.split(command) if command else [tool[0]], tool[1]


def identity(*, with_nvcc: bool) -> dict[str, str]:
    """The compilers that would build: c++, or nvcc and its host's c++. Raises CompilerNotFound."""
    host = cc_build.identity(config.current().cxx)
    if not with_nvcc:
        return host
    return {"name": "nvcc", "version": ".".join(map(str, nvcc()[1])), "c++": host["version"]}


def torch_folder() -> Path:
    """The folder where Torch is installed."""
    import torch

    return Path(torch.__file__).parent


def toolchain(build: Build, files: Sequence[Path]) -> list[Path]:
    """Directories whose files the key covers by version: Torch's, Python's, CUDA's, the compilers'.

    files: the files that the build opened.
    """
    compilers = {config.current().cxx}
    if any(map(build.is_cuda, build.units)):
        compilers.add(config.current().environment.get("CC") or "c++")
    cuda = [*toolkit.include_directories()]
    cuda += [
        folder for kind in ("include", "lib64", "lib") for folder in _cuda_folders(kind, build)
    ]
    python = Path(sysconfig.get_path("include", scheme="posix_prefix"))
    own = [folder for tool in sorted(compilers) for folder in cc_build.toolchain(tool, files)]
    return [torch_folder(), python, *cuda, *own]


def _prefix_maps(build: Build, unit: Unit, folder: Path) -> list[str]:
    """Flags that keep `__FILE__` and debug information free of absolute paths."""
    own = Path(unit.file).parent
    homes = {str(folder), str(torch_folder().parent), *build.include}
    homes |= {str(own)} if own.is_absolute() else set()
    return [f"-ffile-prefix-map={home}=." for home in sorted(homes, key=len)]  # the last one wins


def _common_flags(build: Build) -> list[str]:
    include = torch_folder() / "include"
    roots = [include, include / "torch" / "csrc" / "api" / "include"]
    if build.with_cuda:
        roots += _cuda_folders("include", build)
    roots.append(Path(sysconfig.get_path("include", scheme="posix_prefix")))
    roots = [root for root in roots if root != Path("/usr/include")]
    return [
        *(() if build.output == "program" else ("-DTORCH_API_INCLUDE_EXTENSION_H",)),
        *(f"-I{root}" for root in build.include),
        *(word for root in roots for word in ("-isystem", str(root))),
    ]


def _nvcc_flags(build: Build, unit: Unit) -> list[str]:
    host = config.current().environment.get("CC")
    own_standard = any(flag.startswith("-std=") for flag in unit.flags)
    return [
        *(("-ccbin", host) if host else ()),
        *_common_flags(build),
        *NVCC_FLAGS,
        *("--compiler-options", "-fPIC"),
        *unit.flags,
        *(() if own_standard else (f"-std={standard_of_torch()}",)),
    ]


def _cuda_libraries(build: Build) -> list[str]:
    folders = [*_cuda_folders("lib64", build), *_cuda_folders("lib", build)]
    named = any((folder / "libcudart.so").exists() for folder in folders)
    versioned = sorted(path for folder in folders for path in folder.glob("libcudart.so.*"))
    runtime = [str(versioned[-1])] if versioned and not named else ["-lcudart"]
    return [*(f"-L{folder}" for folder in folders), *runtime]


def _cuda_folders(name: str, build: Build) -> list[Path]:
    """The toolkit's `include` or `lib`, or its wheels' if none is installed; and cuDNN's."""
    import torch

    major = int((torch.version.cuda or "13").partition(".")[0])
    homes = toolkit.cuda_homes()[:1] or toolkit.of_major(toolkit.wheel_prefixes(), major)
    environment = config.current().build_environment(build.environment)
    cudnn = environment.get("CUDNN_HOME") or environment.get("CUDNN_PATH")
    own = environment.get("CUDA_INC_PATH") if name == "include" else None
    folders = [home / name for home in (*homes, *((Path(cudnn),) if cudnn else ()))]
    return [folder for folder in (*folders, *((Path(own),) if own else ())) if folder.is_dir()]


@functools.cache
def standard_of_torch() -> str:
    """The C++ standard for this Torch's headers, read from the text of Torch's own builder."""
    text = (torch_folder() / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    match = re.search(r"""-fPIC['"], ['"]-std=(c\+\+\d\d)""", text)
    return match.group(1) if match else "c++20"
