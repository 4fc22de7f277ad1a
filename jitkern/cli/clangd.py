"""Write `compile_commands.json` beside sources, so that clangd knows their headers and macros."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import config, op as op_room
from jitkern.compilers import compiler_for, cpp
from jitkern.compilers.cuda import toolkit
from jitkern.compilers.cuda.nvrtc import RELAXED
from jitkern.errors import JitkernError
from jitkern.source.closure import closure_of
from jitkern.source.kinds import Cpp, Cuda, Source, Variant
from jitkern.target import EXAMPLE, Target

if TYPE_CHECKING:
    from jitkern.op.op import Op

NAME = "compile_commands.json"
_ATTRIBUTES = ("device", "global", "shared", "host", "constant")
# As NVRTC does, without the headers of a toolkit, which each clang takes up to some version only.
_CLANG = (
    "clang++", "-xcuda", "-nocudainc", "-nocudalib", "--cuda-device-only",
    *(f"-D__{name}__=__attribute__(({name}))" for name in _ATTRIBUTES),
    "-include", "__clang_cuda_builtin_vars.h",
)  # fmt: skip


def write(ops: Iterable[Op]) -> list[Path]:
    """Write the file into each folder that has C, C++ or CUDA sources of the ops.

    Extensions are left out: their commands name Torch's headers, and are made when they are built.
    """
    commands: dict[Path, dict[str, Any]] = defaultdict(dict)
    for op in ops:
        for device, sources in op.sources.items():
            for source in sources:
                if isinstance(source, (Cpp, Cuda)):
                    for path in source.paths:
                        command = _command(op, device, source, path)
                        commands[Path(source.folder)][str(path)] = command
    for folder, entries in commands.items():
        text = json.dumps([*entries.values()], indent=2)
        (folder / NAME).write_text(f"{text}\n", encoding="utf-8")
    return [folder / NAME for folder in commands]


def _command(op: Op, device: str, source: Source, path: Path) -> dict[str, Any]:
    unit = source.unit(path.name) if len(source.files) > 1 else source
    target = Target.current("cpu") if device == "cpu" else Target.parse(EXAMPLE)
    compiler = compiler_for(unit)
    flags = compiler.flags(unit, compiler.target(unit, target))
    if isinstance(unit, Cpp):
        tool = [*shlex.split(config.current().cxx), *flags]
    else:
        headers = [f"-isystem{folder}" for folder in toolkit.include_directories()]
        tool = [*_CLANG, *(flag for flag in flags if flag != RELAXED), *headers]
    macros = _macros(op, device, unit)
    return {
        "directory": source.folder,
        "file": str(path),
        "arguments": [
            *tool, *(f"-I{root.path}" for root in unit.roots),
            *(f"-D{name}={value}" for name, value in macros.items()), str(path),
        ],
    }  # fmt: skip


def _macros(op: Op, device: str, source: Source) -> dict[str, str]:
    """Return the template arguments of the op's first kernel that are passed as macros."""
    with contextlib.suppress(JitkernError, OSError):
        variants: Iterable[Variant] = op_room.needed_kernels.needs_of(op, source, device).variants
        for variant in variants:
            text = source.paths[0].read_text(encoding="utf-8", errors="replace")
            return cpp.functions.instantiated(variant, text, closure_of(source))[1]
    return {}
