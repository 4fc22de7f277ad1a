"""Checks of an op over its samples: each kernel against the reference, and Torch's own checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, runtime
from jitkern.calls.signature import tensors_in
from jitkern.errors import CompilerNotFound, JitkernError, TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import Source

if TYPE_CHECKING:
    from jitkern.op.op import Op

# A kernel may be this many rounding errors away from the reference in float64, or this many times
# as far as the reference itself is in the dtype of the sample.
ROUNDINGS = 4.0
_MOST = 3  # samples of each dtype that Torch's checks see: each takes up to a second
_LARGEST = 4096  # numbers in an input whose gradient is checked


class OpCheck(NamedTuple):
    """A row of results: `ok` is True or False, or None for what cannot be tried here.

    note: the reason, or a remark.
    source: the kind of source, or "" for a check of the op as a whole.
    """

    op: str
    device: str
    source: str
    check: str
    ok: bool | None
    note: str


def checks_of(op: Op, devices: Sequence[str]) -> Iterator[OpCheck]:
    """Yield a check for each source of the op, and Torch's checks, on each of these devices."""
    for device, sources in op.sources.items():
        if not sources:
            continue
        if device not in devices:
            yield OpCheck(op.name, device, "", "reference", None, f"no {device} device here")
            continue
        try:
            samples = op.sample_inputs(device)
        except Exception as e:  # noqa: BLE001  whatever its author's code raises
            yield OpCheck(op.name, device, "", "samples", False, _told(e))
            continue
        if not samples:
            yield OpCheck(op.name, device, "", "samples", False, "none: add `@op.samples`")
            continue
        failed = False
        for source in sources:
            row = _row(op, device, source.kind, "reference", _reference, samples, device, source)
            failed |= row.ok is False
            yield row
        if failed:  # it would fail again
            yield OpCheck(op.name, device, "", "opcheck", None, "not tried after a failed check")
            continue
        yield _row(op, device, "", "opcheck", _opcheck, samples)
        if op.gradient:
            yield _row(op, device, "", "gradcheck", _gradcheck, samples)


def _row(
    op: Op, device: str, kind: str, name: str, check: Callable[..., str], *rest: Any
) -> OpCheck:
    """Return the row of a check, which returns a remark, or raises for what is wrong."""
    try:
        return OpCheck(op.name, device, kind, name, True, check(op, *rest))
    except (CompilerNotFound, TargetError, _Untried) as e:
        return OpCheck(op.name, device, kind, name, None, _told(e))
    except Exception as e:  # noqa: BLE001  whatever its author's code raises
        return OpCheck(op.name, device, kind, name, False, _told(e))


class _Untried(Exception):
    """A check that does not fit the op."""


def _told(e: Exception) -> str:
    plain = isinstance(e, (JitkernError, AssertionError, _Untried))
    return str(e).strip() if plain else f"{type(e).__name__}: {e}".strip()


@contextlib.contextmanager
def _only(op: Op, device: str, source: Source) -> Iterator[None]:
    """Let nothing but this source serve the op on a device."""
    declared = op.declaration
    op.declaration = declared._replace(sources={**declared.sources, device: (source,)})
    op.backends[device].forget()
    try:
        with config.using(fallback="raise"):
            yield
    finally:
        op.declaration = declared
        op.backends[device].forget()


def _reference(op: Op, samples: Sequence[tuple[Any, ...]], device: str, source: Source) -> str:
    """Compare a source with the reference, by its Python launcher and then by C."""
    if not op.declaration.reference:
        raise _Untried("the op has no reference")
    largest = 0.0
    with _only(op, device, source):
        for _ in range(2):
            for number, sample in enumerate(samples, 1):
                error, allowed = compared(op, sample)
                largest = max(largest, error)
                if error > allowed:
                    what = _shapes(sample)
                    raise AssertionError(
                        f"sample {number}, {what}: {error:.3g} rounding errors from the reference"
                        if math.isfinite(error)
                        else f"sample {number}, {what}: not the values of the reference"
                    )
            runtime.specializer.settle()
    return f"{len(samples)} samples, within {largest:.2f} roundings"


