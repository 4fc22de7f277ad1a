"""Checks of an op over its samples: each kernel against the reference, and Torch's own checks."""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.gradcheck import GradcheckError

from jitkern import config, launch, op as op_room, runtime
from jitkern.cache_tools.check import counted
from jitkern.calls.signature import tensors_in
from jitkern.devtools.guard_bytes import GuardBytes
from jitkern.devtools.op_check import OpCheck
from jitkern.errors import CompilerNotFound, JitkernError, TargetError, error_site
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import Source

if TYPE_CHECKING:
    from jitkern.op.op import Op

# A kernel may be so many roundings away from the reference in float64, or so many times as far as
# the reference in the dtype of the sample. A sum in 32 or 64 bits may be added in any order.
ROUNDINGS = 4.0
_OF_SUMS = 256.0
_HALVES = (torch.float16, torch.bfloat16)
_SUMMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_SMALL = 1e-3  # numbers of 16 bits that are all smaller may be what is left of larger ones
_MOST = 3  # samples of each dtype that Torch's checks see: each takes up to a second
_LARGEST = 4096  # numbers in an input whose gradient is checked
_LONGEST = 1 << 18  # numbers of a sample whose tensors are laid out otherwise
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError)  # of an op's author
_AFTER_FAILED = "not tried after a failed check"
_FAILED = re.compile(r"opcheck\(op, \.\.\.\): (\w+) failed with ")
_MUTATED = re.compile(r"Argument (\w+) is not defined as mutable but was mutated")


def checks_of(
    op: Op, devices: Sequence[str], begin: Callable[[OpCheck], object] = lambda _: None
) -> Iterator[OpCheck]:
    """Yield a check for each source of the op, and Torch's checks, on each of these devices.

    begin: is called with each check that begins, as a row without a result, and with each of its
    calls, as a note.
    """

    def row_of(device: str, kind: str, name: str, check: Callable[..., str], *rest: Any) -> OpCheck:
        row = OpCheck(op.name, device, kind, name, None, "")
        begin(row)
        try:  # it returns a remark, or raises for what is wrong
            return row._replace(ok=True, note=check(op, *rest))
        except (CompilerNotFound, TargetError, _Untried) as e:
            return row._replace(note=_message(e))
        except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
            return row._replace(ok=False, note=_message_with_line(op, e))

    def call_of(device: str, kind: str) -> Callable[[str], object]:
        return lambda what: begin(OpCheck(op.name, device, kind, "reference", None, what))

    if not any(op.sources.values()):
        yield OpCheck(op.name, "", "", "kernels", None, "none: give some as cpu= or cuda=")
    for device, sources in op.sources.items():
        if not sources:
            continue
        if device not in devices:
            yield OpCheck(op.name, device, "", "reference", None, f"no {device} device here")
            continue
        begin(OpCheck(op.name, device, "", "samples", None, ""))
        samples, problem = _samples(op, device)
        forward = [o for o in op_room.op.OPS.values() if o.gradient and o.gradient.op is op]
        if not samples and forward and not op.declaration.samples:
            note = f"no samples: {forward[0].name} checks it as its gradient, without guard bytes"
            yield OpCheck(op.name, device, "", "samples", None, note)
            continue
        if problem:
            yield OpCheck(op.name, device, "", "samples", False, problem)
            continue
        rows = []
        for source in sources:
            about = samples, device, source, call_of(device, source.kind)
            rows.append(row_of(device, source.kind, "reference", _reference, *about))
            yield rows[-1]
        untried = ""
        if any(row.ok is False for row in rows):  # it would fail again
            untried = _AFTER_FAILED
        elif op.declaration.reference and not any(row.ok for row in rows):
            untried = f"no kernel ran: {rows[0].note}"  # it would see the reference alone
        for check in (_opcheck, _gradient, _gradcheck) if op.gradient else (_opcheck,):
            name = check.__name__[1:]
            row = OpCheck(op.name, device, "", name, None, untried)
            row = row if untried else row_of(device, "", name, check, samples)
            yield row
            # A failed opcheck may tell of a wrong gradient without its numbers.
            if row.ok is False and check is not _opcheck:
                untried = _AFTER_FAILED


def _samples(op: Op, device: str) -> tuple[list[tuple[Any, ...]], str]:
    """Return the samples, or what is wrong with them."""
    try:
        samples = op.sample_inputs(device)
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
        return [], error_site(e, op.declaration.samples) + _message(e)
    problems = filter(None, (op.problem_of(n, sample) for n, sample in enumerate(samples, 1)))
    none = "they yield no calls" if op.declaration.samples else "none: add `@op.samples`"
    return samples, next(problems, "" if samples else none)


