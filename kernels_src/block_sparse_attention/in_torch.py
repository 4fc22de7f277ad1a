"""Attention over the blocks of a mask, and its gradient, in plain PyTorch: all scores at once."""

import math

import torch

from jitkern.kernels_src import block_mask


def wide(x):
    """Return a tensor in the dtype that sums are computed in."""
    return x if x.dtype == torch.float64 else x.float()


def attention(q, k, v, starts, columns, patterns, bits, sizes, scale):
    """Return out and lse. sizes: block_q, block_k, left, right."""
    s = _scores(q, k, starts, columns, patterns, bits, sizes, scale)
    lse = torch.logsumexp(s, -1)
    return (_probabilities(s, lse) @ _of_each_head(q, v)).to(q.dtype), lse


def gradients(grad, grad_lse, out, lse, q, k, v, starts, columns, patterns, bits, sizes, scale):
    """Return dq, dk and dv."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    p = _probabilities(_scores(q, k, starts, columns, patterns, bits, sizes, scale), lse)
    delta = (wide(grad) * wide(out)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    ds = scale * p * (wide(grad) @ _of_each_head(q, v).mT - delta[..., None])
    heads = k.shape[1], q.shape[1] // k.shape[1]

    def total(x):  # of the heads of q that share a head of keys
        return x.unflatten(1, heads).sum(2).to(k.dtype)

    dq = (ds @ _of_each_head(q, k)).to(q.dtype)
    return dq, total(ds.mT @ wide(q)), total(p.mT @ wide(grad))


def _scores(q, k, starts, columns, patterns, bits, sizes, scale):
    """Return the scores, [batch, heads, q_len, k_len], -inf for what is not seen."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * (wide(q) @ _of_each_head(q, k).mT)
    seen = block_mask.seen(starts, columns, patterns, bits, *sizes, q.shape[2], k.shape[2])
    return torch.where(seen, s, -math.inf)


def _of_each_head(q, k):
    """Return keys or values for each head of q."""
    return wide(k).repeat_interleave(q.shape[1] // k.shape[1], 1)


def _probabilities(s, lse):
    return torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])
