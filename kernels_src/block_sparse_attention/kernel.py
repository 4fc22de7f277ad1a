"""Attention over the blocks of a mask, with gradients (Dao 2023, FlashAttention-2).

    s_ij = scale * <q_i, k_j>        for each key j that query i sees
    out_i = sum over j of softmax(s_i)_j v_j        0 where i sees no key
    lse_i = log of the sum over j of e^(s_ij)       -inf where i sees no key

    q        [batch, heads, q_len, d], bfloat16, float16, float32 or float64, d from 1 to 256
    k, v     [batch, key heads, k_len, d] of that dtype; heads is a multiple of key heads, and
             neighbouring heads of q share one
    starts, columns    int32, the blocks of `block_q` queries that see blocks of `block_k` keys, as
             `jitkern.kernels_src.block_mask.lists` gives them: starts is
             [batch or 1, heads or 1, 2 * blocks of queries + 1]
    key_starts, key_columns    int32, the same with queries and keys exchanged, for the gradient
    patterns, key_patterns, bits    int32: a partial block has the elements bits[pattern], of
             [patterns, block_q, block_k / 32], see `packed` there; None for all
    block_q, block_k   multiples of 32
    left, right        in a partial block, query i sees key j only if i - left <= j <= i + right; -1
             for no limit. A full block has all pairs of queries and keys that there are.
    scale    by default 1 / sqrt(d)

Returns out, dense, of the shape and dtype of q, and lse, float32 (float64 for float64), without the
last dimension. Both have gradients. Results are the same from run to run: nothing is added
atomically. What does not fit raises RuntimeError; the numbers in the lists are not checked, since
they are on the device. With p_ij = e^(s_ij - lse_i), the gradients are

    delta_i = <grad_i, out_i> - grad_lse_i
    ds_ij = p_ij * (<grad_i, v_j> - delta_i)
    dq_i = scale * sum over j of ds_ij k_j
    dk_j = scale * sum over i of ds_ij q_i         dv_j = sum over i of p_ij grad_i
"""

import math

import torch

from jitkern.declare import Triton, kernel
from jitkern.kernels_src import block_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MASK = (
    "Tensor starts, Tensor columns, Tensor key_starts, Tensor key_columns, "
    "Tensor? patterns=None, Tensor? key_patterns=None, Tensor? bits=None, "
    "int block_q=128, int block_k=128, int left=-1, int right=-1, float? scale=None"
)
CUDA = Triton("block_sparse_attention_triton.py")
# Queries and keys of a tile, warps, and stages of the pipeline, the best first: the first one that
# fits in shared memory is taken. By the bytes of an element, with the padded d up to which it holds.
FORWARD = {
    2: ((64, (128, 128, 8, 3)), (64, (128, 64, 4, 3)), (128, (128, 64, 8, 3)),
        (128, (128, 64, 8, 2)), (128, (64, 64, 4, 2)), (256, (128, 64, 8, 2)), (256, (64, 32, 4, 2))),
    4: ((64, (32, 32, 8, 1)), (128, (16, 32, 8, 1)), (256, (16, 16, 8, 1))),
    8: ((256, (16, 16, 4, 1)),),
}  # fmt: skip
BACKWARD_Q = {
    2: ((64, (128, 64, 8, 3)), (128, (128, 64, 8, 2)), (128, (64, 64, 4, 2)),
        (128, (64, 32, 4, 2)), (256, (64, 64, 8, 2)), (256, (64, 32, 4, 1))),
    4: ((128, (32, 32, 8, 1)), (256, (16, 16, 8, 1))),
    8: ((256, (16, 16, 4, 1)),),
}  # fmt: skip
BACKWARD_K = {  # as for queries, with tiles exchanged
    size: tuple((d, (n, m, warps, stages)) for d, (m, n, warps, stages) in forms)
    for size, forms in BACKWARD_Q.items()
}

