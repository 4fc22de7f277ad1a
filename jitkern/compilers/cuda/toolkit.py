"""Find the CUDA toolchain: pip wheels (no CUDA_HOME needed), then an installed toolkit."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from jitkern import config
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.target import Target

# The wheels that hold the headers of these names.
HEADER_WHEELS = (
    (r"crt/", "nvidia-cuda-crt"),
    (r"(cub|thrust|cuda|nv)/|cooperative_groups", "nvidia-cuda-cccl"),
    (r"cuda_\w+\.h|cuda_(fp16|bf16|fp8)|mma\.h|vector_", "nvidia-cuda-runtime"),
)


def pip_line(wheel: str, version: tuple[int, int]) -> str:
    """The pip line that installs `wheel` (named as for CUDA 13) for this CUDA version."""
    major, minor = version
    name = wheel if major >= 13 else f"{wheel}-cu{major}"
    return f'pip install "{name}=={major}.{minor}.*"'


def cuda_homes() -> list[Path]:
    """Toolkit directories: CUDA_HOME, nvcc's own, then /usr/local/cuda*, newest first."""
    settings = config.current()
    return _cuda_homes(settings.cuda_home, settings.environment.get("PATH"))


@functools.cache
def _cuda_homes(named: Path | None, path: str | None) -> list[Path]:
    nvcc = shutil.which("nvcc", path=path)
    homes = [named] if named else []
    if nvcc:
        homes.append(Path(nvcc).resolve().parent.parent)
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    return list(
        dict.fromkeys(home.resolve() for home in homes if (home / "include" / "cuda.h").is_file())
    )


@functools.cache
def wheel_prefixes() -> list[Path]:
    """The folders of wheels: `nvidia/cu13` (CUDA 13), `nvidia/cuda_nvrtc` and the like (12)."""
    roots = [Path(entry, "nvidia") for entry in sys.path if entry]
    return [
        p
        for root in roots
        for pattern in ("cu[0-9]*", "cuda_*", "cublas", "cufft", "curand", "cusolver", "cusparse")
        for p in sorted(root.glob(pattern))
        if p.is_dir()
    ]


def include_directories() -> list[Path]:
    """The directories with the toolkit's headers."""
    return _include_directories(*wheel_prefixes(), *cuda_homes())


@functools.cache
def _include_directories(*homes: Path) -> list[Path]:
    prefixes = [home / "include" for home in homes]
    return [d for p in prefixes for d in (p, p / "cccl") if d.is_dir()]


@functools.cache
def nvrtc_libraries() -> dict[tuple[int, int], tuple[str, ctypes.CDLL]]:
    """All NVRTCs on this machine: (major, minor) -> (path, library)."""
    paths = [
        p for prefix in wheel_prefixes() for p in sorted((prefix / "lib").glob("libnvrtc.so.*"))
    ]
    paths += [p for home in cuda_homes() for p in sorted((home / "lib64").glob("libnvrtc.so.*"))]
    libraries: dict[tuple[int, int], tuple[str, ctypes.CDLL]] = {}
    for path in [*map(str, paths), "libnvrtc.so.13", "libnvrtc.so.12"]:
        if ".alt." in path:
            continue
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins))  # NVRTC <= 13.0 needs its builtins loaded before
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        if not library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            libraries.setdefault((major.value, minor.value), (path, library))
    return libraries


def nvrtc_for(target: Target) -> ctypes.CDLL:
    """The newest NVRTC that may build for `target`: same major, no newer minor.

    Raises CompilerNotFound if there is none at all, TargetError if all are of other versions.
    """
    needed = target.cuda_version
    libraries = nvrtc_libraries()
    remedy = pip_line("nvidia-cuda-nvrtc", needed)
    fitting = [
        version for version in libraries if version[0] == needed[0] and version[1] <= needed[1]
    ]
    if fitting:
        return libraries[max(fitting)][1]
    if not libraries:
        raise CompilerNotFound(f"no NVRTC to build for {target}: {remedy}", remedy=remedy)
    here = ", ".join(f"{major}.{minor}" for major, minor in sorted(libraries))
    raise TargetError(
        f"NVRTC {here} cannot build for {target}, "
        f"which needs {needed[0]}.{needed[1]} or older: {remedy}"
    )


def nvcc() -> tuple[str, tuple[int, int]] | None:
    """(path, version) of nvcc, or None."""
    path = shutil.which("nvcc", path=config.current().environment.get("PATH"))
    tools = [home / "bin" / "nvcc" for home in (*cuda_homes(), *wheel_prefixes())]
    return _nvcc(*([path] if path else []), *(str(tool) for tool in tools if tool.is_file()))


@functools.cache
def _nvcc(*tools: str) -> tuple[str, tuple[int, int]] | None:
    for tool in tools:
        try:
            process = subprocess.run(
                [tool, "--version"], capture_output=True, text=True, check=False
            )
        except OSError:
            continue
        release = re.search(r"release (\d+)\.(\d+)", process.stdout)
        if release:
            return tool, (int(release.group(1)), int(release.group(2)))
    return None