def compared(op: Op, sample: Sequence[Any]) -> tuple[float, float]:
    """Return the error of the op on a sample, and the error that is allowed.

    Errors are against the reference in float64, in units of the dtype's epsilon.
    """
    got = _results(op, op, copied(sample))
    own = _results(op, op.run_reference, copied(sample))
    try:
        want = _results(op, op.run_reference, copied(sample, torch.float64))
    except Exception:  # noqa: BLE001  the reference takes no float64
        want = own
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in own]:
        raise AssertionError(
            f"{_shapes(sample)}: gave {_shapes(got)}, the reference {_shapes(own)}"
        )
    want = [_wanted(a, b) for a, b in zip(own, want)]
    pairs = [[_error(a, b) for a, b in zip(side, want)] for side in (got, own)]
    return max(pairs[0], default=0.0), max(ROUNDINGS, ROUNDINGS * max(pairs[1], default=0.0))


def _results(op: Op, function: Callable[..., Any], sample: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that a function returns, and those that it changes in place."""
    args, kwargs = op.signature.complete(*op.signature.split(sample))
    result = function(*args, **kwargs)
    ordered = op.signature.in_order(args, kwargs)
    return tensors_in([result, *(ordered[position] for position, _ in op.signature.changed)])


def copied(sample: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Return the arguments with their tensors copied, those of floats to a dtype."""

    def copied(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [copied(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        clone = value.detach().clone()
        return clone.to(dtype) if dtype and value.is_floating_point() else clone

    return tuple(copied(value) for value in sample)


def _wanted(own: torch.Tensor, precise: torch.Tensor) -> torch.Tensor:
    """Return the numbers to compare with: the precise ones, but for those that its dtype lacks.

    own: what the reference gives in the dtype of the sample: integers, infinity and NaN count.
    """
    if not (own.is_floating_point() or own.is_complex()):
        return own
    widest = torch.complex128 if own.is_complex() else torch.float64
    own = own.to(widest)  # numbers of 8 bits have no isfinite()
    return torch.where(own.isfinite(), precise.to(widest), own)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not got.numel():
        return 0.0
    if not (got.is_floating_point() or got.is_complex()):
        return 0.0 if torch.equal(got, want.to(got.dtype)) else math.inf
    precise = torch.complex128 if got.is_complex() else torch.float64
    a, b = got.to(precise), want.to(precise)
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs() / (b.abs() + 1))
    largest = float(error.max())
    return math.inf if math.isnan(largest) else largest / torch.finfo(got.dtype).eps


def _shapes(values: Sequence[Any]) -> str:
    return f"({', '.join(map(_shape, values))})"


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    return str(value)


def _few(samples: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the first samples of each combination of dtypes."""
    seen: dict[Any, int] = {}
    for sample in samples:
        dtypes = tuple(tensor.dtype for tensor in tensors_in(sample))
        seen[dtypes] = seen.get(dtypes, 0) + 1
        if seen[dtypes] <= _MOST:
            yield sample


def _opcheck(op: Op, samples: Sequence[tuple[Any, ...]]) -> str:
    """Run `torch.library.opcheck`, with gradients too where the op has some."""
    count = 0
    for sample in _few(samples):
        args, kwargs = op.signature.complete(*op.signature.split(copied(sample)))
        torch.library.opcheck(op.overload, args, kwargs)
        if op.gradient:
            torch.library.opcheck(op.overload, leaves(op, args), kwargs)
        count += 1
    return f"{count} of {len(samples)} samples"


def leaves(op: Op, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments, those that have a gradient in this op as new leaves of a graph."""
    names = [argument.name for argument in op.signature.arguments]
    return tuple(
        value.detach().requires_grad_()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and name not in op.declaration.nondifferentiable
        else value
        for name, value in zip(names, args)
    )


def _gradcheck(op: Op, samples: Sequence[tuple[Any, ...]]) -> str:
    """Run `torch.autograd.gradcheck` on the samples in float64."""
    fitting = [
        sample
        for sample in samples
        if all(t.dtype == torch.float64 or not t.is_floating_point() for t in tensors_in(sample))
        and 0 < sum(t.numel() for t in tensors_in(sample)) <= _LARGEST
    ]
    if not fitting:
        raise _Untried(f"no sample in float64 of at most {_LARGEST} numbers")
    for sample in fitting:
        args, kwargs = op.signature.complete(*op.signature.split(copied(sample)))
        inputs = leaves(op, args)
        torch.autograd.gradcheck(lambda *a, k=kwargs: op(*a, **k), inputs, fast_mode=True)
    return f"{len(fitting)} of {len(samples)} samples"
