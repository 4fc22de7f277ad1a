"""Weights of 4 bits for `jitkern.ops.w4a16_linear`: packing, and rounding to the nearest."""

from __future__ import annotations

import torch

from jitkern.kernels_src import int4 as layout
from jitkern.named_tuple import NamedTuple


class Int4Weight(NamedTuple):
    """A weight [N, K] of 4 bits, as `jitkern.ops.w4a16_linear` takes it after x.

    qweight: int32 [N / 16 rounded up, K / 64, 32, 4], from `pack`.
    scale: [K / group, N].
    zero: None for (q - 8) * scale; uint8 for (q - zero) * scale; of the dtype of the scale for
        (q - 8) * scale + zero.
    """

    qweight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight as a matrix [N, K], computed in a dtype."""
        values: torch.Tensor = layout.values(self.qweight, self.scale, self.zero, dtype)
        return values


def pack(q: torch.Tensor) -> torch.Tensor:
    """Return whole numbers in the layout of the kernels.

    q: [N, K] of an integer dtype, from 0 to 15; the upper bits of others are lost. K is a multiple
        of 64.

    Returns int32 [N / 16 rounded up, K / 64, 32, 4]. Raises ValueError for other shapes.
    """
    if q.dim() != 2 or q.shape[1] % 64 or not q.shape[1]:
        raise ValueError(f"pack: q must be [N, K] with K a multiple of 64, got {tuple(q.shape)}")
    packed: torch.Tensor = layout.pack(q)
    return packed


def unpack(qweight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the whole numbers [rows, K] of a packed weight, as uint8."""
    q: torch.Tensor = layout.unpack(qweight, rows)
    return q


def quantize(weight: torch.Tensor, group: int = 128, *, symmetric: bool = True) -> Int4Weight:
    """Round a weight [N, K] to the nearest numbers of 4 bits.

    Each group of 64 or 128 numbers of a row has a scale of the dtype of the weight. symmetric: the
    largest of the group becomes 7 units. Otherwise the range from the smallest to the largest, with
    0 in it, becomes 15 units, and the group has a whole zero. K is a multiple of the group.

    Rounding to the nearest loses more than GPTQ or AWQ do, whose weights
    `jitkern.ops.converters` takes. Raises ValueError for another group or shape.
    """
    check(weight.shape, group)
    parts = weight.float().view(weight.shape[0], weight.shape[1] // group, group)
    if symmetric:
        scale = parts.abs().amax(-1, keepdim=True) / 7
    else:
        low, high = (f(-1, keepdim=True).clamp(**bound) for f, bound in (
            (parts.amin, {"max": 0}), (parts.amax, {"min": 0}),
        ))  # fmt: skip
        scale = (high - low) / 15
    scale = scale.to(weight.dtype)
    unit = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    zero = torch.full_like(unit, 8) if symmetric else (-low / unit).round().clamp(0, 15)
    q = ((parts / unit).round() + zero).clamp(0, 15).to(torch.uint8).view(weight.shape)
    of_groups = [t[..., 0].T.contiguous() for t in (scale, zero)]
    return Int4Weight(pack(q), of_groups[0], None if symmetric else of_groups[1].to(torch.uint8))


def check(shape: torch.Size, group: int) -> None:
    """Raise ValueError unless a weight of this shape may be quantized in such groups."""
    if group not in layout.GROUPS:
        raise ValueError(f"a group has 64 or 128 numbers, not {group}")
    if len(shape) != 2 or not shape[1] or shape[1] % group:
        raise ValueError(
            f"a weight must be [N, K] with K a multiple of the group of {group}, got {tuple(shape)}"
        )
