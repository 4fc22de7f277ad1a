"""Compile with the CuTe DSL in a child process, and link what it wrote with `driver.c`.

The library that results needs the CUDA driver and nothing else of NVIDIA's.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from jitkern import config
from jitkern.compilers import kernel_process
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.result import (
    Built,
    binary_at,
    check_platform,
    compile_error,
    keep_binary,
    run,
    write_log,
)
from jitkern.errors import TargetError
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant
from jitkern.target import Target

REMEDY = 'pip install "jitkern[cute]"'
FOLDER, OBJECT = "build", "kernel.o"  # that the child process writes
_PACKAGE = "nvidia-cutlass-dsl"
_PLATFORM = "linux_x86_64"
UNKNOWN_ARCH = "jitkern: unknown arch"  # the error of the child process
_LINKING = (  # no file of the C compiler's own, which would need its version of glibc
    "-O2", "-fPIC", "-shared", "-nostdlib", "-std=c17", "-Wl,-Bsymbolic", "-Wl,-z,defs",
    "-Wl,-z,noexecstack", "-Wl,--build-id=none", "-s",
)  # fmt: skip


def identity(target: Target) -> dict[str, str]:
    """Name and versions of the DSL, with the digest of its compiler. Raises CompilerNotFound."""
    version, _, digest, path = _installed(target)
    linker = cc_build.identity(config.current().cc)["version"]
    return {"name": "cute", "version": f"{version}, {path.name.split('.')[1]} {digest}, {linker}"}


def _installed(target: Target) -> tuple[str, str, str, Path]:
    """Return versions, and the digest and path of the compiler for the CUDA of a target."""
    flavour = f"cu{target.cuda_version[0]}"
    remedy = REMEDY if flavour == "cu13" else f"pip install {_PACKAGE}-libs-{flavour}"
    name = f"_cutlass_ir.{flavour}."
    return kernel_process.installed(_PACKAGE, f"{_PACKAGE}-libs-{flavour}", name, remedy)


def build(variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
    """Do what `Compiler.compile` promises."""
    if target.device != "cuda" or target.platform != _PLATFORM:
        raise TargetError(f"{variant.op}: the CuTe DSL cannot build for {target}")
    check_platform(variant.op, target)
    compiler, (version, *_, library) = identity(target), _installed(target)
    folder = staging / FOLDER
    folder.mkdir()
    result = kernel_process.run_worker(
        variant, target, closure, staging, "jitkern.compilers.cute.worker",
        {"library": str(library), "options": variant.source.flags},
        {"CUTE_DSL_ARCH": target.arch, "TMPDIR": str(folder)},
        (UNKNOWN_ARCH, f"{_PACKAGE} {version}"),
    )  # fmt: skip
    shim = (Path(__file__).parent / "driver.c").read_text(encoding="utf-8")
    (folder / "kernel.c").write_text(shim + result["call"], encoding="utf-8")
    tool = config.current().cc
    command = [*shlex.split(tool), *_LINKING, "-o", "out.so", "kernel.c", OBJECT, "-lgcc"]
    process = run(command, source=variant.source, folder=folder)
    if process.returncode:
        write_log(staging, command, process.stdout)
        raise compile_error(variant, target, command, process.stdout)
    artifact = keep_binary(staging, "kernel", binary_at(folder / "out.so", variant, target, [tool]))
    return Built(compiler, {"artifact": artifact, "parameters": result["parameters"]})
