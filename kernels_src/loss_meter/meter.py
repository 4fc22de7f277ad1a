"""Statistics of the losses of a training loop, kept on the device."""

from __future__ import annotations

import math

import torch

from jitkern import ops
from jitkern.kernels_src.async_scalar import AsyncScalar
from jitkern.named_tuple import NamedTuple


class LossStatistics(NamedTuple):
    """Statistics of a `LossMeter`: how many losses were finite, how many infinite or NaN (`bad`).

    sum, mean, min, max: of the finite losses; without one the last three are NaN.
    """

    finite: int
    bad: int
    sum: float
    mean: float
    min: float
    max: float

    @classmethod
    def of(cls, state: list[float]) -> LossStatistics:
        """Return the statistics in the six values of a state of `jitkern.ops.loss_meter_`."""
        total, lost, count, bad, least, most = state
        whole = total + lost
        if not count:
            return cls(0, int(bad), 0.0, math.nan, math.nan, math.nan)
        return cls(int(count), int(bad), whole, whole / count, least, most)


class LossMeter:
    """Sum, mean, minimum and maximum of losses, which the host reads without waiting for them.

    `.add(loss)` is one small kernel, `.put()` begins to copy what was added so far to the host, and
    `.poll()` returns the newest copy that has arrived. The sum is compensated (Neumaier 1974), in
    float64: its error does not grow with the number of losses.

    state: six float64 values on the device, as `jitkern.ops.loss_meter_` changes them.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        self.state = torch.zeros(6, dtype=torch.float64, device=device)
        self._copies = AsyncScalar()

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss: a floating point tensor of one element on the device of the meter.

        Its graph is not kept. Raises RuntimeError for another tensor.
        """
        ops.loss_meter_(loss.detach(), self.state)

    def put(self) -> None:
        """Begin to copy the statistics to the host; never wait."""
        self._copies.put(self.state)

    def poll(self) -> LossStatistics | None:
        """Return the newest statistics that have reached the host, None if none have; never wait.

        The same statistics are returned until newer ones are there.
        """
        return _read(self._copies.poll())

    def wait(self) -> LossStatistics | None:
        """Return the statistics that were put last, waiting for them; None if none were put."""
        return _read(self._copies.wait())

    @property
    def number(self) -> int:
        """Which `put` the last statistics come from, counted from 1; 0 before there are any."""
        return self._copies.number

    def reset(self) -> None:
        """Forget all losses, at this point of the current stream: what was put still arrives."""
        self.state.zero_()


def _read(state: list[float] | None) -> LossStatistics | None:
    return None if state is None else LossStatistics.of(state)
