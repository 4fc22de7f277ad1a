"""Attention over the listed blocks of a mask, forward and backward (FlashAttention-2, Dao 2023).

A program owns a tile of queries, or in `backward_k` one of keys, and goes through the blocks of its
row of the mask: the full ones first, which need no comparisons, then the partial ones. The last
tiles of queries come first, since a causal mask gives them the most blocks.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def _rows(
    x, first, stride, length,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load rows of [length, D] as a tile [ROWS, DP], with zeros beyond."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, DP)[None, :]
    at = x + first.to(tl.int64) * stride + (row * stride + column)
    return tl.load(at) if WHOLE else tl.load(at, (first + row < length) & (column < D), other=0)


@triton.jit
def _place(tiles, heads, group):
    """Return this program's tile of queries, head counted over batches, batch, head, key head."""
    number = tl.program_id(0)
    of_heads = number // tiles
    head = of_heads % heads
    of_keys = (head // group).to(tl.int64)
    return (
        tiles - 1 - number % tiles, of_heads,
        (of_heads // heads).to(tl.int64), head.to(tl.int64), of_keys,
    )  # fmt: skip


@triton.jit
def _step(
    columns, patterns, bits, begin, end, column, i,
    BLOCK: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Return where tile i of a list of blocks begins, its pattern, and the column of tile i + 1.

    column: that of tile i.
    """
    parts: tl.constexpr = MASK // BLOCK
    pattern = begin * 0
    if PARTIAL and bits is not None:
        pattern = tl.load(patterns + begin + i // parts)
    after = begin + (i + 1) // parts  # read before it is needed
    following = tl.load(columns + after, mask=after < end, other=0)
    return column * MASK + i % parts * BLOCK, pattern, following


@triton.jit
def _seen(m, n, k_len, left, right, bits, pattern, MASK_M: tl.constexpr, MASK_N: tl.constexpr):
    """Whether query m sees key n in a partial block; one is a column of numbers, one a row."""
    seen = n < k_len
    if left is not None:
        seen = seen & (m - n <= left)
    if right is not None:
        seen = seen & (n - m <= right)
    if bits is not None:
        at = m % MASK_M * (MASK_N // 32) + n % MASK_N // 32
        words = tl.load(bits + pattern.to(tl.int64) * (MASK_M * MASK_N // 32) + at)
        seen = seen & ((words >> n % 32) & 1 != 0)
    return seen


@triton.jit
def _attend(
    acc, total, top, q, m, k, v, columns, patterns, bits, begin, end,
    k_n, v_n, k_len, factor, left, right,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr,
    NEGATIVE: tl.constexpr, PARTIAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Go through blocks of keys; the scores are in units of log 2."""
    parts: tl.constexpr = MASK_N // BLOCK_N
    column = tl.load(columns + begin, mask=begin < end, other=0)
    for i in range((end - begin) * parts):
        first, pattern, column = _step(
            columns, patterns, bits, begin, end, column, i, BLOCK_N, MASK_N, PARTIAL
        )
        keys = _rows(k, first, k_n, k_len, BLOCK_N, D, DP, WHOLE)
        s = tl.dot(q, tl.trans(keys), input_precision="ieee", out_dtype=acc.dtype)
        if PARTIAL or not WHOLE:
            n = (first + tl.arange(0, BLOCK_N))[None, :]
            if PARTIAL:
                seen = _seen(m[:, None], n, k_len, left, right, bits, pattern, MASK_M, MASK_N)
            else:
                seen = n < k_len
            s = tl.where(seen, s * factor, -INF)
            most = tl.maximum(top, tl.max(s, 1))
            base = tl.where(most == -INF, 0, most)
            p = tl.exp2(s - base[:, None])
        else:
            most = tl.maximum(top, (tl.min(s, 1) if NEGATIVE else tl.max(s, 1)) * factor)
            base = tl.where(most == -INF, 0, most)
            p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        values = _rows(v, first, v_n, k_len, BLOCK_N, D, DP, WHOLE)
        acc = tl.dot(
            p.to(values.dtype), values, acc * shrink[:, None],
            input_precision="ieee", out_dtype=acc.dtype,
        )  # fmt: skip
        top = most
    return acc, total, top


@triton.jit(do_not_specialize=[
    "starts_b", "starts_h", "tiles", "heads", "group", "q_len", "k_len", "left", "right",
])  # fmt: skip
def forward(
    out, lse, q, k, v, starts, columns, patterns, bits,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, starts_b, starts_h,
    tiles, heads, group, q_len, k_len, left, right, scale: tl.float64,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, NEGATIVE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    tile, of_heads, batch, head, of_keys = _place(tiles, heads, group)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = _rows(q + batch * q_b + head * q_h, tile * BLOCK_M, q_m, q_len, BLOCK_M, D, DP, False)
    k += batch * k_b + of_keys * k_h
    v += batch * v_b + of_keys * v_h
    starts += batch * starts_b + head * starts_h + tile * BLOCK_M // MASK_M * 2
    begin, middle, end = tl.load(starts), tl.load(starts + 1), tl.load(starts + 2)
    acc = tl.zeros([BLOCK_M, DP], wide)
    total = tl.zeros([BLOCK_M], wide)
    top = tl.full([BLOCK_M], -INF, wide)
    factor = tl.full([1], scale * LOG2E, wide)
    for partial in tl.static_range(2):
        acc, total, top = _attend(
            acc, total, top, queries, m, k, v, columns, patterns, bits,
            middle if partial else begin, end if partial else middle,
            k_n, v_n, k_len, factor, left, right,
            D, DP, BLOCK_N, MASK_M, MASK_N, NEGATIVE, partial, WHOLE,
        )  # fmt: skip
    nothing = total == 0
    acc = acc / tl.where(nothing, 1, total)[:, None]
    of_rows = of_heads.to(tl.int64) * q_len
    d = tl.arange(0, DP)
    at = out + (of_rows + m)[:, None] * D + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (m < q_len)[:, None] & (d < D)[None, :])
    sums = tl.where(nothing, -INF, (top + tl.log2(total)) * LN2)
    tl.store(lse + of_rows + m, sums, m < q_len)


@triton.jit
def _lse(lse, m, q_len, WHOLE: tl.constexpr):
    """Load sums in units of log 2; rows without a key, and those beyond, get probabilities of 0."""
    sums = tl.load(lse + m) if WHOLE else tl.load(lse + m, m < q_len, other=INF)
    return tl.where(sums == -INF, INF, sums * LOG2E)


@triton.jit
def _gradient_of_q(
    acc, q, grad, sums, delta, m, k, v, columns, patterns, bits, begin, end,
    k_n, v_n, k_len, factor, left, right,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, PARTIAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Go through blocks of keys."""
    parts: tl.constexpr = MASK_N // BLOCK_N
    column = tl.load(columns + begin, mask=begin < end, other=0)
    for i in range((end - begin) * parts):
        first, pattern, column = _step(
            columns, patterns, bits, begin, end, column, i, BLOCK_N, MASK_N, PARTIAL
        )
        keys = _rows(k, first, k_n, k_len, BLOCK_N, D, DP, WHOLE)
        s = tl.dot(q, tl.trans(keys), input_precision="ieee", out_dtype=acc.dtype)
        p = tl.exp2(s * factor - sums[:, None])
        if PARTIAL or not WHOLE:
            n = (first + tl.arange(0, BLOCK_N))[None, :]
            if PARTIAL:
                seen = _seen(m[:, None], n, k_len, left, right, bits, pattern, MASK_M, MASK_N)
            else:
                seen = n < k_len
            p = tl.where(seen, p, 0)
        values = _rows(v, first, v_n, k_len, BLOCK_N, D, DP, WHOLE)
        dp = tl.dot(grad, tl.trans(values), input_precision="ieee", out_dtype=acc.dtype)
        ds = (p * (dp - delta[:, None])).to(keys.dtype)
        acc = tl.dot(ds, keys, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit(do_not_specialize=[
    "starts_b", "starts_h", "tiles", "heads", "group", "q_len", "k_len", "left", "right",
])  # fmt: skip
def backward_q(
    dq, delta, grad, grad_lse, out, lse, q, k, v, starts, columns, patterns, bits,
    grad_b, grad_h, grad_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, starts_b, starts_h,
    tiles, heads, group, q_len, k_len, left, right, scale: tl.float64,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write delta, the sum of grad * out of each query less the gradient of lse, and dq if any."""
    wide: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    tile, of_heads, batch, head, of_keys = _place(tiles, heads, group)
    of_rows = of_heads.to(tl.int64) * q_len
    first = tile * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    grad += batch * grad_b + head * grad_h
    grads = _rows(grad, first, grad_m, q_len, BLOCK_M, D, DP, False)
    outs = _rows(out + of_rows * D, first, D, q_len, BLOCK_M, D, DP, False)
    products = tl.sum(grads.to(wide) * outs.to(wide), 1)
    if grad_lse is not None:  # of a query that sees nothing it may be NaN
        nothing = tl.load(lse + of_rows + m, m < q_len, other=0) == -INF
        products -= tl.where(nothing, 0, tl.load(grad_lse + of_rows + m, m < q_len, other=0))
    tl.store(delta + of_rows + m, products, m < q_len)
    if dq is not None:
        queries = _rows(q + batch * q_b + head * q_h, first, q_m, q_len, BLOCK_M, D, DP, False)
        sums = _lse(lse + of_rows, m, q_len, False)
        k += batch * k_b + of_keys * k_h
        v += batch * v_b + of_keys * v_h
        starts += batch * starts_b + head * starts_h + first // MASK_M * 2
        begin, middle, end = tl.load(starts), tl.load(starts + 1), tl.load(starts + 2)
        acc = tl.zeros([BLOCK_M, DP], wide)
        factor = tl.full([1], scale * LOG2E, wide)
        for partial in tl.static_range(2):
            acc = _gradient_of_q(
                acc, queries, grads, sums, products, m, k, v, columns, patterns, bits,
                middle if partial else begin, end if partial else middle,
                k_n, v_n, k_len, factor, left, right,
                D, DP, BLOCK_N, MASK_M, MASK_N, partial, WHOLE,
            )  # fmt: skip
        d = tl.arange(0, DP)
        at = dq + (of_rows + m)[:, None] * D + d[None, :]
        acc *= tl.full([1], scale, wide)
        tl.store(at, acc.to(dq.dtype.element_ty), (m < q_len)[:, None] & (d < D)[None, :])


@triton.jit
def _gradients_of_k(
    dk, dv, k, v, n, q, grad, lse, delta, columns, patterns, bits, begin, end,
    q_m, grad_m, q_len, k_len, factor, left, right,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, PARTIAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Go through blocks of queries; the scores are transposed, [keys, queries]."""
    parts: tl.constexpr = MASK_M // BLOCK_M
    column = tl.load(columns + begin, mask=begin < end, other=0)
    for i in range((end - begin) * parts):
        first, pattern, column = _step(
            columns, patterns, bits, begin, end, column, i, BLOCK_M, MASK_M, PARTIAL
        )
        m = first + tl.arange(0, BLOCK_M)
        queries = _rows(q, first, q_m, q_len, BLOCK_M, D, DP, WHOLE)
        sums = _lse(lse, m, q_len, WHOLE)
        s = tl.dot(k, tl.trans(queries), input_precision="ieee", out_dtype=dk.dtype)
        p = tl.exp2(s * factor - sums[None, :])
        if PARTIAL:
            seen = _seen(m[None, :], n[:, None], k_len, left, right, bits, pattern, MASK_M, MASK_N)
            p = tl.where(seen, p, 0)
        grads = _rows(grad, first, grad_m, q_len, BLOCK_M, D, DP, WHOLE)
        dv = tl.dot(p.to(grads.dtype), grads, dv, input_precision="ieee", out_dtype=dv.dtype)
        dp = tl.dot(v, tl.trans(grads), input_precision="ieee", out_dtype=dv.dtype)
        of_queries = tl.load(delta + m) if WHOLE else tl.load(delta + m, m < q_len, other=0)
        ds = (p * (dp - of_queries[None, :])).to(queries.dtype)
        dk = tl.dot(ds, queries, dk, input_precision="ieee", out_dtype=dk.dtype)
    return dk, dv


@triton.jit(do_not_specialize=[
    "starts_b", "starts_h", "tiles", "heads", "group", "q_len", "k_len", "left", "right",
])  # fmt: skip
def backward_k(
    dk, dv, delta, grad, lse, q, k, v, starts, columns, patterns, bits,
    grad_b, grad_h, grad_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, starts_b, starts_h,
    tiles, heads, group, q_len, k_len, left, right, scale: tl.float64,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """heads: of keys; each sums the gradients of the `group` heads of queries that it serves."""
    wide: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    number = tl.program_id(0)
    tile = number % tiles
    of_heads = number // tiles
    batch = (of_heads // heads).to(tl.int64)
    of_keys = (of_heads % heads).to(tl.int64)
    first = tile * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    keys = _rows(k + batch * k_b + of_keys * k_h, first, k_n, k_len, BLOCK_N, D, DP, False)
    values = _rows(v + batch * v_b + of_keys * v_h, first, v_n, k_len, BLOCK_N, D, DP, False)
    q += batch * q_b
    grad += batch * grad_b
    starts += batch * starts_b + first // MASK_N * 2
    acc_k = tl.zeros([BLOCK_N, DP], wide)
    acc_v = tl.zeros([BLOCK_N, DP], wide)
    factor = tl.full([1], scale * LOG2E, wide)
    for i in range(group):
        head = of_keys * group + i
        of_rows = (batch * heads * group + head) * q_len
        here = starts + head * starts_h
        begin, middle, end = tl.load(here), tl.load(here + 1), tl.load(here + 2)
        for partial in tl.static_range(2):
            acc_k, acc_v = _gradients_of_k(
                acc_k, acc_v, keys, values, n, q + head * q_h, grad + head * grad_h,
                lse + of_rows, delta + of_rows, columns, patterns, bits,
                middle if partial else begin, end if partial else middle,
                q_m, grad_m, q_len, k_len, factor, left, right,
                D, DP, BLOCK_M, MASK_M, MASK_N, partial, WHOLE,
            )  # fmt: skip
    acc_k *= tl.full([1], scale, wide)
    d = tl.arange(0, DP)
    at = (of_heads.to(tl.int64) * k_len + n)[:, None] * D + d[None, :]
    exists = (n < k_len)[:, None] & (d < D)[None, :]
    tl.store(dk + at, acc_k.to(dk.dtype.element_ty), exists)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), exists)
