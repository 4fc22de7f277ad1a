"""The machine and the Python that a command will run with, found without running either."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jitkern.adopt.jits import Jit
from jitkern.cache.key import canonical
from jitkern.errors import TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.target import (
    Target,
    nvml_capabilities,
    processor_for,
    short_version,
    this_platform,
    unsupported,
)

_PYTHON = re.compile(r"python3?(\.\d+)?t?")
_NVIDIA = Path("/dev/nvidiactl")
_DRIVER = Path("/proc/driver/nvidia/version")


class Machine(NamedTuple):
    """What keys the caches of JITs.

    target: the target of the first GPU, or of the CPU. gpus: the archs of all GPUs. versions: of
    the installed distributions, by normalized name.
    """

    target: Target
    gpus: tuple[str, ...]
    python: str
    versions: Mapping[str, str]

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
    folders, python = _site_folders(_interpreter(command, environment))
    versions: dict[str, str] = {}
    for folder in folders:
        for name in _names_in(folder):
            if name.endswith((".dist-info", ".egg-info")):
                distribution, _, version = name.rpartition(".")[0].partition("-")
                versions.setdefault(_normalized(distribution), version.partition("-")[0])
    gpus = ["sm_{}{}".format(*c) for c in nvml_capabilities()] if _NVIDIA.exists() else []
    torch, cuda = short_version(versions.get("torch", "0.0")), _cuda_of(folders)
    platform = this_platform()
    if gpus and cuda:
        target = Target("cuda", gpus[0], cuda, torch, platform)
    else:
        target = Target("cpu", platform.partition("_")[2], "", torch, platform)
    return Machine(target, tuple(dict.fromkeys(gpus)), python, versions)


def _cuda_of(folders: Sequence[Path]) -> str:
    """Return the CUDA of the installed Torch, e.g. `130`; "" without one."""
    for folder in folders:
        try:
            text = (folder / "torch" / "version.py").read_text()
        except OSError:
            continue
        found = re.search(r"^cuda\b.*?= *'(\d+)\.(\d+)", text, re.MULTILINE)
        return found[1] + found[2] if found else ""
    return ""


def _interpreter(command: Sequence[str], environment: Mapping[str, str]) -> Path:
    """Return the Python of a command: the program, that of its first line, or the first on PATH."""
    path = environment.get("PATH")
    program = shutil.which(command[0], path=path) if command else None
    if program and not _PYTHON.fullmatch(Path(program).name):
        program = _interpreter_in(program, path)
    found = program or shutil.which("python3", path=path) or shutil.which("python", path=path)
    return Path(found or sys.executable)


def _interpreter_in(script: str, path: str | None) -> str | None:
    """Return the Python that the first line of a script names."""
    try:
        with open(script, "rb") as file:
            first = os.fsdecode(file.readline(4096)) if file.read(2) == b"#!" else ""
    except OSError:
        return None
    words = [word for word in first.split() if _PYTHON.fullmatch(Path(word).name)]
    return shutil.which(words[0], path=path) if words else None


def _site_folders(interpreter: Path) -> tuple[list[Path], str]:
    """Return the folders with the distributions of a Python, and its version, e.g. `3.12`."""
    if interpreter == Path(sys.executable):
        own = [Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
        return own, "{}.{}".format(*sys.version_info)
    prefixes = [interpreter.parent.parent]
    try:
        text = (prefixes[0] / "pyvenv.cfg").read_text()
        home = re.search(r"^home *= *(.+)$", text, re.MULTILINE)
        if home and re.search(r"^include-system-site-packages *= *true", text, re.MULTILINE):
            prefixes.append(Path(home[1].strip()).parent)
    except OSError:
        prefixes.append(interpreter.resolve().parent.parent)
    folders = [
        folder
        for prefix in dict.fromkeys(prefixes)
        for lib in ("lib", "lib64", "local/lib")
        for kind in ("site-packages", "dist-packages")
        for folder in sorted((prefix / lib).glob(f"python3*/{kind}"))
    ]
    versions = [m[1] for f in folders if (m := re.search(r"python(3\.\d+)", f.parent.name))]
    return folders, versions[0] if versions else ""


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
