"""softmax of a row, with the online normalizer kept by each lane and joined at the end."""

import triton
import triton.language as tl


@triton.jit
def softmax(out, x, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * cols
    out += row * cols
    lane = tl.arange(0, BLOCK)
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    m = tl.full([BLOCK], -3.402823466e38, wide)
    d = tl.zeros([BLOCK], wide)
    for start in range(0, cols, BLOCK):
        v = tl.load(x + start + lane, mask=start + lane < cols, other=float("-inf")).to(wide)
        n = tl.maximum(m, v)
        d = d * tl.exp(m - n) + tl.exp(v - n)
        m = n
    top = tl.max(m, 0)
    total = tl.sum(d * tl.exp(m - top), 0)
    for start in range(0, cols, BLOCK):
        mask = start + lane < cols
        v = tl.load(x + start + lane, mask=mask).to(wide)
        tl.store(out + start + lane, tl.exp(v - top) / total, mask=mask)
