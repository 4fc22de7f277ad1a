"""softmax of a row, with the online normalizer kept by each lane and joined at the end."""

import triton
import triton.language as tl


@triton.jit
def softmax(out, x, cols, inner, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # its elements lie `inner` apart
    start = row // inner * cols * inner + row % inner
    x += start
    out += start
    lane = tl.arange(0, BLOCK)
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    factor = tl.full([1], scale, wide)
    m = tl.full([BLOCK], -3.402823466e38, wide)
    d = tl.zeros([BLOCK], wide)
    for first in range(0, cols, BLOCK):
        at = first + lane
        v = tl.load(x + at.to(tl.int64) * inner, mask=at < cols, other=0).to(wide) * factor
        v = tl.where(at < cols, v, float("-inf"))
        n = tl.maximum(m, v)
        d = d * tl.exp(m - n) + tl.exp(v - n)
        m = n
    top = tl.max(m, 0)
    total = tl.sum(d * tl.exp(m - top), 0)
    for first in range(0, cols, BLOCK):
        at = first + lane
        v = tl.load(x + at.to(tl.int64) * inner, mask=at < cols).to(wide) * factor
        tl.store(out + at.to(tl.int64) * inner, tl.exp(v - top) / total, mask=at < cols)
