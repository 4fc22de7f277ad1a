"""Attention of a few new tokens of each sequence over keys and values in pages, without a gradient.

New token i of a sequence of n tokens is at position p = n - q_len + i, and sees the tokens up to p,
of which a window keeps the last:

    s_t = scale * <q, k_t>                     max(0, p + 1 - window) <= t <= p
    s_t = softcap * tanh(s_t / softcap)        if softcap > 0
    s_t = s_t + slope * (t - p)                with alibi_slopes
    out = sum of softmax(s)_t v_t              0 where nothing is seen
    lse = log of the sum of e^(s_t)            -inf where nothing is seen

    q                 [batch, q_heads, d], or [batch, q_len, q_heads, d] with q_len up to 8;
                      d is 64, 128 or 256; bfloat16, float16 or float32
    k_cache, v_cache  [pages, page_size, kv_heads, d], of the dtype of q or float8_e4m3fn, with the
                      same strides; [pages, kv_heads, page_size, d] is passed as `transpose(1, 2)`.
                      The page size is a multiple of 16, q_heads a multiple of kv_heads.
    block_table       int32 [batch, columns]: column i is the page of the tokens from i * page_size
                      on. Only columns of tokens that are seen are used, and only these are read.
                      They must be pages of the caches: others give NaN on the CPU, and are not
                      checked on a GPU.
    seq_lens          int32 [batch], tokens of each sequence, the new ones included. Where it is
                      below q_len, the first new tokens are none, and see nothing.
    scale             by default 1 / sqrt(d)
    window            tokens that one sees, itself included; 0 for all
    alibi_slopes      float32 [q_heads]
    k_scale, v_scale  float32, one number or [kv_heads], for float8: what `kv_cache_append` got

Returns out, dense, of the shape and dtype of q, and lse, float32, without the last dimension. What
does not fit raises RuntimeError. Lengths are not read on the host. The work is shared out by shapes
alone (Dao et al. 2023, Flash-Decoding), so results are the same from run to run on a model of GPU.
"""

import math

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import elements

FLOAT8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_SIZES = (64, 128, 256)
TILE = 16  # tokens
MOST_SPLITS = 128  # MERGE_THREADS of paged_decode.cu
SCALED = (None, 0.0, 0, None, "f32[1]", "f32[1]")  # the rest of a call whose cache is float8

paged_decode = kernel(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "float? scale=None, float softcap=0.0, int window=0, Tensor? alibi_slopes=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor out, Tensor lse)",
    cuda=Cuda("paged_decode.cu", strided=True),
    prewarm=[  # of 8B and 70B models, whose heads are in groups of 4 and 8
        (
            f"{dtype}[8, {heads}, 128]",
            *[f"{cache}[64, 16, 8, 128]"] * 2,
            "i32[8, 64]",
            "i32[8]",
            *rest,
        )
        for dtype in ("bf16", "f16")
        for cache, rest in ((dtype, ()), ("f8e4m3", SCALED))
        for heads in (32, 64)
    ],
)


# ------------------------------------------------------------------ in plain PyTorch


@paged_decode.reference
def _(q, k_cache, v_cache, table, seq_lens, scale, softcap, window, slopes, k_scale, v_scale):
    wide = elements.wide_dtype(q.dtype)
    x = (q if q.dim() == 4 else q.unsqueeze(1)).to(wide)
    batch, q_len, heads, d = x.shape
    pages, page_size, kv_heads = k_cache.shape[:3]
    group, length = heads // kv_heads, table.shape[1] * page_size
    scale = 1 / math.sqrt(d) if scale is None else scale
    position = seq_lens.clamp(max=length)[:, None] - q_len + torch.arange(q_len, device=q.device)
    at = torch.arange(length, device=q.device)
    seen = at <= position[..., None]  # [batch, q_len, length]
    if window > 0:
        seen = seen & (at > position[..., None] - window)
    some = seen.any(1)[..., None, None]  # there may be anything in other tokens
    known = ((table >= 0) & (table < pages)).repeat_interleave(page_size, 1)[..., None, None]

    def gathered(cache, by):
        bits = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache  # not to be indexed
        bits = bits if pages else bits.new_zeros(1, *bits.shape[1:])
        rows = bits[table.to(torch.int64).clamp(0, max(pages - 1, 0))].flatten(1, 2)
        rows = torch.where(known, rows.view(cache.dtype).to(wide), torch.nan)
        rows = torch.where(some, rows, 0)
        return rows if by is None else rows * by.to(wide).reshape(-1, 1)

    keys, values = gathered(k_cache, k_scale), gathered(v_cache, v_scale)
    grouped = x.view(batch, q_len, kv_heads, group, d)
    s = torch.einsum("bikgd,btkd->bikgt", grouped, keys) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        distance = (at - position[..., None]).to(wide)[:, :, None, None]
        s = s + slopes.to(wide).view(kv_heads, group, 1) * distance
    s = torch.where(seen[:, :, None, None], s, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])
    out = torch.einsum("bikgt,btkd->bikgd", p, values)
    lse = lse if wide == torch.float64 else lse.to(torch.float32)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:-1])


