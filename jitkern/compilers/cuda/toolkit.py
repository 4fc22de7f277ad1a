"""Find the CUDA toolchain: pip wheels (no CUDA_HOME needed), then an installed toolkit."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from jitkern import config
from jitkern.compilers.cuda import nvrtc_api
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.target import Target

# The parts of `cuda-toolkit` that hold the headers of these names.
HEADER_PARTS = (
    (r"crt/", "crt"),
    (r"curand", "curand"),
    (r"(cub|thrust|cuda|nv)/|cooperative_groups", "cccl"),
    (r"cuda_\w+\.h|cuda_(fp16|bf16|fp8)|mma\.h|vector_", "cudart"),
)
NVCC = "nvcc,nvvm,crt,cudart"
_PARTS_OF_CUDA_12 = {"crt": "nvcc", NVCC: "nvcc"}
OLDEST_NVRTC = (12, 8)  # before, ptxas cannot open the trace that names the included headers


def pip_line(part: str, version: tuple[int, int] | None) -> str:
    """The pip line that installs this part of the CUDA toolkit, of this version or the newest."""
    if version and version[0] < 13:
        part = _PARTS_OF_CUDA_12.get(part, part)
    pin = "=={}.{}.*".format(*version) if version else ""
    return f'pip install "cuda-toolkit[{part}]{pin}"'


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


def of_major(homes: list[Path], major: int) -> list[Path]:
    """The folders of wheels and toolkits for this major version of CUDA."""
    return [home for home in homes if headers_version(home)[0] == major]


@functools.cache
def headers_version(home: Path) -> tuple[int, int]:
    """The version of CUDA in a folder of wheels or of a toolkit, as far as it is known.

    A folder without `cuda.h` is of wheels: (13, 0) for `cu13`, (12, 0) for `cuda_nvrtc`.
    """
    with contextlib.suppress(OSError):
        text = (home / "include" / "cuda.h").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"(?m)^#define CUDA_VERSION (\d+)", text):
            return int(match.group(1)) // 1000, int(match.group(1)) % 1000 // 10
    return int((re.findall(r"^cu(\d+)$", home.name) or ["12"])[0]), 0


def include_directories(major: int | None = None) -> list[Path]:
    """The directories with the toolkit's headers, of this major version of CUDA or of all."""
    homes = [*wheel_prefixes(), *cuda_homes()]
    return _include_directories(*(homes if major is None else of_major(homes, major)))


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
        libraries.setdefault(nvrtc_api.version(library), (path, library))
    return libraries


def nvrtc_for(target: Target) -> ctypes.CDLL:
    """The NVRTC that builds for `target`: of its major version, the newest up to its minor version.

    If all are newer, the oldest: drivers load cubins of every minor version of their major version.
    Raises CompilerNotFound if there is none at all, TargetError if none builds for the target.
    """
    needed = target.cuda_version
    libraries = nvrtc_libraries()
    remedy = pip_line("nvrtc", max(needed, OLDEST_NVRTC))
    fitting = sorted(v for v in libraries if v >= OLDEST_NVRTC and v[0] == needed[0])
    if fitting:
        older = [version for version in fitting if version <= needed]
        return libraries[older[-1] if older else fitting[0]][1]
    if not libraries:
        raise CompilerNotFound(f"no NVRTC to build for {target}: {remedy}", remedy=remedy)
    here = ", ".join(f"{major}.{minor}" for major, minor in sorted(libraries))
    oldest = "{}.{}".format(*max((needed[0], 0), OLDEST_NVRTC))
    raise TargetError(
        f"NVRTC {here} cannot build for {target}, which needs an NVRTC {needed[0]}, from {oldest} "
        f"on: {remedy}"
    )


def nvcc() -> tuple[str, tuple[int, int]] | None:
    """(path, version) of nvcc, or None."""
    path = shutil.which("nvcc", path=config.current().environment.get("PATH"))
    tools = [home / "bin" / "nvcc" for home in (*cuda_homes(), *wheel_prefixes())]
    return _nvcc(*([path] if path else []), *(str(tool) for tool in tools if tool.is_file()))


def why_not_nvcc(target: Target) -> str:
    """A hint that names the nvcc to install if none here builds for `target`."""
    tool = nvcc()
    remedy = pip_line(NVCC, target.cuda_version)
    if not tool:
        return f"install nvcc: {remedy}"
    return f"install another nvcc: {remedy} (nvcc {tool[1][0]}.{tool[1][1]} cannot build for it)"


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
