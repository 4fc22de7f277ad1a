"""A tuned Triton kernel, with constexprs of all kinds."""

import enum

import triton
import triton.language as tl


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128)], key=["n", "MODE"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def mapped(
    out, x, n, MODE: tl.constexpr, ACT: tl.constexpr, KIND: tl.constexpr, PAIR: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, ACT(tl.load(x + i, mask=i < n)).to(KIND), mask=i < n)
