"""Builds with Torch's headers, for `Extension`, `load_inline` and `load`.

Units are compiled side by side, each with flags of its own, as many at once as `parallelism`
allows. Not by ninja, which was tried: six small units took longer (medians of runs in turn, by 8 to
31 %), it lets the other units run on when one fails, and as each of its compilers leads a process
group of its own, `kill -9` of its group leaves them running. A build in fresh staging is never
incremental, so its dependency files would save nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import re
import shlex
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers import child_process, dependencies, parallelism
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.result import Built, binary_at, compile_error, keep_binary, write_log
from jitkern.compilers.torch_extension import hints
from jitkern.compilers.torch_extension.commands import (
    Build,
    Command,
    compile_step,
    expand_step,
    link_step,
    nvcc,
)
from jitkern.errors import CompileError, TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.source import cpp_text
from jitkern.source.kinds import Variant
from jitkern.target import Target, this_abi, this_platform

_ROOM = 4 << 30  # bytes for a compiler that does not look for memory it can free
_WAIT = 0.5  # seconds; CPython misses an interrupt that comes just before a wait, until it ends


class _Done(NamedTuple):
    """A command that ended."""

    number: int
    command: list[str]
    status: int
    output: str


def make(build: Build, variant: Variant, target: Target, staging: Path) -> tuple[Built, list[Path]]:
    """Build in `staging`; returns the result, and the files that the tools opened.

    The result's meta has the `artifact`, and the `namespaces` and `ops` that it registers. Raises
    CompilerNotFound and CompileError.
    """
    compiler = identity(with_nvcc=any(map(build.is_cuda, build.units)))
    folder = staging / "build"
    folder.mkdir()
    for name, text in build.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    gcc = "clang" not in " ".join(compiler.values())
    steps = [compile_step(build, n, folder, gcc=gcc) for n in range(len(build.units))]
    linked = link_step(build, [step.output for step in steps], folder / "linked")
    done = _run(build, steps, [], variant, target, staging)
    expanding = [expand_step(build, n, folder) for n, step in enumerate(steps) if _registers(step)]
    _run(build, [linked, *expanding], done, variant, target, staging)
    binary = binary_at(linked.output, variant, target, linked.command)
    missing = hints.missing_module(build, binary) if build.output == "module" else ""
    if missing:
        raise CompileError(f"{variant.op}: {missing}", op=variant.op)
    plain = re.sub(r"\W", "_", build.name, flags=re.ASCII)[:80] or "_"
    suffix = "" if build.output == "program" else ".so"
    artifact = keep_binary(staging, plain, binary, suffix)
    registered = hints.registrations(_texts(expanding))
    units = map(str, range(len(steps)))
    return Built(compiler, {"artifact": artifact, **registered}), dependencies.in_folder(
        folder, units
    )


def identity(*, with_nvcc: bool) -> dict[str, str]:
    """The compilers that would build: c++, or nvcc and its host's c++. Raises CompilerNotFound."""
    host = cc_build.identity(config.current().cxx)
    if not with_nvcc:
        return host
    return {"name": "nvcc", "version": ".".join(map(str, nvcc()[1])), "c++": host["version"]}


def check_target(op: str, target: Target, *, python: bool, with_cuda: bool) -> None:
    """Raise TargetError if `target` is not for the Torch, Python and platform of this process.

    python: whether the artifact depends on Python's ABI.
    """
    import torch

    cuda = (torch.version.cuda or "").replace(".", "")
    ours = (Target.current("cpu").torch, this_platform(), this_abi(python=python))
    same = (target.torch, target.platform, target.abi) == ours
    if not same or (cuda and target.cuda not in ("", cuda)):
        raise TargetError(
            f"{op}: cannot build for {target} here: extensions must be built with the Torch they "
            f"run on (this is Torch {torch.__version__} on {this_platform()})"
        )
    if not cuda and (with_cuda or target.cuda):
        raise TargetError(
            f"{op}: it needs CUDA, and this Torch {torch.__version__} is built without CUDA: "
            "install a CUDA build of Torch"
        )


def _run(
    build: Build, steps: Sequence[Command], before: Sequence[_Done],
    variant: Variant, target: Target, staging: Path,
) -> list[_Done]:  # fmt: skip
    """Run the steps and log them with those done `before`; returns both. Raises CompileError."""
    done = [*before, *_side_by_side(build, steps, staging / "build")]
    log = "".join(f"$ {shlex.join(step.command)}\n{step.output}" for step in done[1:])
    write_log(staging, done[0].command, done[0].output + log)
    for step in done:
        if step.status:
            hint = hints.hint(build, step.output)
            raise compile_error(variant, target, step.command, step.output, hint)
    return done


def _registers(compiled: Command) -> bool:
    """Whether the compiled unit registers something with Torch."""
    path = compiled.output  # a compiler may succeed without an object: then linking fails
    return path.is_file() and b"TORCH_LIBRARY_" in path.read_bytes()


def _texts(expanded: Sequence[Command]) -> list[str]:
    return [cpp_text.read(step.output) for step in expanded if step.output.is_file()]


def _side_by_side(build: Build, steps: Sequence[Command], folder: Path) -> list[_Done]:
    """The steps that ended, in order: all, or up to the first failure, which ends the others."""
    ended: queue.SimpleQueue[_Done | BaseException] = queue.SimpleQueue()
    over = threading.Event()
    threads = [  # daemons: a process can end without them
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(_work, build, number, step, folder, over, ended),
            daemon=True,
        )
        for number, step in enumerate(steps)
    ]
    done: list[_Done] = []
    try:
        for thread in threads:
            thread.start()
        while len(done) < len(steps) and not any(step.status for step in done):
            with contextlib.suppress(queue.Empty):
                result = ended.get(timeout=_WAIT)
                if isinstance(result, BaseException):
                    raise result
                done.append(result)
    finally:
        over.set()
        while alive := [thread for thread in threads if thread.is_alive()]:
            child_process.kill_in(folder)  # again and again: a child may just have been starting
            alive[0].join(0.05)
    return sorted(done)


def _work(
    build: Build,
    number: int,
    step: Command,
    folder: Path,
    over: threading.Event,
    ended: queue.SimpleQueue[_Done | BaseException],
) -> None:
    try:
        with parallelism.place(over) as running:
            if running:
                roomy = step.roomy if (parallelism.free_memory() or 0) > _ROOM * running else ()
                command = [*step.command, *roomy]
                settings = config.current()
                environment = settings.build_environment(build.environment)
                run = functools.partial(
                    child_process.run, shown=settings.verbose, cwd=folder, env=environment
                )
                command, status, output = dependencies.run_listed(run, command)
                ended.put(_Done(number, command, status if step.needed else 0, output))
    except BaseException as e:  # noqa: BLE001  raised again where the result is taken
        ended.put(e)


def hides_binaries(build: Build, staging: Path, texts: Iterable[bytes]) -> bool:
    """Whether the assembler read files that neither a text nor the assembler names."""
    flags = [*build.ldflags, *(flag for unit in build.units for flag in unit.flags)]
    units = map(str, range(len(build.units)))
    return dependencies.hides_binaries(staging / "build", units, flags, texts)
