"""A child process for each kernel of a compiler in Python, which imports the kernel's file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jitkern import config
from jitkern.compilers import child_process
from jitkern.compilers.result import compile_error, write_log
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant
from jitkern.target import Target

RESULT = "result.json"  # that the child process writes
_START = (  # `-I` keeps PYTHONPATH out, and the current directory
    "import os, runpy, sys; sys.path[:] = os.environ.pop('PYTHONPATH').split(os.pathsep); "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def installed(package: str, part: str, name: str, remedy: str) -> tuple[str, str, str, Path]:
    """Return the versions of a package and of a part of it, and the digest and path of a file.

    The file is the one of the part whose name begins so. Raises CompilerNotFound.
    """
    try:
        compiler = importlib.metadata.distribution(part)
        file = next(file for file in compiler.files or () if file.name.startswith(name))
        version = importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, StopIteration) as e:
        raise CompilerNotFound(f"{part} is not installed: {remedy}", remedy=remedy) from e
    digest = file.hash.value if file.hash else ""
    return version, compiler.version, digest, Path(str(file.locate()))


def run_worker(
    variant: Variant, target: Target, closure: Closure, staging: Path,
    module: str, more: Mapping[str, Any], environment: Mapping[str, str],
    unknown_arch: tuple[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Return what a child process answers that runs a module, which calls `kernel_worker.main`.

    more: what it is told of this compiler. environment: its variables, beside those that the
    source declares. unknown_arch: a part of its error for an arch that the compiler does not know,
    and the compiler, for the message.

    Raises TargetError and CompileError.
    """
    command = [sys.executable, "-I", "-B", "-c", _START.format(module=module)]
    source, declared = variant.source.on_disk(), config.current().environment
    request = {
        "kind": source.kind, "source": source.fields(), "function": variant.function,
        "template": variant.template, "signature": variant.signature, "arch": target.arch,
        "staging": str(staging), "files": sorted({*map(str, source.paths), *closure.named}), **more,
    }  # fmt: skip
    variables = {
        **{name: declared[name] for name in source.environment if name in declared},
        "PATH": os.defpath, "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment,
    }  # fmt: skip
    text = json.dumps(request)
    status, output = child_process.run(command, text=text, cwd=staging, env=variables)
    write_log(staging, command, f"{text}\n{output}", unseen=True)
    result: dict[str, Any] = {"error": f"error: the compiler's process ended with status {status}"}
    with contextlib.suppress(FileNotFoundError):
        result = json.loads((staging / RESULT).read_text())
        (staging / RESULT).unlink()
    if "error" in result:
        sign, compiler = unknown_arch
        if sign in result["error"]:
            raise TargetError(
                f"{variant.op} cannot be built for {target}: {compiler} does not know {target.arch}"
            )
        raise compile_error(variant, target, command, f"{result['error']}\n\n{output}")
    return result