block_sparse_attention = kernel(
    f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {MASK}) -> (Tensor out, Tensor lse)",
    cuda=CUDA,
    prewarm=[  # of 8B and 70B models: causal and dense, and with elements
        (f"{t}[1, {h}, 8192, 128]", *[f"{t}[1, 8, 8192, 128]"] * 2, *["i32[1, 1, 129]", "i32[4096]"] * 2, *more)
        for t in ("bf16", "f16")
        for h in (32, 64)
        for more in ((None, None, None, 128, 128, -1, 0), (), ("i32[4096]", "i32[4096]", "i32[64, 128, 4]"))
    ],
)  # fmt: skip
block_sparse_attention_backward = kernel(
    "block_sparse_attention_backward(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, "
    f"Tensor q, Tensor k, Tensor v, {MASK}, bool of_q=True, bool of_k=True) "
    "-> (Tensor? dq, Tensor? dk, Tensor? dv)",
    cuda=CUDA,
)


# ------------------------------------------------------------------ in plain PyTorch


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _scores(q, k, starts, columns, patterns, bits, block_q, block_k, left, right, scale):
    """Return the scores, [batch, heads, q_len, k_len], -inf for what is not seen."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * (_wide(q) @ _of_each_head(q, k).mT)
    sizes = block_q, block_k, left, right, q.shape[2], k.shape[2]
    return torch.where(block_mask.seen(starts, columns, patterns, bits, *sizes), s, -math.inf)


def _of_each_head(q, k):
    """Return keys or values for each head of q."""
    return _wide(k).repeat_interleave(q.shape[1] // k.shape[1], 1) if k.shape[1] else _wide(k)


def _probabilities(s, lse):
    return torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])


@block_sparse_attention.reference
def _(q, k, v, starts, columns, _s, _c, patterns, _p, bits, *sizes):
    s = _scores(q, k, starts, columns, patterns, bits, *sizes)
    lse = torch.logsumexp(s, -1)
    out = _probabilities(s, lse) @ _of_each_head(q, v)
    return out.to(q.dtype), lse


@block_sparse_attention_backward.reference
def _(
    grad, grad_lse, out, lse, q, k, v, starts, columns, _s, _c, patterns, _p, bits,
    block_q, block_k, left, right, scale, of_q, of_k,
):  # fmt: skip
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    sizes = block_q, block_k, left, right, scale
    p = _probabilities(_scores(q, k, starts, columns, patterns, bits, *sizes), lse)
    delta = (_wide(grad) * _wide(out)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    ds = scale * p * (_wide(grad) @ _of_each_head(q, v).mT - delta[..., None])

    def of_heads(x):  # sums those that share a head of keys
        return x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) if k.shape[1] else x.to(k.dtype)

    dq = (ds @ _of_each_head(q, k)).to(q.dtype) if of_q else None
    dk = of_heads(ds.mT @ _wide(q)) if of_k else None
    dv = of_heads(p.mT @ _wide(grad)) if of_k else None
    return dq, dk, dv


# ------------------------------------------------------------------ launches


def _check(name, q, k, v, starts, key_starts, columns, key_columns, patterns, key_patterns, bits, block_q, block_k):  # fmt: skip
    torch._check(
        q.dim() == 4 and k.dim() == 4 and k.shape == v.shape and 1 <= q.shape[3] <= 256
        and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3],
        lambda: (
            f"{name}: q must be [batch, heads, q_len, d] and k and v [batch, key heads, k_len, d], "
            f"with d from 1 to 256, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        ),
    )  # fmt: skip
    torch._check(
        q.dtype in DTYPES and q.dtype == k.dtype and q.dtype == v.dtype,
        lambda: (
            f"{name}: q, k and v must be of one floating-point dtype, got {q.dtype}, {k.dtype} and "
            f"{v.dtype}"
        ),
    )
    torch._check(
        k.shape[1] >= 1 and q.shape[1] % max(k.shape[1], 1) == 0,
        lambda: f"{name}: {q.shape[1]} heads of q are no multiple of {k.shape[1]} heads of k",
    )
    torch._check(
        block_q >= 32 and block_k >= 32 and block_q % 32 == 0 and block_k % 32 == 0,
        lambda: f"{name}: blocks must be multiples of 32, got {block_q} queries, {block_k} keys",
    )
    for what, x, length, block in (
        ("starts", starts, q.shape[2], block_q), ("key_starts", key_starts, k.shape[2], block_k),
    ):  # fmt: skip
        size = 2 * ((length + block - 1) // block) + 1
        torch._check(
            x.dim() == 3 and x.shape[2] == size and x.shape[0] in (1, q.shape[0])
            and x.shape[1] in (1, q.shape[1]),
            lambda: (
                f"{name}: {what} must be [{q.shape[0]} or 1, {q.shape[1]} or 1, {size}] for "
                f"{length} in blocks of {block}, got {tuple(x.shape)}: make the mask for these lengths"
            ),
        )  # fmt: skip
    for x in (starts, key_starts, columns, key_columns, patterns, key_patterns, bits):
        torch._check(
            x is None or x.dtype == torch.int32,
            lambda: f"{name}: the tensors of the mask must be int32, got {x.dtype}",
        )
    torch._check(
        (bits is None) == (patterns is None) and (bits is None) == (key_patterns is None),
        lambda: f"{name}: patterns, key_patterns and bits go together: pass all or none",
    )


def _rows(x):
    """Return a tensor whose rows the kernels can read: dense, and offsets of a tile fit 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) < 1 << 23 else x.contiguous()


