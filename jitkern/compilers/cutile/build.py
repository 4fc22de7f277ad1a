"""Compile with cuTile, in a child process for each kernel; cuTile's own cache is not used."""

from __future__ import annotations

import shutil
from pathlib import Path

from jitkern.compilers import kernel_process
from jitkern.compilers.result import Built
from jitkern.errors import TargetError
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant
from jitkern.target import Target

REMEDY = 'pip install "jitkern[cutile]"'
_OLDEST_CUDA = 13  # whose drivers load what tileiras writes
_UNKNOWN_ARCH = "for the --gpu-name option"


def identity() -> dict[str, str]:
    """Name and versions of cuTile, with the digest of its compiler. Raises CompilerNotFound."""
    version, tileiras, digest, _ = _installed()
    return {"name": "cutile", "version": f"{version}, tileiras {tileiras} {digest}"}


def _installed() -> tuple[str, str, str, Path]:
    return kernel_process.installed("cuda-tile", "nvidia-cuda-tileiras", "tileiras", REMEDY)


def build(variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
    """Do what `Compiler.compile` promises."""
    if target.device != "cuda" or target.cuda_version[0] < _OLDEST_CUDA:
        raise TargetError(f"{variant.op} for {target}: cuTile needs a Torch with CUDA 13 or newer")
    compiler, (_, number, _, tileiras) = identity(), _installed()
    scratch = staging / "cutile"
    result = kernel_process.run_worker(
        variant, target, closure, staging, "jitkern.compilers.cutile.worker",
        {"tileiras": str(tileiras)},
        {"CUDA_TILE_CACHE_DIR": "off", "CUDA_TILE_TEMP_DIR": str(scratch)},
        (_UNKNOWN_ARCH, f"tileiras {number}"),
    )  # fmt: skip
    shutil.rmtree(scratch, ignore_errors=True)
    return Built(compiler, result)
