"""Cross-entropy whose gradient takes the memory of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from jitkern import ops


def cross_entropy_in_place(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Return the loss of `jitkern.ops.cross_entropy`, and overwrite the logits by their gradient.

    Loss and gradient are computed together: the logits are read once, and no other memory of their
    size is needed. The backward pass multiplies the gradient by that of the loss on the GPU, where
    it is not 1, and does not wait for it. If no gradient is needed, the logits stay unchanged.

    logits: [rows, classes], contiguous, or [rows, classes, ...] with the classes last in memory;
        float16, bfloat16, float32 or float64. What computed them must not need them for its own
        gradient, as a matrix product does not.
    target: class indices of the shape [rows] or [rows, ...].

    PyTorch's version counters make this safe: a second backward pass, and one of an op that saved
    the logits, raise RuntimeError. So do logits that are a leaf of the graph, and arguments that do
    not fit.
    """
    options = ignore_index, label_smoothing, z_loss, softcap, reduction
    loss: torch.Tensor
    if not (torch.is_grad_enabled() and logits.requires_grad):
        loss = ops.cross_entropy(logits, target, *options)
        return loss
    if logits.is_leaf:
        raise RuntimeError(
            "cross_entropy_in_place overwrites the logits, which here are a leaf of the graph that "
            "requires grad: pass what a model computed, or use jitkern.ops.cross_entropy"
        )
    loss = _InPlace.apply(logits, target, options)  # type: ignore[no-untyped-call]
    return loss


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: tuple[Any, ...]
    ) -> torch.Tensor:
        # The detached tensor has the same memory and the same version counter.
        loss: torch.Tensor = ops.cross_entropy_with_grad_(logits.detach(), target, *options)
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = ctx.saved_tensors[0].detach()
        rows = gradient.movedim(1, -1) if gradient.dim() > 2 else gradient
        ops.cross_entropy_rescale_(rows, grad)
        return gradient, None, None