class _Untried(Exception):
    """A check that does not fit the op."""


def _message(e: BaseException) -> str:
    plain = isinstance(e, (JitkernError, AssertionError, _Untried))
    return str(e).strip() if plain else f"{type(e).__name__}: {e}".strip()


def _message_with_line(op: Op, e: BaseException) -> str:
    """Return what a check raised, behind the line of the op's own file if that has raised it."""
    file = op.place.partition(":")[0]
    frames = traceback.walk_tb(e.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    if not lines or isinstance(e, JitkernError):
        return _message(e)
    return f"{file}:{lines[-1]}: {type(e).__name__}: {e}".rstrip(": ")


@contextlib.contextmanager
def _only(op: Op, device: str, source: Source) -> Iterator[None]:
    """Let nothing but this source serve the op on a device."""
    declared = op.declaration
    op.declaration = declared._replace(sources={**declared.sources, device: (source,)})
    op.forget(device)
    try:
        with config.using(fallback="raise"):
            yield
    finally:
        op.declaration = declared
        op.forget(device)


def _reference(
    op: Op,
    samples: Sequence[tuple[Any, ...]],
    device: str,
    source: Source,
    begin: Callable[[str], object],
) -> str:
    """Compare a source with the reference, by its Python launcher and then by C.

    On the CPU its Python launcher runs once more, with guard bytes around its tensors. Then one
    tensor at a time has another layout, in the largest sample of each combination of dtypes and
    ranks. A launch function may refuse that, and may not pass it to a kernel that takes no such.
    """
    if not op.declaration.reference:
        raise _Untried("no reference to compare with: add `@op.reference`")
    expected = [_expected_of(op, number, sample) for number, sample in enumerate(samples, 1)]
    layouts = [case for sample in _largest_by_class(samples) for case in _laid_out(op, sample)]
    refused: dict[str, None] = {}
    largest = 0.0
    measured = bool(op.declaration.tunings)  # without guards, so these come after the first call
    with _only(op, device, source):
        for again in (False, True):
            for number, (sample, wanted) in enumerate(zip(samples, expected), 1):
                what = f"sample {number}"
                begin(f"{what}, {_shapes(sample)}")
                guarded = device == "cpu" and not again  # compute-sanitizer does it on a GPU
                if guarded and not measured:  # what is written outside harms nobody yet
                    _guarded(op, device, what, sample, wanted)
                largest = max(largest, _within(compared(op, sample, wanted), what, sample))
                if guarded and measured:
                    _guarded(op, device, what, sample, wanted)
            for what, sample, wanted in layouts:
                begin(f"{what}, {_shapes(sample)}")
                try:
                    worst = compared(op, sample, wanted)
                except (RuntimeError, ValueError, TypeError) as e:
                    if type(e) not in _REFUSALS or "CUDA error" in str(e):
                        raise AssertionError(f"{what}: {_message(e)}") from e
                    refused[what.partition(",")[0]] = None
                else:
                    largest = max(largest, _within(worst, what, sample))
            runtime.specializer.settle()
    note = f"{counted(len(samples), 'sample')}, max error {largest:.2f} eps"
    note += f"; refused: {', '.join(refused)}" if refused else ""
    return f"{note}\nand {counted(len(layouts), 'call')} with another layout of a tensor"


def _expected_of(op: Op, number: int, sample: Sequence[Any]) -> Expected:
    """Return the results for a sample. Raises AssertionError if the reference refuses it."""
    try:
        return _expected(op, sample)
    except (CompilerNotFound, TargetError):
        raise
    except Exception as e:
        where = f"\nfrom the reference, on sample {number}, {_shapes(sample)}"
        raise AssertionError(_message_with_line(op, e) + where) from e


def _guarded(op: Op, device: str, what: str, sample: Sequence[Any], wanted: Expected) -> None:
    """Compare the Python launcher between guard bytes. Raises AssertionError, also for these."""
    guards = GuardBytes()
    copies = {
        id(tensor): guards.around(tensor, f"argument `{argument.name}`")
        for argument, value in zip(op.signature.arguments, sample)
        for tensor in tensors_in([value])
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), guards:
            return op.backend(device)(args, kwargs)

    got = _results(op, call, launch.measure.copied(sample, copies))
    try:
        guards.check(dict(zip(_names(op, got), got)))
    except AssertionError as e:
        raise AssertionError(f"{what}, {_shapes(sample)}: {e}") from None
    _within(worst_of(_names(op, got), got, wanted), what, sample)


def _within(worst: Worst, what: str, sample: Sequence[Any]) -> float:
    """Return an error. Raises AssertionError if it is more than is allowed."""
    if worst.error > worst.allowed:
        raise AssertionError(f"{what}, {_shapes(sample)}: {worst.description}")
    return worst.error


def _largest_by_class(samples: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the largest sample of each combination of dtypes and ranks that is not too large."""
    sizes = [sum(tensor.numel() for tensor in tensors_in(sample)) for sample in samples]
    sized = [(size, n) for n, size in enumerate(sizes) if size <= _LONGEST]
    kinds = {
        tuple((t.dtype, t.dim()) for t in tensors_in(samples[n])): samples[n]
        for _, n in sorted(sized)
    }
    yield from kinds.values()


def _laid_out(op: Op, sample: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...], Expected]]:
    """Yield the other layout in words, the sample with it, and the expected result."""
    changed = [name for _, name in op.signature.changed]
    own = _expected(op, sample)
    for at, (argument, value) in enumerate(zip(op.signature.arguments, sample)):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        for layout, tensor in _layouts(value):
            expanded = layout == "expanded"
            if expanded and (argument.name in changed or not value.is_floating_point()):
                continue  # its elements would share memory, or be other indices
            other = (*sample[:at], tensor, *sample[at + 1 :])
            what = f"`{argument.name}` {layout}, with strides {[*tensor.stride()]}"
            yield what, other, _expected(op, other) if expanded else own


def _layouts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of a tensor with other layouts; `expanded` repeats some of its values."""

    def placed(strides: Sequence[int], offset: int = 0) -> torch.Tensor:
        span = sum((size - 1) * step for size, step in zip(tensor.shape, strides)) + 1
        memory = torch.zeros(offset + span, dtype=tensor.dtype, device=tensor.device)
        return memory.as_strided(tensor.shape, strides, offset).copy_(tensor)

    if not tensor.numel():
        return
    dense = torch.empty(tensor.shape, device="meta").stride()
    if tensor.squeeze().dim() > 1:
        yield "transposed", placed(torch.empty(tensor.shape[::-1], device="meta").stride()[::-1])
    longer = [d for d, size in enumerate(tensor.shape) if size > 1]
    if longer:
        yield "sliced", placed([2 * step for step in dense])
        yield "expanded", tensor.narrow(longer[0], 0, 1).expand_as(tensor)
    yield "offset", placed(dense, 1)


class Expected(NamedTuple):
    """The results that an op must give for a sample: the reference's, and those in float64.

    coarsest: the dtype in which roundings of gradients are counted; else that of each tensor.
    """

    own: list[torch.Tensor]
    precise: list[torch.Tensor]
    coarsest: torch.dtype | None = None


class Worst(NamedTuple):
    """The number that is farthest from the reference in float64, in roundings of its dtype.

    description: its index, what was got and expected, the limit, how many numbers are beyond it.
    """

    error: float
    allowed: float
    description: str


def _expected(op: Op, sample: Sequence[Any]) -> Expected:
    own = want = _results(op, op.run_reference, copied(sample))
    with contextlib.suppress(Exception):  # the reference takes no float64
        want = _results(op, op.run_reference, copied(sample, torch.float64))
    return Expected(own, [_wanted(a, b) for a, b in zip(own, want)])


def compared(op: Op, sample: Sequence[Any], wanted: Expected | None = None) -> Worst:
    """Return the number of the op's results on a sample that is farthest from the reference."""
    got = _results(op, op, launch.measure.copied(sample, {}))
    return worst_of(_names(op, got), got, wanted or _expected(op, sample))


def worst_of(names: Sequence[str], got: list[torch.Tensor], wanted: Expected) -> Worst:
    """Return the number of some results that is farthest from what is expected.

    Results of another shape or dtype are infinitely far.
    """
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in wanted.own]:
        return Worst(math.inf, 0.0, f"gave {_shapes(got)}, the reference {_shapes(wanted.own)}")
    worst = Worst(0.0, ROUNDINGS, "")
    for name, a, own, want in zip(names, got, wanted.own, wanted.precise):
        if not a.numel():
            continue
        dtype = wanted.coarsest or a.dtype
        unit = _rounding(want, dtype, of_gradient=wanted.coarsest is not None)
        errors = _errors(a, want, unit)
        error, of_reference = float(errors.max()), float(_errors(own, want, unit).max())
        allowed = max(_OF_SUMS if dtype in _SUMMED else ROUNDINGS, ROUNDINGS * of_reference)
        if error / allowed <= worst.error / worst.allowed:
            continue
        index = tuple(map(int, torch.unravel_index(errors.argmax(), errors.shape)))
        values, limit = [a[index].item(), want[index].item()], 0.0
        texts = [*map(str, values)]
        if isinstance(values[0], (float, complex)):
            limit = allowed * float(unit[index])
            short = [f"{value:.9g}" for value in values]
            texts = short if short[0] != short[1] else texts
        at = f"[{', '.join(map(str, index))}]" if index else ""
        wrong = f"{int((errors > allowed).sum())} wrong of {counted(errors.numel(), 'number')}"
        told = f"{name}{at}: got {texts[0]}, expected {texts[1]}, limit {limit:.3g}; {wrong}"
        worst = Worst(error, allowed, told)
    return worst


def _names(op: Op, results: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of the tensors that `_results` returns."""
    names = [*op.signature.outputs, *(name for _, name in op.signature.changed)]
    if len(names) != len(results):  # a list is among the results
        return [f"tensor {number}" for number in range(len(results))]
    return names


def _results(op: Op, function: Callable[..., Any], sample: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that a function returns, and those that it changes in place."""
    args, kwargs = op.signature.complete(*op.signature.split(sample))
    result = function(*args, **kwargs)
    ordered = op.signature.in_order(args, kwargs)
    return tensors_in([result, *(ordered[position] for position, _ in op.signature.changed)])


def copied(sample: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the arguments with copied tensors, floating-point ones converted to a dtype."""
    if isinstance(sample, (list, tuple)):
        return type(sample)(copied(item, dtype) for item in sample)
    if not isinstance(sample, torch.Tensor):
        return sample
    clone = sample.detach().clone()
    return clone.to(dtype) if dtype and clone.is_floating_point() else clone


def _wanted(own: torch.Tensor, precise: torch.Tensor) -> torch.Tensor:
    """Return the numbers to compare with: the precise ones, but for those that its dtype lacks.

    own: what the reference gives in the dtype of the sample: integers, infinity and NaN count.
    """
    if not (own.is_floating_point() or own.is_complex()):
        return own
    widest = torch.complex128 if own.is_complex() else torch.float64
    own = own.to(widest)  # numbers of 8 bits have no isfinite()
    return torch.where(own.isfinite(), precise.to(widest), own)


def _errors(got: torch.Tensor, want: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return the error of each number in roundings: infinite for NaN, and integers that differ."""
    a = got.to(want.dtype)
    same = (a == want) | (a.isnan() & want.isnan())
    errors = torch.where(same, 0.0, (a - want).abs() / unit if unit.any() else math.inf)
    return torch.where(errors.isnan(), math.inf, errors)


def _rounding(want: torch.Tensor, dtype: torch.dtype, *, of_gradient: bool) -> torch.Tensor:
    """Return how large a rounding is at each number: that of the number and of a usual one.

    The usual one is the median, at least 1. In 16 bits it is the largest, from 0.001 to 1. Of
    gradients, which may be sums, it is the largest, if that is more.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(want.shape, device=want.device)
    sizes, usual = want.abs(), 1.0
    finite = sizes[sizes.isfinite()].double()
    if finite.numel():
        largest, median = float(finite.max()), float(finite.median())
        usual = min(1.0, max(_SMALL, largest)) if dtype in _HALVES else max(1.0, median)
        usual = max(usual, largest) if of_gradient else usual
    return (sizes + usual) * torch.finfo(dtype).eps


def _shapes(values: Sequence[Any]) -> str:
    """Return the arguments in words: of a tensor its dtype and shape."""
    texts = [
        f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
        if isinstance(value, torch.Tensor)
        else f"[{_shapes(value)[1:-1]}]"
        if isinstance(value, list)
        else str(value)
        for value in values
    ]
    return f"({', '.join(texts)})"


def _few(samples: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield number and values of the first samples of each combination of dtypes."""
    seen: dict[Any, int] = {}
    for number, sample in enumerate(samples, 1):
        dtypes = tuple(tensor.dtype for tensor in tensors_in(sample))
        seen[dtypes] = seen.get(dtypes, 0) + 1
        if seen[dtypes] <= _MOST:
            yield number, sample


def _opcheck(op: Op, samples: Sequence[tuple[Any, ...]]) -> str:
    """Run `torch.library.opcheck`, with gradients too where the op has some."""
    count = 0
    for number, sample in _few(samples):
        args, kwargs = op.signature.complete(*op.signature.split(copied(sample)))
        try:
            torch.library.opcheck(op.overload, args, kwargs)
            if op.gradient:
                torch.library.opcheck(op.overload, leaves(op, args), kwargs)
        except Exception as e:
            test = _FAILED.match(str(e))
            where = f"{test[1]}, " if test else ""
            where += f"sample {number}, {_shapes(sample)}"
            text = f"{_message_with_line(op, e.__cause__ or e)}\nin {where}"
            text = _MUTATED.sub(r"\g<0>: write `Tensor(a!) \1` in the schema, or copy it", text)
            raise AssertionError(_problem_of_fake(op, args, kwargs) + text) from e
        count += 1
    return f"{count} of {counted(len(samples), 'sample')}"


def _problem_of_fake(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return what the op's own fake raises for a call, and where; "" if it returns.

    Torch hands its errors on as texts alone.
    """
    fake = op.declaration.fake
    if not fake:
        return ""
    metas = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    try:
        fake(*metas, **kwargs)
    except Exception as e:  # noqa: BLE001  whatever its author's code raises
        return f"{error_site(e, fake)}its fake raises {type(e).__name__}: {e}; "
    return ""


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


def _gradient(op: Op, samples: Sequence[tuple[Any, ...]]) -> str:
    """Compare the gradients with those of autograd through the reference, in float64.

    A rounding is one of the coarsest dtype of the call, in which a forward pass keeps what it found
    for the backward. Samples in float64 alone are left to `_gradcheck`.
    """
    if not op.declaration.reference:
        raise _Untried("the op has no reference")
    count, largest = 0, 0.0
    for number, sample in enumerate(samples, 1):
        floats = [t.dtype for t in tensors_in(sample) if t.is_floating_point()]
        if {*floats} <= {torch.float64}:
            continue
        try:
            own = _gradients(op, op.run_reference, sample)
            want = _gradients(op, op.run_reference, sample, torch.float64)
        except Exception as e:
            raise _Untried(f"autograd cannot follow the reference: {_message(e)}") from e
        if not own:
            continue
        precise = [_wanted(a, b) for a, b in zip(own.values(), want.values())]
        coarsest = max(floats, key=lambda dtype: torch.finfo(dtype).eps)
        wanted = Expected([*own.values()], precise, coarsest)
        got = _gradients(op, op, sample)
        worst = worst_of([*own], [*got.values()], wanted)
        largest = max(largest, _within(worst, f"sample {number}", sample))
        count += 1
    if not count:
        raise _Untried("no sample of less than float64 through which its reference has a gradient")
    return f"{counted(count, 'sample')}, max error {largest:.2f} eps"


def _gradients(
    op: Op, function: Callable[..., Any], sample: Sequence[Any], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the gradients of a function with the op's arguments, the same at each call."""
    args, kwargs = op.signature.complete(*op.signature.split(copied(sample, dtype)))
    inputs = leaves(op, args)
    names = [argument.name for argument in op.signature.arguments]
    given = {
        f"the gradient of `{name}`": value
        for name, value in zip(names, inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    random = torch.Generator().manual_seed(0)
    ends, starts = [], []
    for result in tensors_in([function(*inputs, **kwargs)]):
        start = torch.randint(-8, 9, result.shape, generator=random) / 4  # every dtype has these
        if result.requires_grad:
            ends.append(result)
            starts.append(start.to(result))
    if not ends or not given:
        return {}
    found = torch.autograd.grad(ends, [*given.values()], starts, allow_unused=True)
    zeroed = (torch.zeros_like(a) if g is None else g for g, a in zip(found, given.values()))
    return dict(zip(given, zeroed))


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
        try:
            torch.autograd.gradcheck(lambda *a, k=kwargs: op(*a, **k), inputs, fast_mode=True)
        except GradcheckError as e:  # more than its beginning is long
            raise AssertionError(str(e).partition("\n\n")[0]) from e
    return f"{len(fitting)} of {counted(len(samples), 'sample')}"
