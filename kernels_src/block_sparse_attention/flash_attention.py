"""Attention with gradients: over the blocks of a mask, or dense."""

from __future__ import annotations

import torch

from jitkern import ops
from jitkern.calls import autocast
from jitkern.kernels_src.block_sparse_attention.mask import BlockSparseMask


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockSparseMask | None = None, *,
    causal: bool = False, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return softmax(scale * q k^T) v of the keys that each query sees, and 0 where it sees none.

    q: [batch, heads, q_len, d], bfloat16, float16 or float32 (float64 for tests).
    k, v: [batch, key heads, k_len, d] of that dtype; heads is a multiple of key heads.
    mask: which keys a query sees; d is up to 256 then. Time and memory follow the blocks of the
        mask, see `jitkern.ops.block_sparse_attention`; on the CPU the reference answers, which
        computes all scores. Without a mask PyTorch's `scaled_dot_product_attention` answers.
    causal: without a mask, query i sees the keys up to i. A mask has this from its constructor.
    scale: by default 1 / sqrt(d).

    Returns a tensor like q; under autocast all are of its dtype. Raises ValueError for a mask of
    other lengths or on another device, and RuntimeError for tensors that do not fit.
    """
    if mask is None:
        grouped = q.dim() == 4 and k.dim() == 4 and q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if not isinstance(mask, BlockSparseMask):
        raise TypeError(
            f"flash_attention: mask must be a BlockSparseMask, got {type(mask).__name__}: make one "
            "by BlockSparseMask.from_flex or from_dense, once for all calls"
        )
    if causal:
        raise ValueError(
            "flash_attention: causal=True is for calls without a mask: give it to "
            "BlockSparseMask.from_blocks, or use BlockSparseMask.causal"
        )
    lengths, device = (mask.q_len, mask.k_len), mask.starts.device
    if lengths != (q.shape[-2], k.shape[-2]) or device != q.device:
        raise ValueError(
            f"flash_attention: the mask is for {lengths[0]} queries and {lengths[1]} keys on "
            f"{device}, and q and k have {q.shape[-2]} and {k.shape[-2]} on {q.device}"
        )
    q, k, v = autocast.cast(q, k, v)
    out: torch.Tensor = ops.block_sparse_attention(q, k, v, *mask.arguments, scale)[0]
    return out
