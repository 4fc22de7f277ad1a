"""cuTile and the CuTe DSL, as their common tests see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import needs_cute, needs_cutile

import jitkern
from jitkern.declare import Cute, CuTile
from jitkern.launch.call import Call, variant_of
from jitkern.source.kinds import Source
from jitkern.target import Target

TARGETS = {
    arch: Target.parse(f"cuda-{arch}-cu130-torch2.13.0")
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
}
TARGET = TARGETS["sm_90"]
VECTOR = "*f32:16:16:=1"
HELPER = "def twice(x):\n    return {} * x\n"


@dataclass(frozen=True, eq=False)
class Language:
    """A language of NVIDIA's, with a kernel `k(out, x, by, B)` that multiplies a vector by a number."""

    name: str  # of its folder, its extra and its dialect of compilers
    kind: type[Source]
    compiler: str  # with its first number
    decorator: str
    head: str
    scale: str
    scale_by_int: str
    launch: dict[str, Any]  # keywords of a launch of one block
    modules: tuple[str, ...]  # that a process needs only to compile
    needs: pytest.MarkDecorator

    @property
    def helped(self) -> str:
        """The kernel with a function of another file: see HELPER."""
        text = self.scale.replace(self.head, f"{self.head}from helper import twice\n")
        return text.replace("* by", "* twice(by)")

    def classes(
        self, *args: object, template: object = (("B", 64),), strided: bool = False, **keywords: Any
    ) -> tuple[str, ...]:
        """The classes of the arguments of a launch."""
        call = Call("k", template, args, {**self.launch, **keywords})
        return variant_of("test::k", self.kind("k.py", strided=strided), call)[0].signature


_CUTILE_HEAD = "import cuda.tile as ct\nInt = ct.Constant[int]\n"
_CUTILE_SCALE = _CUTILE_HEAD + (
    "@ct.kernel\n"
    "def k(out, x, by, B: Int):\n"
    "    i = ct.bid(0)\n"
    "    tile = ct.load(x, index=(i,), shape=(B,)) * by\n"
    "    ct.store(out, index=(i,), tile=ct.astype(tile, out.dtype))\n"
)
CUTILE = Language(
    "cutile", CuTile, "tileiras 13", "@ct.kernel", _CUTILE_HEAD, _CUTILE_SCALE, _CUTILE_SCALE,
    {"grid": 1}, ("cuda",), needs_cutile,
)  # fmt: skip
_CUTE_HEAD = (
    "import cuda.bindings.driver as cuda\nimport cutlass\nimport cutlass.cute as cute\n"
    "from cutlass import Constexpr, Float32, Int32, Int64\n"
)
_CUTE_SCALE = _CUTE_HEAD + (
    "@cute.kernel\n"
    "def scale(out: cute.Tensor, x: cute.Tensor, by: Float32, n: Int32, B: Constexpr):\n"
    "    i = cute.arch.block_idx()[0] * B + cute.arch.thread_idx()[0]\n"
    "    if i < n:\n"
    "        out[i] = x[i] * by\n"
    "@cute.jit\n"
    "def k(out: cute.Tensor, x: cute.Tensor, by: Float32, B: Constexpr, stream: cuda.CUstream):\n"
    "    n = cute.size(x, mode=[0])\n"
    "    blocks = (n + B - 1) // B\n"
    "    scale(out, x, by, n, B).launch(grid=[blocks, 1, 1], block=[B, 1, 1], stream=stream)\n"
)
CUTE = Language(
    "cute", Cute, "nvidia-cutlass-dsl 4", "@cute.jit", _CUTE_HEAD, _CUTE_SCALE,
    _CUTE_SCALE.replace("by: Float32", "by: Int32"), {}, ("cuda", "cutlass"), needs_cute,
)  # fmt: skip


def in_both(cutile, cute):
    """Parameters (language, case); one in four of cuTile's is short."""
    cases = [(CUTILE, case, at % 4 > 0) for at, case in enumerate(cutile)]
    cases += [(CUTE, case, True) for case in cute]
    return [
        pytest.param(
            language, case, id=f"{language.name}-{case}",
            marks=[language.needs, pytest.mark.long] if long else language.needs,
        )
        for language, case, long in cases
    ]  # fmt: skip


def artifact(entry):
    """The bytes that the compiler wrote."""
    return entry.read(entry.manifest.meta["artifact"])


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def learn(gpu, op, *call):
    """Append the program of a call of an op, whose only sample it is."""
    op.samples(lambda device: iter([call]))
    gpu.learn(op, call)


def said_by_prewarm(op, *shape):
    """Return the results of a prewarm as text. Its call has a tensor of this shape and a number."""
    op.samples(lambda device: iter([(torch.ones(shape, device=device), 2.0)]))
    return str(jitkern.prewarm([op], targets=[TARGET]))


def assert_serves_its_class_alone(gpu):
    """Check a program that is for vectors. Their sizes and addresses are multiples of 16."""
    assert gpu.call(torch.ones(65), 2) is None, "a size of another class"
    assert gpu.call(torch.ones(65)[1:], 2) is None, "an address of another class"
    assert gpu.call(torch.ones(64, dtype=torch.float64), 2) is None, "another dtype"
    assert gpu.call(torch.ones(128)[::2], 2) is None, "not contiguous"
