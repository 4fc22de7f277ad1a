"""A small Llama in plain PyTorch, and `use_jitkern`, which gives it jitkern's ops.

Four modules hold what jitkern has kernels for: RMSNorm, Rotary, SiluAndMul and CrossEntropy. All
else, matrix products and attention, is PyTorch's own and stays so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import jitkern
import jitkern.ops


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight, over the last dimension."""

    def __init__(self, width: int, eps: float = 1e-6, **kind) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, **kind)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding of q and k, [batch, seq, heads, d]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq: int, d: int, device: str, base: float = 10000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, d, 2, device=device) / d)
        angles = torch.arange(seq, device=device).unsqueeze(1) * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (
            torch.cat([t[: q.shape[1]]] * 2, -1).unsqueeze(1).to(q.dtype)
            for t in (self.cos, self.sin)
        )
        return tuple(x * cos + self._half_turned(x) * sin for x in (q, k))

    @staticmethod
    def _half_turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)


class SiluAndMul(nn.Module):
    """silu(gate) * up, of both in one tensor, [.., 2 * d]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


class CrossEntropy(nn.Module):
    """The mean cross-entropy of logits, [.., vocabulary]."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, seq: int, **kind) -> None:
        super().__init__()
        self.d, self.parts = width // heads, (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(width, sum(self.parts) * self.d, bias=False, **kind)
        self.out = nn.Linear(width, width, bias=False, **kind)
        self.rotary = Rotary(seq, self.d, kind["device"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.d)).split(self.parts, dim=2)
        q, k = self.rotary(q, k)  # parts of the packed qkv, as they lie
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm."""

    def __init__(self, width: int, heads: int, kv_heads: int, seq: int, **kind) -> None:
        super().__init__()
        hidden = width * 8 // 3 // 64 * 64
        self.attention_norm = RMSNorm(width, **kind)
        self.attention = Attention(width, heads, kv_heads, seq, **kind)
        self.mlp_norm = RMSNorm(width, **kind)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False, **kind)
        self.activation = SiluAndMul()
        self.down = nn.Linear(hidden, width, bias=False, **kind)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(self.activation(self.gate_up(self.mlp_norm(x))))


class Llama(nn.Module):
    """Embedding, blocks, a norm, logits; called with targets, it returns the loss."""

    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, kv_heads: int, seq: int, **kind
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, **kind)
        self.blocks = nn.Sequential(
            *(Block(width, heads, kv_heads, seq, **kind) for _ in range(layers))
        )
        self.norm = RMSNorm(width, **kind)
        self.logits = nn.Linear(width, vocabulary, bias=False, **kind)
        self.loss = CrossEntropy()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.logits(self.norm(self.blocks(self.embedding(tokens)))), targets)


# ------------------------------------------------------------------ jitkern's ops


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy; the gradient overwrites the logits."""
    return jitkern.ops.cross_entropy_in_place(logits.flatten(0, -2), target.flatten())


SWITCHED = {
    RMSNorm: lambda m: lambda x: jitkern.ops.rms_norm(x, m.weight, m.eps),
    Rotary: lambda m: lambda q, k: jitkern.ops.rope(q, k, m.cos, m.sin),
    SiluAndMul: lambda _: jitkern.ops.silu_and_mul,
    CrossEntropy: lambda _: loss_of,
}


def use_jitkern(model: nn.Module) -> nn.Module:
    """Let the modules of a model that jitkern has ops for call these ops; returns the model."""
    for module in model.modules():
        if type(module) in SWITCHED:
            module.forward = SWITCHED[type(module)](module)
    return model
