"""Cross-entropy of logits and a target class, over the dimension of the classes.

With v = logits, or softcap * tanh(logits / softcap), of a row, lse = log sum_j exp(v[j]), C classes
and eps = label_smoothing, the loss of the row is

    lse - (1 - eps) * v[target] - eps / C * sum_j v[j] + z_loss * lse ** 2

and 0 where the target is `ignore_index`. A target that is not a class makes the loss and gradient
its row NaN. "mean" divides the sum by the number of targets that are not ignored. Losses of
16-bit logits are float32. The gradient by v[j], times (1 - (v[j] / softcap) ** 2), is

    (1 + 2 * z_loss * lse) * exp(v[j] - lse) - eps / C - (1 - eps) * (j == target)
"""

import math

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src.cross_entropy.in_torch import gradient_in_torch, loss_in_torch
from jitkern.kernels_src.cross_entropy.launches import fill_gradients, losses_of, reduced
from jitkern.kernels_src.elements import DTYPES, check_floating, wide_dtype

CUDA = Cuda("cross_entropy.cu")
TARGETS = (torch.int64, torch.int32)
REDUCTIONS = ("mean", "sum", "none")
OPTIONS = (
    "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float softcap=0.0, "
    'str reduction="mean"'
)

cross_entropy = kernel(
    f"cross_entropy(Tensor logits, Tensor target, {OPTIONS}) -> Tensor", cuda=CUDA
)
cross_entropy_backward = kernel(
    f"cross_entropy_backward(Tensor logits, Tensor target, Tensor grad, {OPTIONS}) -> Tensor",
    cuda=CUDA,
)
cross_entropy_with_grad = kernel(
    f"cross_entropy_with_grad(Tensor logits, Tensor target, {OPTIONS})"
    " -> (Tensor loss, Tensor dlogits)",
    cuda=CUDA,
    nondifferentiable=["dlogits"],
)
cross_entropy_with_grad_ = kernel(
    f"cross_entropy_with_grad_(Tensor(a!) logits, Tensor target, {OPTIONS}) -> Tensor",
    cuda=CUDA,
)
cross_entropy_rescale_ = kernel(
    "cross_entropy_rescale_(Tensor(a!) dlogits, Tensor by) -> ()", cuda=CUDA
)


def _checked(name, logits, target, label_smoothing, softcap, reduction):
    """Refuse arguments that do not fit; return rows and classes."""
    dims = logits.dim()
    torch._check(
        dims >= 1, lambda: f"{name}: the logits need a dimension, that of the classes; got a scalar"
    )
    check_floating(name, "logits", logits.dtype)
    torch._check(
        target.dtype in TARGETS,
        lambda: f"{name}: target must be class indices of int64 or int32, got {target.dtype}",
    )
    torch._check(
        target.device == logits.device,
        lambda: f"{name}: the logits are on {logits.device}, and target on {target.device}",
    )
    rest = logits.shape[:1] + logits.shape[2:] if dims > 1 else ()
    torch._check(
        tuple(target.shape) == tuple(rest),
        lambda: (
            f"{name}: logits of shape {tuple(logits.shape)} want a target of shape "
            f"{tuple(rest)}, got {tuple(target.shape)}: the classes are dimension 1 of the logits, "
            "or their only one; flatten(0, -2) makes (rows, classes) of (batch, time, classes)"
        ),
    )
    torch._check(
        0 <= label_smoothing <= 1,
        lambda: f"{name}: label_smoothing must be from 0 to 1, got {label_smoothing}",
    )
    torch._check(softcap >= 0, lambda: f"{name}: softcap must not be negative, got {softcap}")
    torch._check(
        reduction in REDUCTIONS,
        lambda: f"{name}: reduction must be mean, sum or none, got {reduction!r}",
    )
    cols = logits.shape[1] if dims > 1 else logits.shape[0]
    torch._check(cols < 2**31, lambda: f"{name}: more than 2**31 - 1 classes: {cols}")
    return math.prod(rest), cols


