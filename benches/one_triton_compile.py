"""Triton kernels compiled in this process, by Triton itself or through jitkern: prints the seconds.

`triton_compile` starts it as `python -m benches.one_triton_compile CONTENDER FOLDER`. The contender
`import` imports Torch beside Triton, and compiles nothing. The first
kernel counts with the imports of the contender over Torch; the package whose `__init__` is slow is
imported before the clock starts, as it is in the program that calls its kernels.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANY = 40
KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def scale(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, {} * tl.load(x + i, mask=i < n), mask=i < n)
"""


def write(folder: Path) -> None:
    """Write the kernels: of files for themselves, and one of a package."""
    for number in range(MANY):
        (folder / f"scale_{number}.py").write_text(KERNEL.format(number + 2))
    (folder / "slow_package").mkdir()
    (folder / "slow_package" / "__init__.py").write_text("import time\ntime.sleep(2)\n")
    (folder / "slow_package" / "kernels.py").write_text(KERNEL.format(1.5))


def _of_triton() -> Callable[[str], Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"out": "*fp32", "x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(3)}

    def compiled(module: str) -> Any:
        function = importlib.import_module(module).scale
        source = ASTSource(function, kinds, {(3,): 128}, aligned)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))

    return compiled


def _of_jitkern() -> Callable[[str], Any]:
    import torch

    import jitkern

    target = f"cuda-sm_90-cu130-torch{torch.__version__.partition('+')[0]}"
    x = torch.empty(256)

    def compiled(module: str) -> Any:
        kernel = jitkern.triton_kernel(f"{module}:scale")
        return kernel.compile(x, x, 256, BLOCK=128, target=target)

    return compiled


def _import_of_torch() -> float:
    importlib.import_module("triton.compiler.code_generator")
    started = time.perf_counter()
    importlib.import_module("torch")
    return time.perf_counter() - started


def main(contender: str, folder: str) -> None:
    """Compile, and print the seconds of each part."""
    sys.path.insert(0, folder)
    if contender == "import":
        spent = _import_of_torch()
        print(json.dumps({"one": spent, "forty": spent, "package": 0.0}))
        return
    importlib.import_module("torch")
    seconds = {}
    started = time.perf_counter()
    compiled = _of_triton() if contender == "triton" else _of_jitkern()
    compiled("scale_0")
    seconds["one"] = time.perf_counter() - started
    for number in range(1, MANY):
        compiled(f"scale_{number}")
    seconds["forty"] = time.perf_counter() - started
    importlib.import_module("slow_package.kernels")
    started = time.perf_counter()
    compiled("slow_package.kernels")
    seconds["package"] = time.perf_counter() - started
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
