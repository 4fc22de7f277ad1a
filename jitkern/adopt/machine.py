"""The machine and the Python that a command will run with."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jitkern.adopt.jits import Jit
from jitkern.cache.key import canonical
from jitkern.errors import TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.target import (
    Target,
    cuda_in,
    nvml_capabilities,
    processor_for,
    short_version,
    this_platform,
    unsupported,
)

_PYTHON = re.compile(r"python3?(\.\d+)?t?")
_DRIVER = Path("/proc/driver/nvidia/version")


class Machine(NamedTuple):
    """What keys the caches of JITs.

    target: the target of the first GPU, or of the CPU. gpus: the archs of all GPUs. versions: of
    the installed distributions, by normalized name. places: files and folders of which this holds.
    """

    target: Target
    gpus: tuple[str, ...]
    python: str
    versions: Mapping[str, str]
    places: tuple[Path, ...]

    def facts(self, jit: Jit) -> dict[str, str]:
        """Return what keys the cache of a JIT on this machine, beside the target."""
        facts = {name: self.versions[name] for name in jit.packages if name in self.versions}
        facts.update(python=self.python, gpus=" ".join(self.gpus))
        if jit.native:
            facts["processor"] = processor_for(("-march=native",))
        if jit.driver and _DRIVER.exists():
            facts["driver"] = _DRIVER.read_text().partition("\n")[0]
        return facts

    def name_of(self, jit: Jit) -> str:
        """Return the name of a JIT's cache on this machine, e.g. `triton-1f0c2d3e`."""
        digest = hashlib.sha256(canonical(self.facts(jit))).hexdigest()
        return f"{jit.name}-{digest[:8]}"


def machine_of(command: Sequence[str], environment: Mapping[str, str]) -> Machine:
    """Return the machine of a command, whose Python is that of its program, or the first on PATH.

    Raises TargetError on a platform that is not supported.
    """
    if why := unsupported():
        raise TargetError(why)
    program, interpreter = _program_of(command, environment)
    python, *folders = _asked(interpreter, environment)
    versions: dict[str, str] = {}
    for path in (path for folder in folders for path in Path(folder).glob("*-*.*-info")):
        name, version = path.stem.split("-")[:2]
        versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    gpus = ["sm_{}{}".format(*c) for c in nvml_capabilities()]
    torch = short_version(versions.get("torch", "0.0"))
    of_torch = (path for folder in folders for path in Path(folder).glob("torch/version.py"))
    cuda = next((cuda_in(path.read_text()) for path in of_torch), "")
    platform = this_platform()
    on_gpu = ("cuda", gpus[0], cuda) if gpus and cuda else ()
    target = Target(*(on_gpu or ("cpu", platform.partition("_")[2], "")), torch, platform)
    places = (program, interpreter, *map(Path, folders))
    return Machine(target, tuple(dict.fromkeys(gpus)), python, versions, places)


def _program_of(command: Sequence[str], environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the program of a command, and its Python.

    That is the program, or the Python of its first line, or the first on PATH. Raises
    FileNotFoundError and PermissionError.
    """
    path = environment.get("PATH")
    program = shutil.which(command[0], path=path)
    if program is None and Path(command[0]).exists():
        raise PermissionError(13, "it may not be executed", command[0])
    if program is None:
        raise FileNotFoundError(2, "No such file or directory", command[0])
    words = [program]
    with contextlib.suppress(OSError), open(program, "rb") as file:
        words += os.fsdecode(file.readline(4096)).removeprefix("#!").split()
    pythons = [word for word in words if _PYTHON.fullmatch(Path(word).name)]
    found = (shutil.which(name, path=path) for name in (*pythons, "python3", "python"))
    return Path(program), Path(next(filter(None, found), sys.executable))


def _asked(interpreter: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the version of a Python, e.g. `3.12`, and the folders where it finds modules."""
    found = "'{}.{}'.format(*sys.version_info), *filter(None, sys.path)"
    ask = f"import sys; print({found}, sep='\\0', end='')"
    command = [str(interpreter), "-c", ask]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return os.fsdecode(done.stdout).split("\0")  # nothing of one that does not start
