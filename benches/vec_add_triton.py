"""out = x + y as one writes it for Triton alone; the kernel is the shipped op's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def vec_add_kernel(out, x, y, n, BLOCK: tl.constexpr):  # noqa: N803  Triton's custom
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


def vec_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, with the checks of the shipped op left out, as they usually are."""
    out = torch.empty_like(x)
    n = x.numel()
    vec_add_kernel[((n + 1023) // 1024,)](out, x, y, n, BLOCK=1024)
    return out
