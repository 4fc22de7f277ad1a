"""Write the keys and values of new tokens into a paged cache, as they are or as float8.

    k_cache[slots[i] // page_size, slots[i] % page_size] = k[i], and the same of v

    k, v              [tokens, heads, d], float32, float16 or bfloat16, of any strides with a dense
                      last dimension: parts of a packed qkv are read where they lie
    k_cache, v_cache  [pages, page_size, heads, d], of the dtype of k, or float8_e4m3fn. A cache
                      [pages, heads, page_size, d] is passed as its `transpose(1, 2)`.
    slots             int32 or int64 [tokens]. A slot that the cache does not have, such as -1, is
                      skipped. Slots must differ from each other.
    k_scale, v_scale  float32, one number or [heads], for float8 alone (1 by default): the cache
                      holds k / scale, bounded by 448 (the largest float8_e4m3fn), rounded to
                      nearest even; NaN stays NaN

The op has no gradient. What does not fit raises RuntimeError.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import elements

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 256

kv_cache_append = kernel(
    "kv_cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    cuda=Cuda("kv_cache_append.cu", strided=True),
    prewarm=[
        (*[f"{dtype}[8, 8, 128]"] * 2, *[f"{cache}[64, 16, 8, 128]"] * 2, "i64[8]", *scales)
        for dtype in ("bf16", "f16")
        for cache, scales in ((dtype, ()), ("f8e4m3", ("f32[1]", "f32[1]")))
    ],
)


@kv_cache_append.reference
def _(k, v, k_cache, v_cache, slots, k_scale, v_scale):
    pages, page_size = k_cache.shape[:2]
    kept = (slots >= 0) & (slots < pages * page_size)
    slots = slots[kept].to(torch.int64)
    at = slots // page_size, slots % page_size
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if cache.dtype == FLOAT8:
            y = x[kept].float() if scale is None else x[kept].float() / scale.reshape(-1, 1)
            y = y.clamp(-LARGEST, LARGEST).to(FLOAT8)
            cache.view(torch.uint8)[at] = y.view(torch.uint8)  # PyTorch does not index float8
        else:
            cache[at] = x[kept]


def _check(k, v, k_cache, v_cache, slots, k_scale, v_scale):
    torch._check(
        k.dim() == 3 and k.shape == v.shape,
        lambda: (
            "kv_cache_append: k and v must be [tokens, heads, d], got "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        ),
    )
    torch._check(
        k_cache.dim() == 4 and k_cache.shape == v_cache.shape and k_cache.shape[2:] == k.shape[1:],
        lambda: (
            "kv_cache_append: k_cache and v_cache must be [pages, page_size, "
            f"{k.shape[1]}, {k.shape[2]}], got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        ),
    )
    torch._check(
        k.dtype in DTYPES and v.dtype == k.dtype,
        lambda: (
            "kv_cache_append: k and v must be float32, float16 or bfloat16 and of one dtype, got "
            f"{k.dtype} and {v.dtype}"
        ),
    )
    torch._check(
        k_cache.dtype in (k.dtype, FLOAT8) and v_cache.dtype == k_cache.dtype,
        lambda: (
            f"kv_cache_append: k_cache and v_cache must both be {k.dtype} or float8_e4m3fn, got "
            f"{k_cache.dtype} and {v_cache.dtype}"
        ),
    )
    torch._check(
        slots.dtype in (torch.int32, torch.int64)
        and slots.dim() == 1
        and slots.shape[0] == k.shape[0],
        lambda: (
            f"kv_cache_append: slots must be int32 or int64 of shape ({k.shape[0]},), got "
            f"{slots.dtype} of shape {tuple(slots.shape)}"
        ),
    )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        torch._check(
            k_cache.dtype == FLOAT8,
            lambda name=name: f"kv_cache_append: {name} is for float8 caches, got {k_cache.dtype}",
        )
        torch._check(
            scale.dtype == torch.float32 and (scale.numel() == 1 or scale.numel() == k.shape[1]),
            lambda name=name, scale=scale: (
                f"kv_cache_append: {name} must be float32, one number or one for each of "
                f"{k.shape[1]} heads, got {scale.dtype} of shape {tuple(scale.shape)}"
            ),
        )
    for cache in (k_cache, v_cache):
        for i in range(4):
            torch._check(
                cache.shape[i] <= 1 or cache.stride(i) != 0,
                lambda: "kv_cache_append: a cache is expanded: its elements share memory",
            )
        torch._check(
            cache.stride(3) == 1 or cache.shape[3] <= 1,
            lambda: "kv_cache_append: the last dimension of the caches must be dense",
        )


def _arguments(k, v, k_cache, v_cache, slots, k_scale, v_scale):
    """Return what the kernels take: tensors, sizes, and strides in elements."""
    scales = [None if scale is None else scale.contiguous() for scale in (k_scale, v_scale)]
    steps = [0 if scale is None or scale.numel() == 1 else 1 for scale in scales]
    pages, page_size = k_cache.shape[0], k_cache.shape[1]
    return (
        k_cache, v_cache, k, v, slots.contiguous(), *scales, *steps, k.shape[0], k.shape[1],
        k.shape[2], pages * page_size, page_size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *(cache.stride(i) for cache in (k_cache, v_cache) for i in range(3)),
    )  # fmt: skip


@kv_cache_append.launch("cuda")
def _(k_, k, v, k_cache, v_cache, slots, k_scale, v_scale):
    _check(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    if k_.fake:
        return
    k, v = elements.dense_rows(k), elements.dense_rows(v)
    layouts = ((x, [x.stride(i) for i in range(x.dim() - 1)]) for x in (k, v, k_cache, v_cache))
    width = elements.width_of((k.shape[2],), *layouts)
    threads = k.numel() // width
    k_.kv_cache_append[
        {
            "T": k.dtype, "C": k_cache.dtype, "S": slots.dtype, "V": width,
            "I": elements.index_for(threads),
        }
    ](
        *_arguments(k, v, k_cache, v_cache, slots, k_scale, v_scale),
        grid=elements.blocks(threads, BLOCK), block=BLOCK,
    )  # fmt: skip


@kv_cache_append.cost
def _(k, _v, k_cache, _v_cache, slots, *_):
    return 2 * k.numel() * (k.element_size() + k_cache.element_size()) + slots.nbytes, 0


@kv_cache_append.samples
def _(device):
    """Yield calls; none with float8, which PyTorch's own checks cannot compare."""

    def caches(*shape, dtype=torch.bfloat16):
        return torch.zeros(2, *shape, dtype=dtype, device=device).unbind()

    slots = torch.tensor([17, -1, 3, 16, 40], device=device)
    for dtype in DTYPES:
        k, v = torch.randn(2, 5, 2, 64, dtype=dtype, device=device)
        yield k, v, *caches(3, 16, 2, 64, dtype=dtype), slots
        hnd = (cache.transpose(1, 2) for cache in caches(3, 2, 8, 64, dtype=dtype))
        yield k, v, *hnd, slots.to(torch.int32)
    qkv = torch.randn(5, 4, 5, dtype=torch.bfloat16, device=device)  # odd and packed
    yield qkv[:, 2:3], qkv[:, 3:], *caches(5, 7, 1, 5), slots
    yield qkv[:0, 2:3], qkv[:0, 3:], *caches(5, 7, 1, 5), slots[:0]
