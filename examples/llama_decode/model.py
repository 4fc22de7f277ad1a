"""A small Llama that generates text, in plain PyTorch, and `use_jitkern`, which changes its parts.

In plain PyTorch keys and values lie in one tensor for each layer, long enough for every sequence,
and attention reads all of it under a mask. `use_jitkern` puts a `PagedCache` in their place, and
jitkern's ops in the place of norms, rotary embedding, attention and activation.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import jitkern
import jitkern.ops


class Where(NamedTuple):
    """The places of the new tokens of a step, which all layers share.

    positions: [seq] if they are the same for all sequences, else [batch, seq]; int64, with a
    PagedCache int32, too.
    rotation, mask: for plain PyTorch, cosines and sines [seq, 1, d], and bool [seq, length].
    slots: int64 [batch * seq], for a PagedCache.
    """

    positions: Tensor
    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    slots: Tensor | None = None


class AddRMSNorm(nn.Module):
    """The sum of x and a residual, and its norm; the norm of x where there is no residual yet."""

    def __init__(self, width: int, eps: float = 1e-6, **kind) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, **kind)), eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return functional.rms_norm(total, self.weight.shape, self.weight, self.eps), total


class SiluAndMul(nn.Module):
    """silu(gate) * up, of both in one tensor, [.., 2 * hidden]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


class Attend(nn.Module):
    """Rotary embedding, and attention of new tokens over a cache of a fixed length."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int, kv_heads: int, length: int, d: int, **kind) -> None:
        super().__init__()
        for name in ("keys", "values"):
            empty = torch.zeros(batch, kv_heads, length, d, **kind)
            self.register_buffer(name, empty, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        q, k = (self._turned(x, *where.rotation) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self.keys.index_copy_(2, where.positions, k)
        self.values.index_copy_(2, where.positions, v)
        # As gpt-fast does: few of PyTorch's kernels take a mask and groups of heads at once.
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (self.keys, self.values))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=where.mask)
        return y.transpose(1, 2)

    @staticmethod
    def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin


class PagedAttend(nn.Module):
    """The same by jitkern's ops, over a layer of a PagedCache. A prompt begins its sequence."""

    def __init__(self, cache: jitkern.ops.PagedCache, layer: int, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.cache, self.layer, self.tables = cache, layer, (cos, sin)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        q, k = jitkern.ops.rope(q, k, *self.tables, where.positions)
        keys, values = self.cache.keys(self.layer), self.cache.values(self.layer)
        jitkern.ops.kv_cache_append(k.flatten(0, 1), v.flatten(0, 1), keys, values, where.slots)
        if q.shape[1] > 1:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2)
        table, lengths = self.cache.block_table, self.cache.seq_lens
        return jitkern.ops.paged_decode(q, keys, values, table, lengths)[0]


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, **kind) -> None:
        super().__init__()
        self.d, self.parts = width // heads, (heads, kv_heads, kv_heads)
        self.attention_norm = AddRMSNorm(width, **kind)
        self.qkv = nn.Linear(width, sum(self.parts) * self.d, bias=False, **kind)
        self.attend: nn.Module = nn.Identity()  # until the model has a cache
        self.out = nn.Linear(width, width, bias=False, **kind)
        self.mlp_norm = AddRMSNorm(width, **kind)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False, **kind)
        self.activation = SiluAndMul()
        self.down = nn.Linear(hidden, width, bias=False, **kind)

    def forward(
        self, x: Tensor, residual: Tensor | None, where: Where
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = self.attention_norm(x, residual)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.d)).split(self.parts, dim=2)
        x = self.out(self.attend(q, k, v, where).flatten(2))
        x, residual = self.mlp_norm(x, residual)
        return self.down(self.activation(self.gate_up(x))), residual


class Llama(nn.Module):
    """Embedding, blocks, a norm, logits.

    length: tokens of the longest sequence. kind: device and dtype. The weights are random, of the
    seed of the process.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, kv_heads: int, hidden: int,
        length: int, base: float = 500000.0, **kind,
    ) -> None:  # fmt: skip
        super().__init__()
        self.length, self.kind = length, kind
        self.embedding = nn.Embedding(vocabulary, width, **kind)
        self.blocks = nn.ModuleList(
            Block(width, heads, kv_heads, hidden, **kind) for _ in range(layers)
        )
        self.norm = AddRMSNorm(width, **kind)
        self.logits = nn.Linear(width, vocabulary, bias=False, **kind)
        half = torch.arange(0, width // heads, 2, device=kind["device"]) / (width // heads)
        angles = torch.arange(length, device=kind["device"]).unsqueeze(1) * base**-half
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def make_cache(self, batch: int) -> None:
        """Give each layer a cache in plain PyTorch, for so many sequences."""
        for block in self.blocks:
            block.attend = Attend(batch, block.parts[1], self.length, block.d, **self.kind)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return the logits of the last of the new tokens, [batch, vocabulary].

        tokens: int64 [batch, seq]. positions, slots: see `Where`.
        """
        where = Where(positions, slots=slots) if slots is not None else self._where(positions)
        x, residual = self.embedding(tokens), None
        for block in self.blocks:
            x, residual = block(x, residual, where)
        return self.logits(self.norm(x[:, -1], residual[:, -1])[0])

    def _where(self, positions: Tensor) -> Where:
        rotation = tuple(
            torch.cat([table[positions]] * 2, -1).unsqueeze(1).to(self.kind["dtype"])
            for table in (self.cos, self.sin)
        )
        at = torch.arange(self.length, device=positions.device)
        return Where(positions, rotation, at <= positions.unsqueeze(1))


# ------------------------------------------------------------------ jitkern's ops


def add_rms_norm(m: AddRMSNorm, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the norm and the sum, as the forward of a norm does."""
    if residual is None:
        return jitkern.ops.rms_norm(x, m.weight, m.eps), x
    return jitkern.ops.add_rms_norm(x, residual, m.weight, m.eps)


def use_jitkern(model: Llama, cache: jitkern.ops.PagedCache) -> Llama:
    """Let a model use jitkern's ops, and a cache in pages; returns the model."""
    for module in model.modules():
        if isinstance(module, AddRMSNorm):
            module.forward = partial(add_rms_norm, module)
        elif isinstance(module, SiluAndMul):
            module.forward = jitkern.ops.silu_and_mul
    for layer, block in enumerate(model.blocks):
        block.attend = PagedAttend(cache, layer, model.cos, model.sin)
    return model
