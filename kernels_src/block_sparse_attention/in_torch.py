"""Attention over the blocks of a mask, and its gradient, in plain PyTorch: all scores at once."""

import math

import torch

from jitkern.kernels_src import block_mask
from jitkern.kernels_src.elements import wide


def attention(q, k, v, starts, columns, patterns, bits, sizes, scale):
    """Return out and lse. sizes: block_q, block_k, left, right."""
    dtype, seen = q.dtype, _seen(q, k, starts, columns, patterns, bits, sizes)
    q, k, v = _of_queries(q, seen), _of_keys(k, q, seen), _of_keys(v, q, seen)
    s = _scores(q, k, seen, scale)
    lse = torch.logsumexp(s, -1)
    return (_probabilities(s, lse) @ v).to(dtype), lse


def gradients(grad, grad_lse, out, lse, q, k, v, starts, columns, patterns, bits, sizes, scale):
    """Return dq, dk and dv."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dtype, heads = q.dtype, (k.shape[1], q.shape[1] // k.shape[1])
    seen = _seen(q, k, starts, columns, patterns, bits, sizes)
    grad, q = _of_queries(grad, seen), _of_queries(q, seen)
    k, v = _of_keys(k, q, seen), _of_keys(v, q, seen)
    p = _probabilities(_scores(q, k, seen, scale), lse)
    delta = (grad * wide(out)).sum(-1, keepdim=True)
    delta = delta if grad_lse is None else delta - _of_queries(grad_lse[..., None], seen)
    ds = scale * p * (grad @ v.mT - delta)

    def total(x):  # of the heads of q that share a head of keys
        return x.unflatten(1, heads).sum(2).to(dtype)

    return (ds @ k).to(dtype), total(ds.mT @ q), total(p.mT @ grad)


def _seen(q, k, starts, columns, patterns, bits, sizes):
    return block_mask.seen(starts, columns, patterns, bits, *sizes, q.shape[2], k.shape[2])


def _of_queries(x, seen):
    """Return what queries have, and 0 for those that see nothing: there may be anything."""
    return torch.where(seen.any(-1, keepdim=True), wide(x), 0)


def _of_keys(x, q, seen):
    """Return what keys have for each head of q, and 0 for those that nobody sees."""
    x = wide(x).repeat_interleave(q.shape[1] // x.shape[1], 1)
    return torch.where(seen.any(-2).unsqueeze(-1), x, 0)


def _scores(q, k, seen, scale):
    """Return the scores, [batch, heads, q_len, k_len], -inf for what is not seen."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return torch.where(seen, scale * (q @ k.mT), -math.inf)


def _probabilities(s, lse):
    return torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])
