"""Compile with Triton: worker processes, each for one kernel at a time, and their requests."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from jitkern import config
from jitkern.compilers.child_process import Child
from jitkern.compilers.result import Built, compile_error, write_log
from jitkern.errors import CompileError, CompilerNotFound, TargetError
from jitkern.source import import_facts
from jitkern.source.closure import Closure
from jitkern.source.import_facts import Facts
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

REMEDY = "pip install triton"
_UNKNOWN_ARCH = "is not defined for option 'gpu-name'|is not a recognized processor"
_START = (  # sets sys.path by itself: `-I` keeps PYTHONPATH out, and the current directory
    "import os, runpy, sys; sys.path[:] = os.environ['PYTHONPATH'].split(os.pathsep); "
    "runpy.run_module('jitkern.compilers.triton.worker', run_name='__main__', alter_sys=True)"
)
_MOST = 500  # letters of stderr in an error
KEPT = 4  # processes that may wait for work: each has some 200 MB
idle: list[TritonProcess] = []  # those that wait, the last used last


def identity() -> dict[str, str]:
    """Name and version of Triton. Raises CompilerNotFound."""
    if importlib.util.find_spec("triton") is None:
        raise CompilerNotFound(f"Triton is not installed: {REMEDY}", remedy=REMEDY)
    return {"name": "triton", "version": importlib.metadata.version("triton")}


def build(variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
    """Do what `Compiler.compile` promises."""
    if target.device != "cuda":
        raise TargetError(f"{variant.op}: a Triton kernel cannot be built for {target}")
    command = _command()
    request = _request(variant, target, closure, staging=str(staging))
    answer = _ask(command, request, variant)
    shown = {name: value for name, value in request.items() if name != "world"}
    write_log(staging, command, json.dumps(shown) + "\n" + answer.get("log", ""), unseen=True)
    if "error" in answer:
        output = f"{answer['error']}\n\n{answer.get('log', '')}"
        if re.search(_UNKNOWN_ARCH, output):
            raise TargetError(
                f"{variant.op}: Triton {answer['compiler']['version']} cannot build for {target}: "
                f"it does not know {target.arch}"
            )
        raise compile_error(variant, target, command, output)
    return Built(answer["compiler"], answer["meta"])


def declare(op: str, source: Source, target: Target, closure: Closure) -> tuple[Any, Facts]:
    """Return what the functions of a file declare, by their names, and the facts that it reads.

    Each is the data of a function, or the text why it is not supported. Raises CompileError where
    the import fails, CompilerNotFound.
    """
    command, variant = _command(), Variant(op, source)
    answer = _ask(command, _request(variant, target, closure), variant)
    if "error" in answer:
        raise CompileError(
                f"{op}: Triton cannot import its kernels: {answer['error']}", op=op,
                output=answer["log"],
            )  # fmt: skip
    return answer["functions"], tuple(map(tuple, answer["facts"]))


def _request(variant: Variant, target: Target, closure: Closure, **more: Any) -> dict[str, Any]:
    """Return a request. world: all that an import of the kernel's file may see."""
    source = variant.source.on_disk()
    device = import_facts.device(target)
    known = {f"device {name}": name for name in device}
    device.update((known[name], value) for name, value in variant.facts if name in known)
    world = {
        "source": source.fields(), "target": str(target), "files": closure.files,
        "covered": sorted(map(str, closure.paths)),
        "variables": dict(os.environ), "device": device,
    }  # fmt: skip
    return {"variant": {**variant._asdict(), "source": None}, "world": world, **more}


def _command() -> list[str]:
    """The command of a worker: runs no code of the current directory; writes bytecode as we do."""
    unwritten = ["-B"] if sys.dont_write_bytecode else []
    prefix = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    return [sys.executable, "-I", *unwritten, *prefix, "-c", _START]


class TritonProcess:
    """A child process that runs Triton.

    The process ends by itself when it is idle for long or its parent is gone.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.compiler = identity()
        self.environment = environment
        self.owner = os.getpid()
        self._stderr = os.memfd_create("triton")  # of LLVM, which says there why it ends
        self._heard = 0  # bytes of it
        self._child = Child(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env=environment, guarded=False,  # it ends by itself when our pipe closes
        )  # fmt: skip
        self.process = self._child.process
        # At the latest before Python ends.
        self.close = weakref.finalize(self, _end, self._child, self._stderr)

    @property
    def lives(self) -> bool:
        """Whether the process runs, and belongs to this process and not to its parent."""
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request, or an error with the `status` that the process ended with."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: the answer would be taken for that of the next request
            self.close()
            raise
        said = self._said()
        answer = {"status": 0}
        if line.endswith("\n"):
            answer = json.loads(line)
            if "ended" not in answer:
                return {"compiler": self.compiler, **answer, "log": said + answer["log"]}
        else:
            self.close()  # the worker died, maybe within its answer
            answer = {"status": self.process.returncode}
        status = answer.get("ended", answer.get("status"))
        error = f"error: Triton's process ended with status {status}: {said.strip()[-_MOST:]}"
        return {"compiler": self.compiler, **answer, "error": error, "log": said}

    def _said(self) -> str:
        """Return what came on stderr since the last request."""
        text = os.pread(self._stderr, os.fstat(self._stderr).st_size - self._heard, self._heard)
        self._heard += len(text)
        return text.decode(errors="replace")


def _end(child: Child, stderr: int) -> None:
    """End a process by closing its pipes."""
    for pipe in (child.process.stdin, child.process.stdout):
        with contextlib.suppress(OSError):
            assert pipe
            pipe.close()
    child.close()
    os.close(stderr)


def _import_path(package: str) -> list[str]:
    """`sys.path`, and the folder of a package that was imported from elsewhere, as prewarm does."""
    folders = getattr(sys.modules.get(package.partition(".")[0]), "__path__", ())
    return list(dict.fromkeys([*sys.path, *(str(Path(folder).parent) for folder in folders)]))


def _taken(environment: dict[str, str]) -> TritonProcess | None:
    """Take a waiting process that was started in this environment; drop those that ended."""
    for worker in reversed([*idle]):
        if worker.environment == environment or not worker.lives:
            with contextlib.suppress(ValueError):  # another thread took it
                idle.remove(worker)
                if worker.lives:
                    return worker
    return None


def _ask(command: list[str], request: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """Send one request to a waiting worker, or to a new one."""
    environment = config.current().build_environment(tuple(variant.source.environment))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, _import_path(variant.source.package)))
    answer: dict[str, Any] = {}
    for _ in range(2):
        worker = _taken(environment) or TritonProcess(command, environment)
        answer = worker.ask(request)
        if "status" not in answer:
            idle.append(worker)
            del idle[:-KEPT]
        if answer.get("status") != 0:  # 0: it was idle and ended just as we wrote
            break
    return answer
