"""Builds with Torch's headers, for `Extension`, `load_inline` and `load`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers import dependencies
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.result import Built, binary_at, compile_error, keep_binary, write_log
from jitkern.compilers.torch_extension import hints, ninja
from jitkern.compilers.torch_extension.commands import (
    Build,
    Command,
    compile_step,
    expand_step,
    link_step,
    nvcc,
)
from jitkern.errors import CompileError, TargetError
from jitkern.source import cpp_text
from jitkern.source.kinds import Variant
from jitkern.target import Target, this_abi, this_platform


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
    done = run_steps(build, steps, [], variant, target, staging)
    expanding = [expand_step(build, n, folder) for n, step in enumerate(steps) if _registers(step)]
    run_steps(build, [linked, *expanding], done, variant, target, staging)
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


def check_target(op: str, target: Target, build: Build) -> None:
    """Raise TargetError if `target` is not for the Torch, Python and platform of this process."""
    import torch

    cuda = (torch.version.cuda or "").replace(".", "")
    ours = (Target.current("cpu").torch, this_platform(), this_abi(python=build.python))
    same = (target.torch, target.platform, target.abi) == ours
    if not same or (cuda and target.cuda not in ("", cuda)):
        raise TargetError(
            f"{op}: cannot build for {target} here: extensions must be built with the Torch they "
            f"run on (this is Torch {torch.__version__} on {this_platform()})"
        )
    if not cuda and (build.with_cuda or target.cuda):
        raise TargetError(
            f"{op}: it needs CUDA, and this Torch {torch.__version__} is built without CUDA: "
            "install a CUDA build of Torch"
        )


def run_steps(
    build: Build, steps: Sequence[Command], before: Sequence[ninja.Done],
    variant: Variant, target: Target, staging: Path,
) -> list[ninja.Done]:  # fmt: skip
    """Run the steps and log them with those done `before`; returns both. Raises CompileError."""
    environment = config.current().build_environment(build.environment)
    done = [*before, *ninja.run(steps, staging / "build", environment)]
    log = "".join(f"$ {shlex.join(step.command)}\n{step.output}" for step in done[1:])
    write_log(staging, done[0].command, done[0].output + log)
    for step in done:
        if step.failed:
            hint = hints.hint(build, step.output)
            raise compile_error(variant, target, step.command, step.output, hint)
    return done


def _registers(compiled: Command) -> bool:
    """Whether the compiled unit registers something with Torch."""
    path = compiled.output  # a compiler may succeed without an object: then linking fails
    return path.is_file() and b"TORCH_LIBRARY_" in path.read_bytes()


def _texts(expanded: Sequence[Command]) -> list[str]:
    return [cpp_text.read(step.output) for step in expanded if step.output.is_file()]


def hides_binaries(build: Build, staging: Path, texts: Iterable[bytes]) -> bool:
    """Whether the assembler read files that neither a text nor the assembler names."""
    flags = [*build.ldflags, *(flag for unit in build.units for flag in unit.flags)]
    units = map(str, range(len(build.units)))
    return dependencies.hides_binaries(staging / "build", units, flags, texts)
