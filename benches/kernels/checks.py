"""Whether a result is right: against the reference in float64, within what its class of op allows.

The bound is that of computing in float32 and rounding once. A peer that rounds between its steps is
not wrong for it: up to twice the error of the reference in the same dtype is allowed. One that
rounds what the op keeps, such as weights of 4 bits written out in 16, is compared by the norm of
the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

OF_EAGER = 2.0  # times the error of the reference in the same dtype
OF_NORM = 0.03  # of the norm of all numbers, for a peer that is not exact
CHUNK = 1 << 25  # numbers compared at once, in float64


@dataclass(frozen=True)
class Tolerance:
    """A bound of the error of each number: `relative` of it, and parts of the largest around it.

    of_row, of_all: parts of the largest magnitude in the number's row, and among all numbers.
    """

    relative: float
    absolute: float = 0.0
    of_row: float = 0.0
    of_all: float = 0.0


# Half a unit in the last place, and a little for what is computed in float32.
_ROUNDING = {torch.bfloat16: 2.0**-8 * 1.05, torch.float16: 2.0**-11 * 1.05}
_POINTWISE = {
    **{dtype: Tolerance(rounding, absolute=1e-6) for dtype, rounding in _ROUNDING.items()},
    torch.float32: Tolerance(2.0**-21, of_all=1e-7),
    torch.float64: Tolerance(1e-13, of_all=1e-15),
}
_ROWS = {
    **{dtype: Tolerance(rounding, of_row=2.0**-14) for dtype, rounding in _ROUNDING.items()},
    torch.float32: Tolerance(2.0**-21, of_row=1e-5),
    torch.float64: Tolerance(1e-13, of_row=1e-13),
}
_OTHERS = {  # sums of unknown length, as `jitkern check` allows: four roundings
    dtype: Tolerance(4 * torch.finfo(dtype).eps, absolute=4 * torch.finfo(dtype).eps)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
TOLERANCES = {"pointwise": _POINTWISE, "rows": _ROWS, "": _OTHERS}


class Oracle:
    """What a call must give: the reference in float64, and how far the same-dtype one is off.

    family: of the op, a key of TOLERANCES. steps: roundings after each other, 2 for a gradient.
    """

    def __init__(
        self, family: str, own: Sequence[Any], precise: Sequence[Any], steps: int = 1
    ) -> None:
        self.family, self.steps = family, steps
        self.own = [(t.shape, t.dtype, t.device) for t in own]
        self.precise = list(precise)
        errors = [self.error(a, b) for a, b in zip(own, self.precise)]
        self.allowed = [max(1.0, OF_EAGER * e) if math.isfinite(e) else 1.0 for e in errors]

    def problem(self, results: Sequence[torch.Tensor], *, exact: bool = True) -> str:
        """Return what is wrong with the results, or ""."""
        kinds = [(t.shape, t.dtype, t.device) for t in results]
        if kinds != self.own:
            return f"wrong: gave {_kinds(kinds)}, the reference {_kinds(self.own)}"
        for number, (result, precise) in enumerate(zip(results, self.precise)):
            if exact:
                error, allowed = self.error(result, precise), self.allowed[number]
            else:
                error, allowed = float((result - precise).norm() / precise.norm()), OF_NORM
            if not error <= allowed:
                which = f"result {number + 1} has " if len(results) > 1 else ""
                if not result.is_floating_point():
                    return f"wrong: {which}other numbers than the reference"
                if math.isinf(error):
                    return f"wrong: {which}NaN or infinity in the wrong places"
                return f"wrong: {which}{error / allowed:.3g} times the error that is allowed"
        return ""

    def error(self, result: torch.Tensor, precise: torch.Tensor) -> float:
        """Return the largest error in units of the bound; infinity for NaN in the wrong place."""
        if not result.is_floating_point():
            return 0.0 if torch.equal(result, precise.to(result.dtype)) else math.inf
        tolerance = TOLERANCES[self.family].get(result.dtype, _OTHERS[torch.bfloat16])
        of_all = bool(tolerance.of_all and precise.numel())
        most = float(_magnitude(precise).max()) if of_all else 0.0
        errors = [self._part(a, b, tolerance, most) for a, b in _chunks(result, precise)]
        return max(errors, default=0.0) / self.steps

    @staticmethod
    def _part(got: Any, want: Any, tolerance: Tolerance, most: float) -> float:
        want = want.detach()
        rounded = want.to(got.dtype).double()
        want = torch.where(rounded.isinf(), rounded, want.double())  # the dtype has no more
        got = got.detach().double()
        bound = tolerance.relative * want.abs() + tolerance.absolute
        bound += tolerance.of_all * most
        if tolerance.of_row:
            bound += tolerance.of_row * _magnitude(want).amax(-1, keepdim=True)
        same = (got == want) | (got.isnan() & want.isnan())
        error = torch.where(same, 0.0, (got - want).abs() / bound.clamp_min(1e-300))
        return float(error.nan_to_num(nan=math.inf).max())


def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().nan_to_num(posinf=0.0)


def _chunks(
    result: torch.Tensor, precise: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both by whole rows, so many that float64 takes little memory."""
    if not result.numel():
        return
    columns = result.shape[-1] if result.dim() else 1
    rows = max(1, CHUNK // columns)
    yield from zip(
        result.reshape(-1, columns).split(rows), precise.reshape(-1, columns).split(rows)
    )


def _kinds(kinds: Sequence[tuple[Any, ...]]) -> str:
    return " and ".join(f"{str(d).removeprefix('torch.')}{[*s]} on {w}" for s, d, w in kinds)


def widened(value: Any) -> Any:
    """Return a value with floating-point tensors in float64, and those of a list."""
    if isinstance(value, (list, tuple)):
        return [widened(item) for item in value]
    plain = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if plain else value


def poison(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Leave NaN in the memory that the next results will likely get, lest it hold a right result.

    Torch hands freed memory of a size out again.
    """
    for tensor in [torch.empty_like(t, device=device) for t in tensors]:
        tensor.fill_(math.nan if tensor.is_floating_point() else 1)