def _dense(x):
    return None if x is None else x.contiguous()


def _padded(d):
    size = 16
    while size < d:
        size *= 2
    return size


def _form(k, table, q, block_q, block_k):
    """Return BLOCK_M, BLOCK_N, warps and stages: see FORWARD.

    In shared memory are the tiles that stay (one forward, two backward), those of two tensors that
    are on their way, for each stage, and what is exchanged between threads.
    """
    d, size, staying = _padded(q.shape[3]), q.element_size(), 1 if table is FORWARD else 2
    form = None
    for most, each in table[size]:
        m, n, _, stages = each
        buffers = stages if k.capability >= (9, 0) else stages - 1
        needed = (staying * max(m, n) + 2 * buffers * min(m, n)) * d * size
        needed += 4 * staying * m * n + 2048
        if form is None and d <= most and needed <= k.shared_memory_per_block:
            form = each
    wide, long, warps, stages = form or table[size][-1][1]
    m, n = _divisor(block_q, wide), _divisor(block_k, long)
    return m, n, warps if m == wide and n == long else 4, stages


def _divisor(block, size):
    """Return the largest size that divides a block: this power of two, or a smaller one."""
    while block % size != 0:
        size //= 2
    return size


def _of_batch(starts):
    """Return how far the lists of a batch, and of a head, are from the next; 0 for shared ones."""
    return (
        starts.stride(0) if starts.shape[0] > 1 else 0,
        starts.stride(1) if starts.shape[1] > 1 else 0,
    )


def _template(q, m, n, block_q, block_k, *, whole):
    d = q.shape[3]
    return {
        "D": d, "DP": _padded(d), "BLOCK_M": m, "BLOCK_N": n, "MASK_M": block_q, "MASK_N": block_k,
        "WHOLE": whole and d == _padded(d),
    }  # fmt: skip


def _strides(*tensors):
    return [x.stride(i) for x in tensors for i in range(3)]


def _limits(left, right, scale, d):
    scale = 1 / math.sqrt(d) if scale is None else scale
    return left if left >= 0 else None, right if right >= 0 else None, scale


