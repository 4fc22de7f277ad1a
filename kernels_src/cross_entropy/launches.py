"""The launches of cross-entropy: which form rows take, and how losses are reduced."""

import torch

from jitkern.kernels_src import rows as forms
from jitkern.kernels_src.elements import blocks, wide_dtype


def _loss_form(row_bytes):
    """Return lanes of a row, threads of a block, and 16 bytes that a lane asks for at once."""
    if row_bytes <= 1 << 13:
        return 32, 128, 2 if row_bytes <= 1 << 10 else 4
    return (128, 128, 4) if row_bytes <= 1 << 15 else (256, 256, 4)


def _template(x, target, smoothing, softcap):
    return {"T": x.dtype, "I": target.dtype, "SMOOTH": smoothing != 0, "CAP": softcap != 0}


def losses_of(k, x, target, rows, cols, smoothing, z_loss, softcap, ignore_index):
    """Launch the kernel of the losses alone, and return them."""
    losses = torch.empty(target.shape, dtype=wide_dtype(x.dtype), device=x.device)
    if k.fake:
        return losses
    edges = forms.has_edges(cols, x)
    lanes, threads, ahead = _loss_form(cols * x.element_size())
    template = {
        **_template(x, target, smoothing, softcap),
        "LANES": lanes, "THREADS": threads, "AHEAD": ahead, "EDGES": edges,
    }  # fmt: skip
    k.cross_entropy_loss[template](
        losses, x, target, rows, cols, smoothing, z_loss, softcap, ignore_index,
        grid=blocks(rows * lanes, threads), block=threads,
    )  # fmt: skip
    return losses


def _scale(k, grad, target, dtype, rows, ignore_index, reduction):
    """Return what gradients are multiplied by, as a tensor or None, and its stride by rows.

    grad: the gradient of the loss, or None for 1.
    """
    if reduction == "mean":
        scale = torch.empty((), dtype=dtype, device=target.device)
        k.cross_entropy_scale[{"A": dtype, "I": target.dtype}](
            scale, grad, target, rows, ignore_index, grid=1, block=1024
        )
        return scale, 0
    if grad is None or reduction == "sum":
        return grad, 0
    return grad.contiguous(), 1


def fill_gradients(
    k, grad, out, x, target, rows, cols, smoothing, z_loss, softcap, ignore_index, reduction
):
    """Launch the kernels that fill out with the gradients; return the losses. out may be x."""
    losses = torch.empty(target.shape, dtype=wide_dtype(x.dtype), device=x.device)
    scale, stride = _scale(k, grad, target, losses.dtype, rows, ignore_index, reduction)
    tensors = losses, out, x, target, scale, stride
    numbers = smoothing, z_loss, softcap, ignore_index
    kernels = k.cross_entropy_on_chip, k.cross_entropy_rows
    template = _template(x, target, smoothing, softcap)
    forms.launch(k, kernels, template, tensors, rows, cols, (x, out), last=numbers)
    return losses


def reduced(k, losses, target, rows, ignore_index, reduction):
    """Launch the sum or the mean of the losses, and return the loss."""
    if reduction == "none":
        return losses
    loss = torch.empty((), dtype=losses.dtype, device=losses.device)
    k.cross_entropy_reduce[{"A": losses.dtype, "I": target.dtype}](
        loss, losses, target, rows, ignore_index, reduction == "mean", grid=1, block=1024
    )
    return loss
