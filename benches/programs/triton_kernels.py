"""A Triton kernel, and one that is autotuned."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)


@triton.autotune(
    [triton.Config({"BLOCK": b}, num_warps=w) for b in (256, 1024) for w in (2, 4)], key=["n"]
)
@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2.0, mask=at < n)


x = torch.arange(100_000.0, device="cuda")
y, z = torch.empty_like(x), torch.empty_like(x)
add[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
scale[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, z, x.numel())
assert torch.equal(y, x + 1)
assert torch.equal(z, x * 2)
