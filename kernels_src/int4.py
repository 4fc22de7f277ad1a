"""Weights of 4 bits as the kernels read them: the layout, and their values in PyTorch.

A tile is 16 rows of a weight [N, K], its numbers q from 0 to 15 packed by eight into int32 words:
[tiles, K / 64, 32, 4]. Of tile T and piece C, lane 4 * g + t has in word 2 * i + h the row
16 * T + 2 * g + h and k = 64 * C + 32 * i + 8 * t + (0, 2, 4, 6, 1, 3, 5, 7), from the lowest bits
on. So a warp reads 512 contiguous bytes and has fragments for `mma.m16n8k16`.

The values are (q - 8) * scale, (q - zero) * scale with whole zeros (uint8), or
(q - 8) * scale + zero with zeros of the dtype of the scale. Scales and zeros: [K / group, N].
"""

import torch

GROUPS = (64, 128)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC, WHOLE_ZEROS, ADDED_ZEROS = 0, 1, 2  # as in low_bit.cuh


def pack(q):
    """Return whole numbers [N, K] from 0 to 15 in the layout; rows beyond N are 8."""
    rows, columns = q.shape
    if rows % 16:
        q = torch.cat([q, q.new_full((-rows % 16, columns), 8)])
    tiles = q.shape[0] // 16
    parts = q.to(torch.int32).view(tiles, 8, 2, columns // 64, 2, 4, 8)  # tile g h piece i t k
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=q.device)
    for place, k in enumerate(ORDER):
        words |= (parts[..., k] & 15) << 4 * place
    return words.permute(0, 3, 1, 5, 4, 2).reshape(tiles, columns // 64, 32, 4)


def unpack(words, rows):
    """Return the whole numbers [rows, K] of a packed weight, as uint8."""
    tiles, pieces = words.shape[:2]
    words = words.view(tiles, pieces, 8, 4, 2, 2).permute(0, 2, 5, 1, 4, 3)  # tile g h piece i t
    places = [ORDER.index(k) for k in range(8)]
    q = torch.stack([words >> 4 * place & 15 for place in places], -1)
    return q.reshape(tiles * 16, pieces * 64)[:rows].to(torch.uint8)


def kind_of(zero):
    """Return which of the three formulas zeros stand for."""
    if zero is None:
        return SYMMETRIC
    return WHOLE_ZEROS if zero.dtype == torch.uint8 else ADDED_ZEROS


def values(words, scale, zero, dtype):
    """Return a packed weight as a matrix [N, K], computed in a dtype."""
    q = unpack(words, scale.shape[1]).to(dtype)
    group = q.shape[1] // scale.shape[0]

    def of_each(numbers):
        return numbers.to(dtype).T.repeat_interleave(group, 1)

    if kind_of(zero) == WHOLE_ZEROS:
        return (q - of_each(zero)) * of_each(scale)
    w = (q - 8) * of_each(scale)
    return w if zero is None else w + of_each(zero)