def _classes_last(logits):
    """Return the logits as a dense tensor whose last dimension is that of the classes."""
    if logits.dim() > 2:
        logits = logits.permute(0, *range(2, logits.dim()), 1)
    return logits.contiguous()


def _as_logits(rows, logits):
    """Return what was computed with the classes last in the order of dimensions of the logits."""
    if logits.dim() > 2:
        rows = rows.permute(0, logits.dim() - 1, *range(1, logits.dim() - 1))
    return rows


@cross_entropy.launch("cuda")
def _(k, logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction):
    rows, cols = _checked("cross_entropy", logits, target, label_smoothing, softcap, reduction)
    x, target = _classes_last(logits), target.contiguous()
    numbers = label_smoothing, z_loss, softcap, ignore_index
    losses = losses_of(k, x, target, rows, cols, *numbers)
    return reduced(k, losses, target, rows, ignore_index, reduction)


@cross_entropy_backward.launch("cuda")
def _(k, logits, target, grad, ignore_index, label_smoothing, z_loss, softcap, reduction):
    name = "cross_entropy_backward"
    rows, cols = _checked(name, logits, target, label_smoothing, softcap, reduction)
    shape = target.shape if reduction == "none" else ()
    torch._check(
        tuple(grad.shape) == tuple(shape) and grad.dtype == wide_dtype(logits.dtype),
        lambda: (
            f"{name}: grad must be {wide_dtype(logits.dtype)} of shape {tuple(shape)}, got "
            f"{grad.dtype} of shape {tuple(grad.shape)}"
        ),
    )
    x, target = _classes_last(logits), target.contiguous()
    out = torch.empty_like(x)
    numbers = label_smoothing, z_loss, softcap, ignore_index
    fill_gradients(k, grad, out, x, target, rows, cols, *numbers, reduction)
    return _as_logits(out, logits)


@cross_entropy_with_grad.launch("cuda")
def _(k, logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction):
    name = "cross_entropy_with_grad"
    rows, cols = _checked(name, logits, target, label_smoothing, softcap, reduction)
    x, target = _classes_last(logits), target.contiguous()
    out = torch.empty_like(x)
    numbers = label_smoothing, z_loss, softcap, ignore_index
    losses = fill_gradients(k, None, out, x, target, rows, cols, *numbers, reduction)
    return reduced(k, losses, target, rows, ignore_index, reduction), _as_logits(out, logits)


@cross_entropy_with_grad_.launch("cuda")
def _(k, logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction):
    name = "cross_entropy_with_grad_"
    rows, cols = _checked(name, logits, target, label_smoothing, softcap, reduction)
    x, target = logits, target.contiguous()
    if logits.dim() > 2:
        x = logits.permute(0, *range(2, logits.dim()), 1)
    torch._check(
        x.is_contiguous(),
        lambda: (
            f"{name}: the logits are changed in place: pass them contiguous, with the classes "
            f"last in memory, got strides {tuple(logits.stride())}"
        ),
    )
    numbers = label_smoothing, z_loss, softcap, ignore_index
    losses = fill_gradients(k, None, x, x, target, rows, cols, *numbers, reduction)
    return reduced(k, losses, target, rows, ignore_index, reduction)


@cross_entropy_rescale_.launch("cuda")
def _(k, x, by):
    name = "cross_entropy_rescale_"
    torch._check(
        x.is_contiguous() and x.dim() >= 1,
        lambda: f"{name}: x is changed in place: pass it contiguous, got strides {x.stride()}",
    )
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    torch._check(
        by.dtype == wide_dtype(x.dtype)
        and (by.dim() == 0 or tuple(by.shape) == tuple(x.shape[:-1])),
        lambda: (
            f"{name}: by must be one {wide_dtype(x.dtype)} or one for each row, of shape "
            f"{tuple(x.shape[:-1])}, got {by.dtype} of shape {tuple(by.shape)}"
        ),
    )
    if k.fake:
        return
    by, stride = by.contiguous(), 0 if by.dim() == 0 else 1
    k.cross_entropy_rescale[{"T": x.dtype}](
        x, by, stride, rows, cols, grid=min(rows, 8 * k.multiprocessors), block=512
    )


