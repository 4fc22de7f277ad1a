"""Builds what `load_inline` and `load` were given: units side by side, then the linker."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jitkern import config
from jitkern.closure import Closure
from jitkern.compilers import cc, child, toolkit, traps
from jitkern.compilers.cpp_commands import Step, compile_step, link_command, nvcc, torch_folder
from jitkern.compilers.result import Built, compile_error, read_dependencies, run, write_log
from jitkern.errors import CompileError, TargetError
from jitkern.inline import Inline
from jitkern.kernel import Variant
from jitkern.target import Target, this_abi, this_platform


def build(variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
    """Compile and link in `staging`; see compilers.Compiler.compile."""
    source = variant.source
    assert isinstance(source, Inline)
    _check_target(variant, target)
    compiler = identity(source)
    roomy = "clang" not in compiler["version"] and _free_memory() > 4 * len(source.files)
    folder = staging / "build"
    folder.mkdir()
    for name, text in zip(source.files, source.texts):
        (folder / name).write_text(text, encoding="utf-8")
    numbers = range(len(source.files))
    steps = [compile_step(source, number, folder, roomy=roomy) for number in numbers]
    linked = _run_all(variant, target, steps, staging)
    binary = linked.read_bytes()
    if source.output == "module":
        missing = traps.missing_module(source, binary)
        if missing:
            raise CompileError(f"{variant.op}: {missing}", op=variant.op)
    plain = re.sub(r"\W", "_", source.name, flags=re.ASCII)[:80] or "_"
    suffix = "" if source.output == "program" else ".so"
    artifact = f"{plain}.{hashlib.sha256(binary).hexdigest()[:8]}{suffix}"
    (staging / artifact).write_bytes(binary)
    registered = traps.registrations(source, b"\0".join(step.output.read_bytes() for step in steps))
    opened = _opened(closure, folder, steps)
    return Built(compiler, {"artifact": artifact, **registered, "opened": opened})


def identity(source: Inline) -> dict[str, str]:
    """The compilers that would build `source`. Raises CompilerNotFound."""
    found = cc.identity(config.current().cxx)
    if any(map(source.is_cuda, source.files)):
        return {**found, "nvcc": ".".join(map(str, nvcc()[1]))}
    return found


def _free_memory() -> float:
    """In GiB; 0 where that is not to be known."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found.group(1)) / (1 << 20) if found else 0


def _check_target(variant: Variant, target: Target) -> None:
    """What is built is for the Torch, the Python and the platform that it is built on."""
    import torch

    source = variant.source
    assert isinstance(source, Inline)
    here = Target.current("cpu")
    ours = (here.torch, this_platform(), this_abi(python=source.python))
    if (target.torch, target.platform, target.abi) != ours:
        raise TargetError(f"{variant.op}: this machine is no {target}, and builds for itself alone")
    if source.with_cuda and not torch.version.cuda:
        raise TargetError(
            f"{variant.op}: it wants CUDA, and this Torch {torch.__version__} is built without: "
            "install a CUDA build of it"
        )


def _run_all(variant: Variant, target: Target, steps: Sequence[Step], staging: Path) -> Path:
    """Run the steps, link what they write, and keep the log; returns what was linked."""
    source = variant.source
    assert isinstance(source, Inline)
    folder = staging / "build"
    linked = folder / "linked"
    commands = [step.command for step in steps]
    done = _side_by_side(source, folder, commands)
    if not any(status for status, _ in done):
        commands.append(link_command(source, [step.output for step in steps], linked))
        done.append(_run(source, folder, commands[-1]))
    log = "".join(f"$ {shlex.join(c)}\n{said}" for c, (_, said) in zip(commands[1:], done[1:]))
    write_log(staging, commands[0], done[0][1] + log)
    for command, (status, said) in zip(commands, done):
        if status:
            named = variant._replace(function=source.name)
            raise compile_error(named, target, command, said, traps.hint(source, said))
    return linked


def _run(source: Inline, folder: Path, command: list[str]) -> tuple[int, str]:
    done = run(command, source=source, folder=folder)
    return done.returncode, done.stdout


def _side_by_side(source: Inline, folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    if len(commands) == 1:
        return [_run(source, folder, commands[0])]
    settings = config.current()
    named = settings.environment.get("MAX_JOBS", "")
    jobs = int(named) if named.isdigit() and int(named) else settings.jobs or os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(min(jobs, len(commands))) as pool:
        try:
            return list(pool.map(lambda command: _run(source, folder, command), commands))
        except BaseException:  # the children have sessions of their own, where no Ctrl-C arrives
            pool.shutdown(wait=False, cancel_futures=True)
            child.kill_in(folder)
            raise


def _opened(closure: Closure, folder: Path, steps: Sequence[Step]) -> dict[str, str]:
    """What the compiler opened beyond the key and the toolchain: path -> SHA-256.

    A header that a macro names, say. It is looked at again whenever the entry is used.
    """
    known = [folder.resolve(), torch_folder().resolve(), *toolkit.cuda_homes()]
    found: dict[str, str] = {}
    for step in steps:
        for name in read_dependencies(step.opened) if step.opened.is_file() else ():
            path = (folder / name).resolve()
            if path not in closure.paths and not any(path.is_relative_to(k) for k in known):
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
