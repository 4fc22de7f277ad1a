import torch

from jitkern.declare import Cpp, kernel

loss_ = kernel("mylib::loss_(Tensor(a!) logits, Tensor target) -> Tensor", cpu=Cpp("loss.cpp"))
scale_ = kernel("mylib::scale_(Tensor(a!) x, Tensor by) -> ()", cpu=Cpp("loss.cpp"))


@loss_.launch("cpu")
def _(k, logits, target):
    torch._check(
        logits.is_contiguous(),
        lambda: "loss_: the logits are changed in place: pass them contiguous",
    )
    total = torch.empty((), dtype=logits.dtype, device=logits.device)
    k.loss(total, logits, target.contiguous(), *logits.shape)
    return total


@scale_.launch("cpu")
def _(k, x, by):
    k.scale(x, by, x.numel())


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        total = loss_(logits.detach(), target)  # the same memory, and the same version counter
        ctx.save_for_backward(logits)  # which holds the gradient now
        return total

    @staticmethod
    def backward(ctx, grad):
        gradient = ctx.saved_tensors[0].detach()
        scale_(gradient, grad)
        return gradient, None
