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

import torch

from jitkern.declare import Triton, kernel
from jitkern.kernels_src import block_mask
from jitkern.kernels_src.block_sparse_attention import in_torch, launches
from jitkern.kernels_src.elements import DTYPES, blocks, dense, wide_dtype

MASK = (
    "Tensor starts, Tensor columns, Tensor key_starts, Tensor key_columns, "
    "Tensor? patterns=None, Tensor? key_patterns=None, Tensor? bits=None, "
    "int block_q=128, int block_k=128, int left=-1, int right=-1, float? scale=None"
)
CUDA = Triton("block_sparse_attention_triton.py", strided=True)
LISTS = ("i32[1, 1, 65]", "i32[528]") * 2
CAUSAL = (*LISTS, None, None, None, 128, 128, -1, 0)
ELEMENTS = (*LISTS, "i32[528]", "i32[528]", "i32[64, 128, 4]")
PREWARM = [  # of 8B models
    (f"{dtype}[1, 32, 4096, 128]", *[f"{dtype}[1, 8, 4096, 128]"] * 2, *mask)
    for dtype, mask in (("bf16", CAUSAL), ("f16", CAUSAL), ("bf16", LISTS), ("bf16", ELEMENTS))
]

block_sparse_attention = kernel(
    f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {MASK}) -> (Tensor out, Tensor lse)",
    cuda=CUDA,
    prewarm=PREWARM,
)
block_sparse_attention_backward = kernel(
    "block_sparse_attention_backward(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, "
    f"Tensor q, Tensor k, Tensor v, {MASK}, bool needs_q=True, bool needs_k=True) "
    "-> (Tensor? dq, Tensor? dk, Tensor? dv)",
    cuda=CUDA,
    prewarm=[(call[0], None, call[0], "f32[1, 32, 4096]", *call) for call in PREWARM],
)


@block_sparse_attention.reference
def _(
    q, k, v, starts, columns, key_starts, key_columns, patterns, key_patterns, bits,
    block_q, block_k, left, right, scale,
):  # fmt: skip
    lists = starts, columns, key_starts, key_columns, patterns, key_patterns, bits
    launches.check("block_sparse_attention", q, k, v, lists, block_q, block_k)
    sizes = block_q, block_k, left, right
    return in_torch.attention(q, k, v, starts, columns, patterns, bits, sizes, scale)


@block_sparse_attention_backward.reference
def _(
    grad, grad_lse, out, lse, q, k, v, starts, columns, _s, _c, patterns, _p, bits,
    block_q, block_k, left, right, scale, needs_q, needs_k,
):  # fmt: skip
    sizes = block_q, block_k, left, right
    dq, dk, dv = in_torch.gradients(
        grad, grad_lse, out, lse, q, k, v, starts, columns, patterns, bits, sizes, scale
    )
    return dq if needs_q else None, dk if needs_k else None, dv if needs_k else None


