"""The command lines of `torch.utils.cpp_extension`, for the Torch that is installed.

They differ in what makes the artifact free of where it was built (-ffile-prefix-map), in what lets
g++ take more memory, and in that a library without -g keeps no symbols that nothing links to.
"""

from __future__ import annotations

import functools
import re
import shlex
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jitkern import config
from jitkern.compilers import toolkit
from jitkern.errors import CompilerNotFound
from jitkern.inline import Inline

NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
_ROOMY = ("--param=ggc-min-heapsize=1048576",)
NVCC_REMEDY = (
    "install the CUDA toolkit (apt-get install cuda-nvcc-13-0, or pip's nvidia-cuda-nvcc), and set "
    "CUDA_HOME where it is not on PATH"
)


class Step(NamedTuple):
    """A unit: its command, what it writes, and where it lists what it opened."""

    command: list[str]
    output: Path
    opened: Path


def compile_step(source: Inline, number: int, folder: Path, *, roomy: bool = False) -> Step:
    """How the unit of this number is compiled in `folder`. Raises CompilerNotFound.

    roomy: there is memory for g++ not to look for what it can free, which takes 15 % of its time.
    """
    name, unit = source.units[number]
    path = name if isinstance(unit, str) else str(unit)
    output, opened = folder / f"{number}.o", folder / f"{number}.d"
    listing = ("-MMD", "-MF", opened.name)
    if source.is_cuda(name):
        command = [*nvcc()[0], *listing, *_nvcc_flags(source)]
    else:
        home = unit.parent if isinstance(unit, Path) else folder
        mapped = (f"-ffile-prefix-map={folder}=.", f"-ffile-prefix-map={home}=.")
        standard = ("-fPIC", f"-std={_standard()}", *(_ROOMY if roomy else ()))
        tool = shlex.split(config.current().cxx)
        command = [*tool, *listing, *_common_flags(source), *standard, *mapped, *source.cflags]
    return Step([*command, "-c", path, "-o", output.name], output, opened)


def link_command(source: Inline, objects: Sequence[Path], linked: Path) -> list[str]:
    """How they become the library or program `linked`."""
    libraries = torch_folder() / "lib"
    program = source.output == "program"
    cuda = source.with_cuda
    debugged = any(f.startswith("-g") for f in (*source.cflags, *source.ldflags))
    return [
        *shlex.split(config.current().cxx),
        *(path.name for path in objects),
        *(() if program else ("-shared",)),
        *(() if debugged else ("-Wl,-s",)),
        *source.ldflags,
        *(f"-L{libraries}", "-lc10", *(("-lc10_cuda",) if cuda else ()), "-ltorch_cpu"),
        *(*(("-ltorch_cuda",) if cuda else ()), "-ltorch"),
        *((f"-Wl,-rpath,{libraries}",) if program else ("-ltorch_python",)),
        *(_cuda_libraries() if cuda else ()),
        *("-o", linked.name),
    ]


def nvcc() -> tuple[list[str], tuple[int, int]]:
    """nvcc's command and version; PYTORCH_NVCC names another. Raises CompilerNotFound."""
    found = toolkit.nvcc()
    if not found:
        raise CompilerNotFound(f"a CUDA source needs nvcc: {NVCC_REMEDY}", remedy=NVCC_REMEDY)
    named = config.current().environment.get("PYTORCH_NVCC")
    return shlex.split(named) if named else [found[0]], found[1]


def torch_folder() -> Path:
    """Where Torch is installed."""
    import torch

    return Path(torch.__file__).parent


def _common_flags(source: Inline) -> list[str]:
    include = torch_folder() / "include"
    roots = [include, include / "torch" / "csrc" / "api" / "include"]
    if source.with_cuda:
        roots += _cuda_folders("include")
    roots.append(Path(sysconfig.get_path("include", scheme="posix_prefix")))
    roots = [root for root in roots if root != Path("/usr/include")]
    name = (f"-DTORCH_EXTENSION_NAME={source.name}", "-DTORCH_API_INCLUDE_EXTENSION_H")
    return [
        *(() if source.output == "program" else name),
        *(f"-I{root.path}" for root in source.include),
        *(word for root in roots for word in ("-isystem", str(root))),
    ]


def _nvcc_flags(source: Inline) -> list[str]:
    host = config.current().environment.get("CC")
    own_standard = any(flag.startswith("-std=") for flag in source.cuda_cflags)
    return [
        *(("-ccbin", host) if host else ()),
        *_common_flags(source),
        *NVCC_FLAGS,
        *source.arch,
        *("--compiler-options", "-fPIC"),
        *source.cuda_cflags,
        *(() if own_standard else (f"-std={_standard()}",)),
    ]


def _cuda_libraries() -> list[str]:
    folders = [*_cuda_folders("lib64"), *_cuda_folders("lib")]
    named = any((folder / "libcudart.so").exists() for folder in folders)
    versioned = sorted(path for folder in folders for path in folder.glob("libcudart.so.*"))
    runtime = [str(versioned[-1])] if versioned and not named else ["-lcudart"]
    return [*(f"-L{folder}" for folder in folders), *runtime]


def _cuda_folders(name: str) -> list[Path]:
    """The toolkit's `include` or `lib`, those of its wheels where none is installed; cuDNN's."""
    homes = toolkit.cuda_homes()[:1] or toolkit.wheel_prefixes()
    environment = config.current().environment
    cudnn = environment.get("CUDNN_HOME") or environment.get("CUDNN_PATH")
    own = environment.get("CUDA_INC_PATH") if name == "include" else None
    found = [home / name for home in (*homes, *((Path(cudnn),) if cudnn else ()))]
    return [folder for folder in (*found, *((Path(own),) if own else ())) if folder.is_dir()]


@functools.cache
def _standard() -> str:
    """The C++ standard that this Torch's headers are for: its own builder names it."""
    text = (torch_folder() / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    found = re.search(r"""-fPIC['"], ['"]-std=(c\+\+\d\d)""", text)
    return found.group(1) if found else "c++20"
