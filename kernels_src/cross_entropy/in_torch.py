"""The formulas of kernel.py in PyTorch: the references of its ops."""

import math

import torch

from jitkern.kernels_src.elements import wide


def _losses_in_torch(v, target, ignored, known, label_smoothing, z_loss):
    """Return the losses of rows of capped logits."""
    if v.shape[-1] == 0:  # no target is a class
        return torch.where(ignored, 0, v.sum(-1) + math.nan)
    log_p = torch.log_softmax(v, -1)
    losses = -log_p.gather(-1, torch.where(known, target, 0).unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_p.mean(-1)
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(v, -1) ** 2
    return torch.where(known, losses, math.nan).masked_fill(ignored, 0)


def _capped(logits, target, ignore_index, softcap):
    """Return capped logits with the classes last, and which targets are ignored, and classes."""
    x = wide(logits)
    x = x.movedim(1, -1) if logits.dim() > 2 else x
    v = softcap * torch.tanh(x / softcap) if softcap else x
    return v, target == ignore_index, (target >= 0) & (target < x.shape[-1])


def loss_in_torch(logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction):
    """Return the loss."""
    v, ignored, known = _capped(logits, target, ignore_index, softcap)
    losses = _losses_in_torch(v, target.long(), ignored, known, label_smoothing, z_loss)
    if reduction == "none":
        return losses
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


def gradient_in_torch(
    logits, target, grad, ignore_index, label_smoothing, z_loss, softcap, reduction
):
    """Return the gradient by the logits, which can be differentiated again."""
    v, ignored, known = _capped(logits, target, ignore_index, softcap)
    hot = (target.long().unsqueeze(-1) == torch.arange(v.shape[-1], device=v.device)).to(v.dtype)
    d = torch.softmax(v, -1)
    if z_loss:
        d = d * (1 + 2 * z_loss * torch.logsumexp(v, -1, keepdim=True))
    d = d - (1 - label_smoothing) * hot - label_smoothing / max(v.shape[-1], 1)
    d = d * (1 - (v / softcap) ** 2) if softcap else d
    by = grad / (~ignored).sum() if reduction == "mean" else grad
    d = torch.where(known.unsqueeze(-1), d * by.unsqueeze(-1), math.nan)
    d = d.masked_fill(ignored.unsqueeze(-1), 0).to(logits.dtype)
    return d.movedim(-1, 1) if logits.dim() > 2 else d
