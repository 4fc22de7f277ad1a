"""The lists of blocks that `block_sparse_attention` reads, and what they say, in plain PyTorch."""

from __future__ import annotations

import torch


def lists(full, partial, numbers=None):
    """Return the blocks of each row: the columns of its full blocks, and then of its partial ones.

    full, partial: bool [batch, heads, rows, columns]. numbers: int32 of that shape, the pattern of
        each partial block.

    Returns starts, int32 [batch, heads, 2 * rows + 1], columns, int32 [blocks], and patterns,
    likewise or None. Of row r, columns[starts[2 * r] : starts[2 * r + 1]] are full, and those that
    follow up to starts[2 * r + 2] are partial.
    """
    batch, heads, rows, _ = full.shape
    both = torch.stack([full, partial], 3).flatten(2, 3)
    counts = both.sum(-1, dtype=torch.int32)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(counts.shape)
    if rows:
        starts = torch.cat([ends[..., :1] - counts[..., :1], ends], -1)
    else:
        starts = ends.new_zeros(batch, heads, 1)
    b, h, r, columns = both.nonzero(as_tuple=True)
    patterns = None if numbers is None else numbers[b, h, r // 2, columns].contiguous()
    return starts, columns.to(torch.int32), patterns


def band(q_len, k_len, block_q, block_k, left, right, device="cpu"):
    """Return which blocks a band fills, and which it has a part of: two bool [rows, columns].

    Query i sees key j if i - left <= j <= i + right; -1 stands for no limit.
    """
    shape = -(-q_len // block_q), -(-k_len // block_k)
    full = torch.ones(shape, dtype=torch.bool, device=device)
    if left < 0 and right < 0:
        return full, ~full

    def ends(length, block):
        first = torch.arange(0, length, block, device=device)
        return first, (first + block).clamp(max=length) - 1

    (q_first, q_last), (k_first, k_last) = ends(q_len, block_q), ends(k_len, block_k)
    some = full.clone()
    if left >= 0:
        full &= k_first >= (q_last - left)[:, None]
        some &= k_last >= (q_first - left)[:, None]
    if right >= 0:
        full &= k_last <= (q_first + right)[:, None]
        some &= k_first <= (q_last + right)[:, None]
    return full, some & ~full


def packed(elements):
    """Return bool [patterns, block_q, block_k] as int32 [patterns, block_q, block_k / 32].

    Bit i of a word is the element of column 32 * word + i.
    """
    words = elements.unflatten(-1, (-1, 32)).to(torch.int32)
    return (words << torch.arange(32, device=words.device)).sum(-1, dtype=torch.int32)


def seen(starts, columns, patterns, bits, block_q, block_k, left, right, q_len, k_len):
    """Return which keys each query sees, bool [batch, heads, q_len, k_len]."""
    batch, heads, rows = *starts.shape[:2], starts.shape[2] // 2
    count = -(-k_len // block_k)
    entries = torch.arange(columns.shape[0], dtype=starts.dtype, device=columns.device)
    row = torch.searchsorted(starts[..., 1:].reshape(-1).contiguous(), entries, right=True)
    place = row // 2 * count + columns
    kinds = torch.zeros(2, batch * heads * rows * count, dtype=torch.bool, device=columns.device)
    kinds[row % 2, place] = True

    def elements(blocks):
        blocks = blocks.view(batch, heads, rows, count)
        wide = blocks.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)
        return wide[..., :q_len, :k_len]

    full, partial = map(elements, kinds)
    i = torch.arange(q_len, device=columns.device)[:, None]
    j = torch.arange(k_len, device=columns.device)
    if left >= 0:
        partial = partial & (i - j <= left)
    if right >= 0:
        partial = partial & (j - i <= right)
    if bits is not None and bits.shape[0]:
        numbers = torch.zeros(kinds.shape[1], dtype=torch.int64, device=columns.device)
        numbers[place] = patterns.to(torch.int64)
        number = elements(numbers).to(torch.int64)
        words = bits[number, i % block_q, j % block_k // 32]
        partial = partial & (words >> j % 32 & 1).to(torch.bool)
    return full | partial
