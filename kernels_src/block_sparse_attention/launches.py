"""What the launches of block-sparse attention share: checks, sizes of tiles, strides."""

import math

import torch

from jitkern.kernels_src.elements import DTYPES, blocks

# Queries and keys of a tile, warps, and stages of the pipeline, the best first: what fits in shared
# memory is taken. By the bytes of an element, each with the padded d up to which it holds.
FORWARD = (
    (2, ((64, (128, 128, 8, 3)), (64, (128, 64, 4, 3)), (128, (128, 64, 8, 3)),
         (128, (128, 64, 8, 2)), (128, (64, 64, 4, 2)),
         (256, (64, 64, 4, 2)), (256, (64, 32, 4, 2)))),
    (4, ((64, (32, 32, 8, 1)), (128, (16, 32, 8, 1)), (256, (16, 16, 8, 1)))),
    (8, ((256, (16, 16, 4, 1)),)),
)  # fmt: skip
# For the gradient of queries.
BACKWARD_Q = (
    (2, ((128, (128, 64, 8, 3)), (128, (128, 64, 8, 2)), (128, (64, 64, 4, 2)),
         (128, (64, 32, 4, 2)), (256, (64, 64, 8, 2)), (256, (32, 32, 4, 1)))),
    (4, ((128, (32, 32, 8, 1)), (256, (16, 16, 8, 1)))),
    (8, ((256, (16, 16, 4, 1)),)),
)  # fmt: skip
BACKWARD_K = tuple(  # the same, of which keys are the side that stays
    (size, tuple((d, (n, m, warps, stages)) for d, (m, n, warps, stages) in forms))
    for size, forms in BACKWARD_Q
)


