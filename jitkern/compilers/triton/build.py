"""Compiling with Triton: a worker for each thread that compiles, and what it is asked."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from jitkern import config
from jitkern.compilers.child_process import Child
from jitkern.compilers.result import Built, compile_error, write_log
from jitkern.errors import CompileError, CompilerNotFound, TargetError
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant
from jitkern.target import Target

REMEDY = "pip install triton"
_UNKNOWN_ARCH = "is not defined for option 'gpu-name'"
_START = (  # with our own path, which `-I` keeps from Python: it would add the current directory
    "import os, runpy, sys; sys.path[:] = os.environ['PYTHONPATH'].split(os.pathsep); "
    "runpy.run_module('jitkern.compilers.triton.worker', run_name='__main__', alter_sys=True)"
)
_workers = threading.local()


def identity() -> dict[str, str]:
    """Name and version of Triton. Raises CompilerNotFound."""
    if importlib.util.find_spec("triton") is None:
        raise CompilerNotFound(f"Triton is not installed: {REMEDY}", remedy=REMEDY)
    return {"name": "triton", "version": importlib.metadata.version("triton")}


def build(variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
    """What the contract of compilers has `compile` do."""
    made_by = identity()
    if target.device != "cuda":
        raise TargetError(f"{variant.op}: a Triton kernel cannot be built for {target}")
    request: dict[str, Any] = {
        "variant": {**variant._asdict(), "source": variant.source.fields()},
        "target": str(target),
        "staging": str(staging),
        "covered": sorted(map(str, closure.paths)),
    }
    command = _command()
    files = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in closure.paths}
    answer = _ask(command, request, variant, files)
    write_log(staging, command, json.dumps(request) + "\n" + answer.get("log", ""))
    if "error" in answer:
        said = f"{answer['error']}\n{answer.get('log', '')}"
        if re.search(_UNKNOWN_ARCH, said):
            raise TargetError(
                f"{variant.op}: Triton {made_by['version']} cannot build for {target}: its "
                f"ptxas does not know {target.arch}"
            )
        raise compile_error(variant, target, command, said)
    return Built(made_by, answer["meta"])


def _command() -> list[str]:
    """What starts a worker: nothing in the current directory runs; bytecode is written as by us."""
    unwritten = ["-B"] if sys.dont_write_bytecode else []
    prefix = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    return [sys.executable, "-I", *unwritten, *prefix, "-c", _START]


class Worker:
    """A child process that runs Triton for one thread.

    It ends by itself when it is idle or its parent is gone.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.environment = environment
        self.owner = os.getpid()
        self.imported: dict[str, str] = {}
        self._child = Child(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            guarded=False,  # it reads a pipe of ours, and sees to that itself
        )  # fmt: skip
        self._process = self._child.process

    def usable(self, environment: dict[str, str], files: dict[str, str]) -> bool:
        """Whether it may build from these files (path -> SHA-256) in this environment.

        It must be alive, belong to this process and not to one that forked it, have been started
        in the same, and have imported no other version of them.
        """
        stale = any(self.imported.get(path, digest) != digest for path, digest in files.items())
        alive = self.owner == os.getpid() and self._process.poll() is None
        return alive and self.environment == environment and not stale

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | int:
        """The answer, or the status with which the process ended instead."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # it died, maybe within its answer
            self.close()
            return self._process.returncode
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process by closing its pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe
                pipe.close()
        self._child.close()

    __del__ = close


def _ask(
    command: list[str], request: dict[str, Any], variant: Variant, files: dict[str, str]
) -> dict[str, Any]:
    """Send one request to this thread's worker; a new one is started where none is usable."""
    environment = config.current().build_environment(tuple(variant.source.environment))
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    for _ in range(2):
        worker: Worker | None = getattr(_workers, "worker", None)
        if worker is None or not worker.usable(environment, files):
            worker = _workers.worker = Worker(command, environment)
        worker.imported.update(files)
        answer = worker.ask(request)
        if isinstance(answer, dict):
            return answer
        _workers.worker = None
        if answer != 0:  # 0: it ended for being idle, just as we wrote
            break
    raise CompileError(
        f"{variant.op}: Triton's process ended with status {answer} on `{variant.function}`",
        op=variant.op,
    )
