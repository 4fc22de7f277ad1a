"""Compile with cuTile, in a child process for each kernel; cuTile's own cache is not used."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from jitkern import config
from jitkern.compilers import child_process
from jitkern.compilers.result import Built, compile_error, write_log
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant
from jitkern.target import Target

REMEDY = 'pip install "jitkern[cutile]"'
ANSWER = "answer.json"  # that the child process writes
_OLDEST_CUDA = 13  # whose drivers load what tileiras writes
_UNKNOWN_ARCH = "for the --gpu-name option"
_START = (  # `-I` keeps PYTHONPATH out, and the current directory
    "import os, runpy, sys; sys.path[:] = os.environ.pop('PYTHONPATH').split(os.pathsep); "
    "runpy.run_module('jitkern.compilers.cutile.worker', run_name='__main__', alter_sys=True)"
)


def identity() -> dict[str, str]:
    """Name and versions of cuTile, with the digest of its compiler. Raises CompilerNotFound."""
    version, tileiras, file = _installed()
    digest = file.hash.value if file.hash else ""
    return {"name": "cutile", "version": f"{version}, tileiras {tileiras} {digest}"}


def _installed() -> tuple[str, str, importlib.metadata.PackagePath]:
    """Return the versions of `cuda-tile` and of its compiler, and the compiler's file."""
    try:
        compiler = importlib.metadata.distribution("nvidia-cuda-tileiras")
        file = next(file for file in compiler.files or () if file.name == "tileiras")
        return importlib.metadata.version("cuda-tile"), compiler.version, file
    except (importlib.metadata.PackageNotFoundError, StopIteration) as e:
        raise CompilerNotFound(f"cuTile is not installed: {REMEDY}", remedy=REMEDY) from e


def build(variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
    """Do what `Compiler.compile` promises."""
    if target.device != "cuda":
        raise TargetError(f"{variant.op}: a cuTile kernel cannot be built for {target}")
    if target.cuda_version[0] < _OLDEST_CUDA:
        raise TargetError(f"{variant.op} for {target}: cuTile needs a Torch with CUDA 13 or newer")
    compiler, (_, _, tileiras) = identity(), _installed()
    command = [sys.executable, "-I", "-B", "-c", _START]
    source, declared = variant.source.on_disk(), config.current().environment
    request = {
        "source": source.fields(), "function": variant.function, "template": variant.template,
        "signature": variant.signature, "arch": target.arch, "staging": str(staging),
        "files": sorted({*map(str, source.paths), *closure.named}),
        "tileiras": str(tileiras.locate()),
    }  # fmt: skip
    scratch = staging / "cutile"
    environment = {
        **{name: declared[name] for name in source.environment if name in declared},
        "PATH": os.defpath, "LC_ALL": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_TILE_CACHE_DIR": "off", "CUDA_TILE_TEMP_DIR": str(scratch),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    text = json.dumps(request)
    status, output = child_process.run(command, text=text, cwd=staging, env=environment)
    shutil.rmtree(scratch, ignore_errors=True)
    write_log(staging, command, f"{text}\n{output}", unseen=True)
    answer: dict[str, Any] = {"error": f"error: cuTile's process ended with status {status}"}
    with contextlib.suppress(FileNotFoundError):
        answer = json.loads((staging / ANSWER).read_text())
        (staging / ANSWER).unlink()
    if "error" in answer:
        if _UNKNOWN_ARCH in answer["error"]:
            raise TargetError(
                f"{variant.op}: cuTile cannot build for {target}: its compiler, "
                f"{compiler['version'].rpartition(' ')[0]}, does not know {target.arch}"
            )
        raise compile_error(variant, target, command, f"{answer['error']}\n\n{output}")
    return Built(compiler, answer["meta"])
