"""A program with any words is refused, or interpreted without reading or writing beyond its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers import H100, needs_nvrtc

import jitkern.ops  # noqa: F401  which announces the shipped ops
from jitkern import jit
from jitkern.op.all_ops import all_ops
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.call_traces import traces_of
from jitkern.runtime import binding
from jitkern.source.kinds import Cpp, Cuda
from jitkern.target import Target

pytestmark = pytest.mark.long
ON_GPUS = ("vec_add", "kv_cache_append", "nonfinite_flag_")
OPS = (*ON_GPUS, "softmax", "rms_norm", "rope_", "topk")
TIMES = os.environ.get("JITKERN_FUZZ", "1000000")


def seeds():
    """The programs of the samples of some ops, on the CPU and for a GPU."""
    for op in all_ops().values():
        name = op.name.removeprefix("jitkern::")
        places = [("cpu", Target.current("cpu")), ("cuda", Target.parse(H100))]
        for device, target in places[: (name in OPS) + (name in ON_GPUS)]:
            for source in op.sources.get(device, ()):
                if not isinstance(source, (Cpp, Cuda)):
                    continue
                variants, calls, _ = needs_of(op, source, device, target)
                for variant in variants:
                    jit.ensure(variant, target)
                for traced, _ in traces_of(op, source, target, calls, {}).traces:
                    yield op.signature, device == "cuda", traced


def in_c(number, signature, cuda, traced):
    """A program as the initializer of a `Seed`, and the arrays that it points to."""
    program = traced.program
    arities = [len(k.parameters) + len(k.meta.get("scratch", ())) for k in traced.kernels]
    texts = ", ".join(f'{{"text", {len(text.encode())}}}' for text in program.texts)
    arrays = "".join(
        f"static {kind} {name}{number}[] = {{{items or '0'}}};\n"
        for kind, name, items in (
            ("i32", "words", ", ".join(map(str, program.words))),
            ("u64", "constants", ", ".join(f"{n}ull" for n in program.constants)),
            ("i32", "arities", ", ".join(map(str, arities))),
            ("Text", "texts", texts or "{0, 0}"),
        )
    )
    kinds = "".join(p.kind for p in signature.parameters)
    counts = (
        len(program.words), len(program.constants), len(program.texts), len(arities), *program[3:],
    )  # fmt: skip
    pointers = f"words{number}, constants{number}, texts{number}, arities{number}"
    seed = f'{{"{kinds}", "{signature.results}", {int(cuda)}, {{{pointers}, {", ".join(map(str, counts))}}}}}'
    return arrays, seed


@needs_nvrtc
def test_a_program_of_any_words_is_harmless(tmp_path):
    made = [in_c(i, *seed) for i, seed in enumerate(seeds())]
    assert len(made) > 50
    listed = "".join(arrays for arrays, _ in made)
    listed += f"static const Seed seeds[] = {{{', '.join(seed for _, seed in made)}}};\n"
    text = Path(__file__).with_name("program_fuzz.c").read_text()
    unit = tmp_path / "fuzz.c"
    unit.write_text(binding.interpreter() + text.replace("\nSEEDS\n", f"\n{listed}\n"))
    subprocess.run(
        ["cc", "-g", "-O1", "-w", "-fwrapv", "-fsanitize=address,undefined", "-fno-sanitize=alignment", "-o", "fuzz", unit, "-lm"],
        cwd=tmp_path, check=True,
    )  # fmt: skip
    done = subprocess.run(
        [tmp_path / "fuzz", TIMES], capture_output=True, text=True, check=False,
        env={**os.environ, "LD_PRELOAD": "", "ASAN_OPTIONS": "detect_leaks=1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    print(done.stdout)
