"""Sum, count, minimum and maximum of losses in a tensor, and how many were not finite.

The sum is Neumaier's (Neumaier 1974): what an addition rounds away is summed apart, so that the
error does not grow with the number of losses. `state` has six float64 values, all 0 at first:

    state[0] + state[1]  sum of the finite losses (the second part is what was rounded away)
    state[2], state[3]   number of finite losses, number of others (infinite or NaN)
    state[4], state[5]   minimum and maximum of the finite losses; 0 while there is none
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src.elements import DTYPES, check_floating

loss_meter_ = kernel(
    "loss_meter_(Tensor loss, Tensor(a!) state) -> ()",
    cuda=Cuda("loss_meter.cu"),
)


@loss_meter_.reference
def _(loss, state):
    value = loss.reshape(()).to(torch.float64)
    total, lost, count, bad, least, most = state.unbind()
    sum_ = total + value
    rest = torch.where(total.abs() >= value.abs(), total - sum_ + value, value - sum_ + total)
    first = count == 0
    added = torch.stack([
        sum_, lost + rest, count + 1, bad,
        torch.where(first | (value < least), value, least),
        torch.where(first | (value > most), value, most),
    ])  # fmt: skip
    skipped = torch.stack([total, lost, count, bad + 1, least, most])
    state.copy_(torch.where(value.isfinite(), added, skipped))


@loss_meter_.launch("cuda")
def _(k, loss, state):
    torch._check(
        loss.numel() == 1,
        lambda: f"loss_meter_: loss must have one element, got shape {tuple(loss.shape)}",
    )
    check_floating("loss_meter_", "loss", loss.dtype)
    torch._check(
        state.dtype == torch.float64 and state.dim() == 1 and state.shape[0] == 6
        and state.is_contiguous(),
        lambda: "loss_meter_: state must be six contiguous float64 values, got "
        f"{state.dtype} of shape {tuple(state.shape)}",
    )  # fmt: skip
    k.loss_meter[{"T": loss.dtype}](state, loss, grid=1, block=1)


@loss_meter_.samples
def _(device):
    state = torch.zeros(6, dtype=torch.float64, device=device)
    for dtype in DTYPES:
        for shape in ((), (1,), (1, 1)):
            yield torch.randn(shape, dtype=dtype, device=device), state.clone()
    ones = torch.ones(6, dtype=torch.float64, device=device)
    yield torch.full((), float("nan"), device=device), ones


@loss_meter_.cost
def _(loss, state):
    return loss.nbytes + 2 * state.nbytes, 8
