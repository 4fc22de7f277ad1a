"""Builds with Torch's headers, for `Extension`, `load_inline` and `load`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers import dependencies
from jitkern.compilers.result import (
    Built,
    binary_at,
    compile_error,
    first_hint,
    keep_binary,
    write_log,
)
from jitkern.compilers.torch_extension import hints, ninja
from jitkern.compilers.torch_extension.commands import (
    Build,
    Command,
    compile_step,
    expand_step,
    identity,
    link_step,
)
from jitkern.compilers.torch_extension.ninja import Done
from jitkern.compilers.torch_extension.objects import Objects
from jitkern.errors import CompileError, TargetError
from jitkern.source import cpp_text
from jitkern.source.kinds import Variant
from jitkern.target import Target, this_abi, this_platform


def make(
    objects: Objects, variant: Variant, target: Target, staging: Path
) -> tuple[Built, list[Path]]:
    """Build in `staging`; returns the result, and the files that the tools opened.

    What was opened for an object of the cache is left out: the key of the object covers it. The
    result's meta has the `artifact`, and the `namespaces` and `ops` that it registers. Raises
    CompilerNotFound and CompileError.
    """
    build = objects.build
    compiler = identity(with_nvcc=any(map(build.is_cuda, build.units)))
    folder = staging / "build"
    folder.mkdir()
    for name, text in build.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    gcc = "clang" not in " ".join(compiler.values())
    steps = [compile_step(build, n, folder, gcc=gcc) for n in range(len(build.units))]
    linked = link_step(build, [step.output for step in steps], folder / "linked")
    found = {n: data for n in range(len(steps)) if (data := objects.find(n)) is not None}
    done = [Done(n, steps[n].command, "# its object was in the cache\n", False) for n in found]
    for number, data in found.items():
        steps[number].output.write_bytes(data)
    left = [number for number in range(len(steps)) if number not in found]
    if left:
        wanted = [steps[number] for number in left]
        ended = lambda number: objects.keep(left[number], folder)  # noqa: E731
        done = run_steps(build, wanted, done, variant, target, staging, ended)
    expanding = [expand_step(build, n, folder) for n, step in enumerate(steps) if _registers(step)]
    run_steps(build, [linked, *expanding], done, variant, target, staging)
    binary = binary_at(linked.output, variant, target, linked.command)
    missing = hints.missing_module(build, binary) if build.output == "module" else ""
    if missing:
        raise CompileError(f"{variant.op}: {missing}", op=variant.op)
    plain = re.sub(r"\W", "_", build.name, flags=re.ASCII)[:80] or "_"
    suffix = "" if build.output == "program" else ".so"
    artifact = keep_binary(staging, plain, binary, suffix)
    texts = [cpp_text.read(step.output) for step in expanding if step.output.is_file()]
    registered = hints.registrations(texts)
    units = map(str, left)
    return Built(compiler, {"artifact": artifact, **registered}), dependencies.in_folder(
        folder, units
    )


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
            f"{op}: its Extension needs CUDA, and this Torch {torch.__version__} is built without "
            "CUDA: install a CUDA build of Torch"
        )


def run_steps(
    build: Build, steps: Sequence[Command], before: Sequence[Done],
    variant: Variant, target: Target, staging: Path, ended: Callable[[int], None] = lambda _: None,
) -> list[Done]:  # fmt: skip
    """Run the steps and log them with those done `before`; returns both. Raises CompileError.

    ended: see `ninja.run`.
    """
    environment = config.current().build_environment(build.environment)
    done = [*before, *ninja.run(steps, staging / "build", environment, ended)]
    log = "".join(f"$ {shlex.join(step.command)}\n{step.output}" for step in done[1:])
    write_log(staging, done[0].command, done[0].output + log)
    for step in done:
        if step.failed:
            hint = first_hint(step.output, hints.HINTS)
            raise compile_error(variant, target, step.command, step.output, hint)
    return done


def _registers(compiled: Command) -> bool:
    """Whether the compiled unit may define ops or a namespace of Torch."""
    path = compiled.output  # a compiler may succeed without an object: then linking fails
    return path.is_file() and bool(re.search(rb"TORCH_LIBRARY_(?!IMPL_)", path.read_bytes()))