@block_sparse_attention.launch("triton")
def _(
    kernels, q, k, v, starts, columns, key_starts, key_columns, patterns, key_patterns, bits,
    block_q, block_k, left, right, scale,
):  # fmt: skip
    lists = starts, columns, key_starts, key_columns, patterns, key_patterns, bits
    launches.check("block_sparse_attention", q, k, v, lists, block_q, block_k)
    batch, heads, q_len, d = q.shape
    k_len = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=wide_dtype(q.dtype), device=q.device)
    if kernels.fake:
        return out, lse
    q, k, v, starts = launches.rows(q), launches.rows(k), launches.rows(v), starts.contiguous()
    left, right, scale = launches.limits(left, right, scale, d)
    m, n, warps, stages = launches.form(kernels, launches.FORWARD, q, block_q, block_k)
    tiles = blocks(q_len, m)
    template = launches.template(q, m, n, block_q, block_k, whole=k_len % block_k == 0)
    kernels.forward[{**template, "NEGATIVE": scale < 0}](
        out, lse, q, k, v,
        starts, columns.contiguous(), dense(patterns), dense(bits),
        *launches.strides(q, k, v), *launches.distances(starts),
        tiles, heads, heads // k.shape[1], q_len, k_len, left, right, scale,
        grid=tiles * heads * batch, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


@block_sparse_attention_backward.launch("triton")
def _(
    kernels, grad, grad_lse, out, lse, q, k, v, starts, columns, key_starts, key_columns, patterns,
    key_patterns, bits, block_q, block_k, left, right, scale, needs_q, needs_k,
):  # fmt: skip
    name = "block_sparse_attention_backward"
    lists = starts, columns, key_starts, key_columns, patterns, key_patterns, bits
    launches.check(name, q, k, v, lists, block_q, block_k)
    torch._check(
        grad.shape == q.shape and out.shape == q.shape and grad.dtype == q.dtype
        and out.dtype == q.dtype and lse.shape == q.shape[:3]
        and (grad_lse is None or grad_lse.shape == lse.shape),
        lambda: (
            f"{name}: grad and out must be like q, {q.dtype} {tuple(q.shape)}, and lse and its "
            f"gradient {tuple(q.shape[:3])}; got {grad.dtype} {tuple(grad.shape)}, {out.dtype} "
            f"{tuple(out.shape)} and {tuple(lse.shape)}"
        ),
    )  # fmt: skip
    batch, heads, q_len, d = q.shape
    key_heads, k_len = k.shape[1], k.shape[2]
    group = heads // key_heads
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if needs_q else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if needs_k else None
    dv = torch.empty(k.shape, dtype=k.dtype, device=k.device) if needs_k else None
    if kernels.fake:
        return dq, dk, dv
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=q.device)
    grad, q, k, v = (launches.rows(x) for x in (grad, q, k, v))
    out, lse, starts, key_starts = (x.contiguous() for x in (out, lse, starts, key_starts))
    bits, strides = dense(bits), launches.strides(grad, q, k, v)
    rest = q_len, k_len, *launches.limits(left, right, scale, d)

    m, n, warps, stages = launches.form(kernels, launches.BACKWARD_Q, q, block_q, block_k)
    tiles = blocks(q_len, m)
    template = launches.template(q, m, n, block_q, block_k, whole=k_len % block_k == 0)
    kernels.backward_q[template](
        dq, delta, grad, dense(grad_lse), out, lse, q, k, v,
        starts, columns.contiguous(), dense(patterns), bits,
        *strides, *launches.distances(starts), tiles, heads, group, *rest,
        grid=tiles * heads * batch, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if needs_k:
        m, n, warps, stages = launches.form(kernels, launches.BACKWARD_K, q, block_q, block_k)
        tiles = blocks(k_len, n)
        template = launches.template(q, m, n, block_q, block_k, whole=q_len % block_q == 0)
        kernels.backward_k[template](
            dk, dv, delta, grad, lse, q, k, v,
            key_starts, key_columns.contiguous(), dense(key_patterns), bits,
            *strides, *launches.distances(key_starts), tiles, key_heads, group, *rest,
            grid=tiles * key_heads * batch, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv


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


_gradient.takes_none = True  # mostly nothing depends on lse


def _flops(q, starts, columns, block_q, block_k, products):
    """Return the flops of so many products of matrices of all blocks."""
    shared = max(starts.shape[0] * starts.shape[1], 1)
    blocks = columns.shape[0] * q.shape[0] * q.shape[1] // shared
    return 2 * products * blocks * block_q * block_k * q.shape[3]


@block_sparse_attention.cost
def _(q, k, _v, starts, columns, *rest):
    sizes = rest[5:7] if len(rest) > 6 else (128, 128)
    return 2 * q.nbytes + 2 * k.nbytes, _flops(q, starts, columns, *sizes, 2)


@block_sparse_attention_backward.cost
def _(_grad, _grad_lse, _out, _lse, q, k, _v, starts, columns, *rest):
    sizes = rest[5:7] if len(rest) > 6 else (128, 128)
    return 4 * q.nbytes + 4 * k.nbytes, _flops(q, starts, columns, *sizes, 5)


def _mask(full, partial, patterns=None, *, device):
    lists = block_mask.lists(full, partial, patterns)
    numbers = None if patterns is None else patterns.mT
    by_key = block_mask.lists(full.mT, partial.mT, numbers)
    made = *lists[:2], *by_key[:2], lists[2], by_key[2]
    return tuple(None if x is None else x.to(device) for x in made)


def _random(shape, dtype, device):
    """Return small numbers, so that scores differ little."""
    return torch.randn(shape, dtype=dtype, device=device) / 2


def _calls(device):
    def qkv(dtype, heads, key_heads, q_len, k_len, d):
        q = _random((2, heads, q_len, d), dtype, device)
        return q, *_random((2, 2, key_heads, k_len, d), dtype, device)

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
            out = torch.empty(q.shape, dtype=q.dtype, device=device)
            lse = torch.empty(q.shape[:3], dtype=wide_dtype(q.dtype), device=device)
        else:
            out, lse = block_sparse_attention.run_reference(q, k, v, *mask)
        grad = _random(q.shape, q.dtype, device)
        grad_lse = torch.randn(lse.shape, dtype=lse.dtype, device=device) if scale[0] else None
        yield grad, grad_lse, out, lse, q, k, v, *mask