# ------------------------------------------------------------------ launches


def _check(q, k_cache, v_cache, table, seq_lens, window, slopes, k_scale, v_scale):
    def wrong_q():
        return (
            "paged_decode: q must be [batch, q_heads, d] or [batch, q_len up to 8, q_heads, d] "
            f"with d of {HEAD_SIZES}, got {tuple(q.shape)}"
        )

    torch._check(q.dim() in (3, 4), wrong_q)
    d = q.shape[-1]
    torch._check((d == 64) | (d == 128) | (d == 256), wrong_q)
    torch._check(q.dim() == 3 or 1 <= q.shape[1] <= 8, wrong_q)
    torch._check(
        k_cache.dim() == 4
        and k_cache.shape == v_cache.shape
        and k_cache.shape[3] == q.shape[-1]
        and k_cache.shape[1] > 0
        and k_cache.shape[1] % TILE == 0,
        lambda: (
            f"paged_decode: k_cache and v_cache must be [pages, a multiple of {TILE}, kv_heads, "
            f"{q.shape[-1]}], got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        ),
    )
    torch._check(
        k_cache.shape[2] > 0 and q.shape[-2] % k_cache.shape[2] == 0,
        lambda: (
            f"paged_decode: {q.shape[-2]} heads of q are not a multiple of {k_cache.shape[2]} of "
            "the caches"
        ),
    )
    torch._check(
        q.dtype in DTYPES and k_cache.dtype in (q.dtype, FLOAT8) and v_cache.dtype == k_cache.dtype,
        lambda: (
            "paged_decode: q must be float32, float16 or bfloat16, and k_cache and v_cache both "
            f"of that dtype or float8_e4m3fn, got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        ),
    )
    for i in range(4):
        torch._check(
            k_cache.stride(i) == v_cache.stride(i) and k_cache.stride(3) == 1,
            lambda: (
                "paged_decode: k_cache and v_cache must have the same strides and a dense last "
                f"dimension, got {k_cache.stride()} and {v_cache.stride()}"
            ),
        )
    torch._check(
        table.dtype == torch.int32
        and seq_lens.dtype == torch.int32
        and table.dim() == 2
        and table.shape[0] == q.shape[0]
        and seq_lens.dim() == 1
        and seq_lens.shape[0] == q.shape[0],
        lambda: (
            f"paged_decode: block_table and seq_lens must be int32 of the shapes ({q.shape[0]}, "
            f"columns) and ({q.shape[0]},), got {table.dtype} of shape {tuple(table.shape)} and "
            f"{seq_lens.dtype} of shape {tuple(seq_lens.shape)}"
        ),
    )
    torch._check(
        window >= 0, lambda: f"paged_decode: window must be at least 0 (0: all), got {window}"
    )
    if slopes is not None:
        torch._check(
            slopes.dtype == torch.float32 and slopes.dim() == 1 and slopes.shape[0] == q.shape[-2],
            lambda: (
                f"paged_decode: alibi_slopes must be float32 of shape ({q.shape[-2]},), got "
                f"{slopes.dtype} of shape {tuple(slopes.shape)}"
            ),
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            torch._check(
                k_cache.dtype == FLOAT8
                and scale.dtype == torch.float32
                and (scale.numel() == 1 or scale.numel() == k_cache.shape[2]),
                lambda name=name, scale=scale: (
                    f"paged_decode: {name} is for float8 caches, and float32, one number or one "
                    f"for each of {k_cache.shape[2]} heads, got {scale.dtype} of shape "
                    f"{tuple(scale.shape)} for {k_cache.dtype}"
                ),
            )


def _results(q):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _arguments(q, k_cache, v_cache, table, seq_lens, scale, softcap, window, slopes, k_by, v_by):
    """Return what all kernels take behind the results: tensors, sizes, and strides in elements."""
    scales = [None if by is None else by.contiguous() for by in (k_by, v_by)]
    steps = [0 if by is None or by.numel() == 1 else 1 for by in scales]
    if slopes is not None:
        slopes = slopes.contiguous()
    if table.stride(1) != 1:
        table = table.contiguous()
    kv_heads, q_len = k_cache.shape[2], q.shape[1] if q.dim() == 4 else 1
    return (
        q, k_cache, v_cache, table, seq_lens.contiguous(), slopes, *scales, *steps, kv_heads,
        q.shape[-2] // kv_heads, q_len, table.shape[1], k_cache.shape[1], table.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        q.stride(0), q.stride(1) if q.dim() == 4 else 0, q.stride(-2),
        1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, window,
    )  # fmt: skip


def _in_vectors(x):
    """Whether the rows of a tensor begin at multiples of 16 bytes."""
    fits = x.data_ptr() % 16 == 0
    for i in range(x.dim() - 1):
        fits = fits and x.stride(i) * x.element_size() % 16 == 0
    return fits and x.stride(-1) == 1


@paged_decode.launch("cuda")
def _(
    k, q, k_cache, v_cache, table, seq_lens, scale, softcap, window, slopes, k_scale, v_scale
):  # fmt: skip
    _check(q, k_cache, v_cache, table, seq_lens, window, slopes, k_scale, v_scale)
    out, lse = _results(q)
    if k.fake:
        return out, lse
    options = scale, softcap, window, slopes, k_scale, v_scale
    d, kv_heads = q.shape[-1], k_cache.shape[2]
    if q.dtype == torch.float32:
        q = elements.dense_rows(q)
        k.paged_decode_of_floats[{"C": k_cache.dtype, "D": d}](
            out, lse, *_arguments(q, k_cache, v_cache, table, seq_lens, *options), lse.numel(),
            grid=elements.blocks(lse.numel(), 4), block=128,
        )  # fmt: skip
        return out, lse
    torch._check(
        _in_vectors(k_cache) and _in_vectors(v_cache),
        lambda: "paged_decode: heads of k_cache and v_cache must begin at multiples of 16 bytes",
    )
    torch._check(q.shape[0] < 65536, lambda: f"paged_decode: {q.shape[0]} sequences are too many")
    if not _in_vectors(q):  # contiguous() would keep one that begins elsewhere
        q = q.clone(memory_format=torch.contiguous_format)
    batch, rows = q.shape[0], q.shape[-2] // kv_heads * (q.shape[1] if q.dim() == 4 else 1)
    eights = 1 if rows <= 8 else 2 if rows <= 16 or d == 256 else 4
    chunks = elements.blocks(rows, 8 * eights)
    tile = 2 * TILE * d * k_cache.element_size()
    stages = max(2, min(8, 24576 // tile))  # 24 KB of a warp are on their way
    of_q = 0 if eights * d < 512 else 8 * eights * d * q.element_size()  # see paged_decode.cu
    warps = 4 if 4 * stages * tile + of_q + 2048 <= k.shared_memory_per_block else 2
    smem = max(warps * stages * tile + of_q, warps * 8 * eights * (d + 4) * 4)
    blocks = max(1, min(2, k.shared_memory_per_multiprocessor // (smem + 2048)))
    # One wave of blocks, each with at least a tile for each warp.
    splits = blocks * k.multiprocessors // max(1, batch * kv_heads * chunks)
    longest = table.shape[1] * (k_cache.shape[1] // TILE)
    splits = max(1, min(splits, longest // warps, MOST_SPLITS))
    part = part_lse = None
    if splits > 1:
        part = torch.empty(lse.numel() * splits * d, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(lse.numel() * splits, dtype=torch.float32, device=q.device)
    types, pdl = {"T": q.dtype, "C": k_cache.dtype, "D": d}, k.capability >= (9, 0)
    k.paged_decode[{**types, "NT": eights, "WARPS": warps, "STAGES": stages}](
        out, lse, part, part_lse,
        *_arguments(q, k_cache, v_cache, table, seq_lens, *options), k_cache.shape[0],
        grid=(kv_heads * chunks, splits, batch), block=32 * warps, smem=smem, pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        k.paged_decode_merge[{"T": q.dtype, "D": d}](
            out, lse, part, part_lse, splits,
            grid=lse.numel(), block=128, pdl=pdl,
        )  # fmt: skip
    return out, lse


@paged_decode.cost
def _(q, k_cache, _v_cache, table, _seq_lens, _scale=None, _softcap=0.0, window=0, *_):
    """Count all tokens that the table has room for, or the window: lengths are on the device."""
    longest = table.shape[1] * k_cache.shape[1]
    tokens = q.shape[0] * (min(longest, window) if window else longest)
    read = 2 * tokens * k_cache.shape[2] * q.shape[-1] * k_cache.element_size()
    return read + 2 * q.nbytes + 4 * q.shape[:-1].numel(), 4 * q.shape[1:].numel() * tokens


@paged_decode.samples
def _(device):
    def cache(pages, heads, d, dtype):
        return torch.randn(2, pages, 16, heads, d, dtype=dtype, device=device).unbind()

    table = torch.tensor([[3, 1, 0], [2, 4, 4]], dtype=torch.int32, device=device)
    lens = torch.tensor([40, 17], dtype=torch.int32, device=device)
    for dtype in DTYPES:
        q = torch.randn(2, 4, 64, dtype=dtype, device=device)
        yield q, *cache(5, 2, 64, dtype), table, lens
        yield q[:0], *cache(5, 2, 64, dtype), table[:0], lens[:0]
    # Guesses of a packed qkv, with everything that changes scores.
    qkv = torch.randn(2, 3, 8, 64, device=device)
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.125], device=device)
    yield qkv[:, :, :4], *cache(5, 2, 64, torch.float32), table, lens, 0.1, 20.0, 30, slopes