@block_sparse_attention.launch("triton")
def _(
    kernels, q, k, v, starts, columns, key_starts, key_columns, patterns, key_patterns, bits,
    block_q, block_k, left, right, scale,
):  # fmt: skip
    _check(
        "block_sparse_attention", q, k, v, starts, key_starts, columns, key_columns, patterns,
        key_patterns, bits, block_q, block_k,
    )  # fmt: skip
    batch, heads, q_len, d = q.shape
    k_len = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    q, k, v, starts = _rows(q), _rows(k), _rows(v), starts.contiguous()
    m, n, warps, stages = _form(kernels, FORWARD, q, block_q, block_k)
    left, right, scale = _limits(left, right, scale, d)
    tiles = (q_len + m - 1) // m
    template = _template(q, m, n, block_q, block_k, whole=k_len % n == 0)
    kernels.forward[{**template, "NEGATIVE": scale < 0}](
        out, lse, q, k, v, starts, columns.contiguous(), _dense(patterns), _dense(bits),
        *_strides(q, k, v), *_of_batch(starts), tiles, heads, heads // k.shape[1], q_len, k_len,
        left, right, scale,
        grid=tiles * heads * batch, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


@block_sparse_attention_backward.launch("triton")
def _(
    kernels, grad, grad_lse, out, lse, q, k, v, starts, columns, key_starts, key_columns, patterns,
    key_patterns, bits, block_q, block_k, left, right, scale, of_q, of_k,
):  # fmt: skip
    name = "block_sparse_attention_backward"
    _check(
        name, q, k, v, starts, key_starts, columns, key_columns, patterns, key_patterns, bits,
        block_q, block_k,
    )  # fmt: skip
    torch._check(
        grad.shape == q.shape and out.shape == q.shape and grad.dtype == q.dtype
        and out.dtype == q.dtype and lse.shape == q.shape[:3]
        and (grad_lse is None or grad_lse.shape == lse.shape),
        lambda: (
            f"{name}: grad and out must be {q.dtype} of shape {tuple(q.shape)}, lse and its gradient "
            f"{tuple(q.shape[:3])}, got {grad.dtype} {tuple(grad.shape)}, {out.dtype} "
            f"{tuple(out.shape)} and {tuple(lse.shape)}"
        ),
    )  # fmt: skip
    batch, heads, q_len, d = q.shape
    key_heads, k_len = k.shape[1], k.shape[2]
    group = heads // key_heads
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if of_q else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if of_k else None
    dv = torch.empty(k.shape, dtype=k.dtype, device=k.device) if of_k else None
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=q.device)
    grad, q, k, v = _rows(grad), _rows(q), _rows(k), _rows(v)
    out, lse, starts, key_starts = (x.contiguous() for x in (out, lse, starts, key_starts))
    bits, strides = _dense(bits), _strides(grad, q, k, v)
    limits = _limits(left, right, scale, d)

    m, n, warps, stages = _form(kernels, BACKWARD_Q, q, block_q, block_k)
    tiles = (q_len + m - 1) // m
    kernels.backward_q[_template(q, m, n, block_q, block_k, whole=k_len % n == 0)](
        dq, delta, grad, _dense(grad_lse), out, lse, q, k, v,
        starts, columns.contiguous(), _dense(patterns), bits,
        *strides, *_of_batch(starts), tiles, heads, group, q_len, k_len, *limits,
        grid=tiles * heads * batch, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if of_k:
        m, n, warps, stages = _form(kernels, BACKWARD_K, q, block_q, block_k)
        tiles = (k_len + n - 1) // n
        kernels.backward_k[_template(q, m, n, block_q, block_k, whole=q_len % m == 0)](
            dk, dv, delta, grad, lse, q, k, v,
            key_starts, key_columns.contiguous(), _dense(key_patterns), bits,
            *strides, *_of_batch(key_starts), tiles, key_heads, group, q_len, k_len, *limits,
            grid=tiles * key_heads * batch, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv


# ------------------------------------------------------------------ gradient, cost, samples


@block_sparse_attention.backward
def _gradient(
    grad_out, grad_lse, out, lse, q, k, v, starts, columns, key_starts, key_columns, patterns,
    key_patterns, bits, block_q, block_k, left, right, scale, needs,
):  # fmt: skip
    gradients = block_sparse_attention_backward(
        torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, out, lse, q, k, v,
        starts, columns, key_starts, key_columns, patterns, key_patterns, bits, block_q, block_k,
        left, right, scale, needs[0], needs[1] or needs[2],
    )  # fmt: skip
    return *gradients, *[None] * 7


_gradient.takes_none = True  # lse mostly has none


def _cost(q, k, starts, columns, block_q, block_k, products, tensors):
    """Return the bytes of tensors like q and of tensors like k, and the flops of so many products."""
    blocks = columns.shape[0] * q.shape[0] * q.shape[1] // max(starts.shape[0] * starts.shape[1], 1)
    flops = 2 * products * blocks * block_q * block_k * q.shape[3]
    return tensors[0] * q.nbytes + tensors[1] * k.nbytes, flops


@block_sparse_attention.cost
def _(q, k, _v, starts, columns, _s, _c, _p=None, _kp=None, _b=None, block_q=128, block_k=128, *_):
    return _cost(q, k, starts, columns, block_q, block_k, 2, (2, 2))


@block_sparse_attention_backward.cost
def _(grad, _g, _o, _l, q, k, _v, starts, columns, _s, _c, _p=None, _kp=None, _b=None, block_q=128, block_k=128, *_):  # fmt: skip
    return _cost(q, k, starts, columns, block_q, block_k, 5, (4, 4))


def _mask(full, partial, patterns=None, *, device):
    lists = block_mask.lists(full, partial, patterns)
    numbers = None if patterns is None else patterns.mT
    by_key = block_mask.lists(full.mT, partial.mT, numbers)
    made = *lists[:2], *by_key[:2], lists[2], by_key[2]
    return tuple(None if x is None else x.to(device) for x in made)


def _calls(device):
    def qkv(dtype, heads, key_heads, q_len, k_len, d):
        q = torch.randn(2, heads, q_len, d, dtype=dtype, device=device) / 2
        k, v = torch.randn(2, 2, key_heads, k_len, d, dtype=dtype, device=device) / 2
        return q, k, v

    def banded(q_len, k_len, left, right):
        kinds = (x[None, None] for x in block_mask.band(q_len, k_len, 32, 32, left, right))
        return *_mask(*kinds, device=device), None, 32, 32, left, right

    causal, window = banded(70, 45, -1, 0), banded(45, 70, 20, 10)
    for dtype in DTYPES:
        yield *qkv(dtype, 2, 1, 70, 45, 16), *causal
        yield *(x[:0] for x in qkv(dtype, 2, 1, 70, 45, 16)), *causal
    yield *(x[:1, :, :4] for x in qkv(torch.float64, 2, 1, 4, 6, 8)), *banded(4, 4, -1, 0)
    yield *(x.transpose(1, 2) for x in qkv(torch.float32, 45, 70, 3, 3, 24)[:1]), *(
        x.transpose(1, 2) for x in qkv(torch.float32, 70, 70, 3, 3, 24)[1:]
    ), *window  # fmt: skip
    # Elements, of which some rows have none, for each batch and head, and a row without blocks.
    kinds = torch.rand(2, 2, 2, 3) < 0.5
    kinds[:, :, 1] = False
    patterns = torch.arange(24, dtype=torch.int32).view(2, 2, 2, 3)
    elements = torch.rand(24, 32, 32) < 0.1
    lists = _mask(kinds.roll(1, 3) & ~kinds, kinds, patterns, device=device)
    bits = block_mask.packed(elements).to(device)
    yield *qkv(torch.float32, 2, 2, 64, 90, 16), *lists, bits, 32, 32, -1, -1, -0.25


block_sparse_attention.samples(_calls)


@block_sparse_attention_backward.samples
def _(device):
    for q, k, v, *mask in _calls(device):
        scale = mask[11:] or [None]
        if device == "meta" or not q.numel():
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q).dtype)
        else:
            out, lse = block_sparse_attention.run_reference(q, k, v, *mask)
        grad = torch.randn(q.shape, dtype=q.dtype, device=device) / 2
        grad_lse = torch.randn(lse.shape, dtype=lse.dtype, device=device) if scale[0] else None
        yield grad, grad_lse, out, lse, q, k, v, *mask