def check(name, q, k, v, lists, block_q, block_k):
    """Refuse what does not fit.

    lists: starts, columns, key_starts, key_columns, patterns, key_patterns, bits.
    """
    torch._check(
        q.dim() == 4 and k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3],
        lambda: (
            f"{name}: q must be [batch, heads, q_len, d] and k [batch, key heads, k_len, d], got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        ),
    )
    torch._check(
        k.shape == v.shape and 1 <= q.shape[3] <= 256,
        lambda: (
            f"{name}: k and v must be of one shape with d from 1 to 256, got {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        ),
    )
    torch._check(
        q.dtype in DTYPES and q.dtype == k.dtype and q.dtype == v.dtype,
        lambda: (
            f"{name}: q, k and v must be of one floating-point dtype, got {q.dtype}, {k.dtype} and "
            f"{v.dtype}"
        ),
    )
    torch._check(
        k.shape[1] >= 1 and q.shape[1] % max(k.shape[1], 1) == 0,
        lambda: f"{name}: {q.shape[1]} heads of q are not a multiple of {k.shape[1]} heads of k",
    )
    torch._check(
        block_q >= 32 and block_k >= 32 and block_q % 32 == 0 and block_k % 32 == 0,
        lambda: f"{name}: blocks must be multiples of 32, got {block_q} queries, {block_k} keys",
    )
    starts, columns, key_starts, key_columns, patterns, key_patterns, bits = lists
    _check_starts(f"{name}: starts", starts, q, q.shape[2], block_q)
    _check_starts(f"{name}: key_starts", key_starts, q, k.shape[2], block_k)
    torch._check(
        all(x is None or x.dtype == torch.int32 for x in lists),
        lambda: f"{name}: the tensors of the mask must be int32",
    )
    torch._check(
        (bits is None) == (patterns is None) and (bits is None) == (key_patterns is None),
        lambda: f"{name}: patterns, key_patterns and bits go together: pass all or none",
    )
    torch._check(
        columns.dim() == 1 and key_columns.dim() == 1,
        lambda: (
            f"{name}: columns and key_columns must have 1 dimension, got {tuple(columns.shape)} "
            f"and {tuple(key_columns.shape)}"
        ),
    )
    if bits is not None:
        _check_bits(name, lists, block_q, block_k)


def _check_bits(name, lists, block_q, block_k):
    _, columns, _, key_columns, patterns, key_patterns, bits = lists

    def wrong():
        return (
            f"{name}: bits must be [patterns, {block_q}, {block_k // 32}], got "
            f"{tuple(bits.shape)}, and patterns like columns: {tuple(patterns.shape)} and "
            f"{tuple(key_patterns.shape)} for {tuple(columns.shape)} and "
            f"{tuple(key_columns.shape)}"
        )

    torch._check(
        bits.dim() == 3
        and patterns.shape == columns.shape
        and key_patterns.shape == key_columns.shape,
        wrong,
    )
    torch._check((bits.shape[1] == block_q) & (bits.shape[2] == block_k // 32), wrong)


def _check_starts(what, starts, q, length, block):
    size = 2 * blocks(length, block) + 1
    torch._check(
        starts.dim() == 3 and starts.shape[2] == size
        and starts.shape[0] in (1, q.shape[0]) and starts.shape[1] in (1, q.shape[1]),
        lambda: (
            f"{what} must be [{q.shape[0]} or 1, {q.shape[1]} or 1, {size}] for {length} in blocks "
            f"of {block}, got {tuple(starts.shape)}: make the mask for these lengths"
        ),
    )  # fmt: skip


def rows(x):
    """Return a tensor whose rows the kernels can read: dense, and offsets of a tile fit 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) < 1 << 23 else x.contiguous()


def strides(*tensors):
    """Return the distances of batches, heads and rows of each."""
    return [x.stride(i) for x in tensors for i in range(3)]


def distances(starts):
    """Return how far the lists of a batch, and of a head, are from the next; 0 for shared ones."""
    return (
        starts.stride(0) if starts.shape[0] > 1 else 0,
        starts.stride(1) if starts.shape[1] > 1 else 0,
    )


def limits(left, right, scale, d):
    """Return the limits of a band, None for no limit, and the scale."""
    scale = 1 / math.sqrt(d) if scale is None else scale
    return left if left >= 0 else None, right if right >= 0 else None, scale


def form(k, table, q, block_q, block_k):
    """Return BLOCK_M, BLOCK_N, warps and stages: see FORWARD.

    In shared memory are the tiles that stay (one forward, two backward), those of two tensors that
    are on their way, for each stage, and what threads exchange: what Triton 3.6 and 3.9 ask for at
    most, with patterns of bits.
    """
    d, size, staying = _padded(q.shape[3]), q.element_size(), 1 if table is FORWARD else 2
    best, forms = None, next(forms for each, forms in table if each == size)
    for most, each in forms:
        m, n, _, stages = each
        buffers = stages if k.capability >= (9, 0) else max(stages - 1, 1)
        needed = (staying * max(m, n) + 2 * buffers * min(m, n)) * d * size + 2048
        if k.capability >= (10, 0):
            needed += 4 * max(m, n) * d + 4 * m * n
        else:
            needed += (4 + 2 * staying) * m * n
        if best is None and d <= most and needed <= k.shared_memory_per_block:
            best = each
    most_m, most_n, warps, stages = best or forms[-1][1]
    m, n = _divisor(block_q, most_m), _divisor(block_k, most_n)
    return m, n, warps if m == most_m and n == most_n else 4, stages


def template(q, m, n, block_q, block_k, *, whole):
    """Return the constexprs of a kernel.

    whole: whether the last block of the mask, all of whose tiles are loaded, is whole.
    """
    d = q.shape[3]
    return {
        "D": d, "DP": _padded(d), "BLOCK_M": m, "BLOCK_N": n, "MASK_M": block_q, "MASK_N": block_k,
        "WHOLE": whole and d == _padded(d),
    }  # fmt: skip


def _padded(d):
    size = 16
    while size < d:
        size *= 2
    return size


def _divisor(block, size):
    """Return the largest size that divides a block: this power of two, or a smaller one."""
    while block % size != 0:
        size //= 2
    return size