cross_entropy.reference(loss_in_torch)
cross_entropy_backward.reference(gradient_in_torch)


@cross_entropy_with_grad.reference
def _(logits, target, *options):
    loss = loss_in_torch(logits, target, *options)
    return loss, gradient_in_torch(logits, target, torch.ones_like(loss), *options)


@cross_entropy_with_grad_.reference
def _(logits, target, *options):
    loss = loss_in_torch(logits, target, *options)
    logits.copy_(gradient_in_torch(logits, target, torch.ones_like(loss), *options))
    return loss


@cross_entropy_rescale_.reference
def _(x, by):
    x.copy_(x * by.unsqueeze(-1))


cross_entropy.backward(cross_entropy_backward)


@cross_entropy_with_grad.backward
def _(grad, dlogits):
    rows = dlogits.movedim(1, -1) if dlogits.dim() > 2 else dlogits
    # A copy, since dlogits is not this function's; under vmap it has the batch of grad.
    rows = (rows - torch.zeros_like(grad, dtype=rows.dtype).unsqueeze(-1)).contiguous()
    cross_entropy_rescale_(rows, grad)
    return rows.movedim(-1, 1) if dlogits.dim() > 2 else rows, None


@cross_entropy.cost
def _(logits, target, *_options):  # a maximum, a difference, exp, a sum
    return logits.nbytes + target.nbytes, 4 * logits.numel()


@cross_entropy_with_grad.cost
@cross_entropy_with_grad_.cost
def _(logits, target, *_options):
    return 2 * logits.nbytes + target.nbytes, 7 * logits.numel()


@cross_entropy_backward.cost
def _(logits, target, _grad, *_options):
    return 2 * logits.nbytes + target.nbytes, 7 * logits.numel()


@cross_entropy_rescale_.cost
def _(x, by):
    return 2 * x.nbytes + by.nbytes, x.numel()


def _calls(device, dims=2):
    """Yield logits, targets and options."""
    for dtype in DTYPES:
        for rows, cols in ((16, 11), (3, 1000)):
            target = (torch.arange(rows) % cols).to(device)
            yield torch.randn(rows, cols, dtype=dtype, device=device), target
    nothing = torch.arange(0).to(device)
    yield torch.randn(0, 8, device=device), nothing, -100, 0.0, 0.0, 0.0, "sum"
    target = torch.tensor([3, -1, 0, 39, 7], dtype=torch.int32, device=device)
    yield torch.randn(40, 5, device=device).T, target, -1, 0.1, 1e-3, 5.0, "sum"
    yield torch.randn(5, 40, device=device), target.long(), -1, 0.1, 0.0, 0.0, "none"
    yield torch.randn(5, 40000, device=device), target.long(), -1
    if dims > 2:
        yield torch.randn(2, 9, 3, 5, device=device), target.new_full((2, 3, 5), 4)
        yield torch.randn(9, device=device), target.new_full((), 4), -100, 0.5


cross_entropy.samples(lambda device: _calls(device, dims=4))
cross_entropy_with_grad.samples(_calls)


@cross_entropy_with_grad_.samples
def _(device):
    for logits, *rest in _calls(device):
        yield logits.contiguous(), *rest


@cross_entropy_backward.samples
def _(device):
    for logits, target, *options in _calls(device):
        reduced = options[4:] != ["none"]
        grad = torch.randn(() if reduced else target.shape, device=device).to(
            wide_dtype(logits.dtype)
        )
        yield logits, target, grad, *options


@cross_entropy_rescale_.samples
def _(device):
    for dtype in DTYPES:
        for shape in ((16, 50), (5,), (0, 4)):
            x = torch.randn(shape, dtype=dtype, device=device)
            yield x, torch.full((), 0.5, dtype=wide_dtype(dtype), device=device)
        by = torch.ones(16, dtype=wide_dtype(dtype), device=device)
        yield torch.randn(16, 33, dtype=dtype, device=device), by
