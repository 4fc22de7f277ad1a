"""Checks of an op over its samples: each kernel against the reference, and Torch's own checks."""

from __future__ import annotations

import contextlib
import functools
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

# A kernel may be this many rounding errors away from the reference in float64, or this many times
# as far as the reference itself is in the dtype of the sample.
ROUNDINGS = 4.0
EXACT = 2.0  # the same where rounding is all that a kernel in 16 bits has to do
_HALVES = (torch.float16, torch.bfloat16)
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
        begin(OpCheck(op.name, device, kind, name, None, ""))
        return _row(op, device, kind, name, check, *rest)

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
            kind = source.kind
            about = samples, device, source, call_of(device, kind)
            row = row_of(device, kind, "reference", _reference, *about)
            rows.append(row)
            yield row
        untried = ""
        if any(row.ok is False for row in rows):  # it would fail again
            untried = _AFTER_FAILED
        elif op.declaration.reference and not any(row.ok for row in rows):
            untried = f"no kernel ran: {rows[0].note}"  # it would see the reference alone
        if untried:
            for name in ("opcheck", "gradient", "gradcheck") if op.gradient else ("opcheck",):
                yield OpCheck(op.name, device, "", name, None, untried)
            continue
        yield row_of(device, "", "opcheck", _opcheck, samples)
        wrong = False
        for check in (_gradient, _gradcheck) if op.gradient else ():  # also after a failed opcheck,
            name = check.__name__[1:]  # which tells of a wrong gradient without its numbers
            row = OpCheck(op.name, device, "", name, None, _AFTER_FAILED)
            row = row if wrong else row_of(device, "", name, check, samples)
            wrong = row.ok is False
            yield row


def _samples(op: Op, device: str) -> tuple[list[tuple[Any, ...]], str]:
    """Return the samples, or what is wrong with them."""
    try:
        samples = op.sample_inputs(device)
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
        return [], error_site(e, op.declaration.samples) + _told(e)
    problems = filter(None, (op.problem_of(n, sample) for n, sample in enumerate(samples, 1)))
    none = "they yield no calls" if op.declaration.samples else "none: add `@op.samples`"
    return samples, next(problems, "" if samples else none)


def _row(
    op: Op, device: str, kind: str, name: str, check: Callable[..., str], *rest: Any
) -> OpCheck:
    """Return the row of a check, which returns a remark, or raises for what is wrong."""
    try:
        return OpCheck(op.name, device, kind, name, True, check(op, *rest))
    except (CompilerNotFound, TargetError, _Untried) as e:
        return OpCheck(op.name, device, kind, name, None, _told(e))
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
        return OpCheck(op.name, device, kind, name, False, _told_with_line(op, e))


class _Untried(Exception):
    """A check that does not fit the op."""


def _told(e: BaseException) -> str:
    plain = isinstance(e, (JitkernError, AssertionError, _Untried))
    return str(e).strip() if plain else f"{type(e).__name__}: {e}".strip()


def _told_with_line(op: Op, e: BaseException) -> str:
    """Return what a check raised, behind the line of the op's own file if that has raised it."""
    file = op.place.partition(":")[0]
    frames = traceback.walk_tb(e.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    if not lines or isinstance(e, JitkernError):
        return _told(e)
    return f"{file}:{lines[-1]}: {type(e).__name__}: {e}".rstrip(": ")


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
    layouts = [case for sample in _largest_of_each(samples) for case in _laid_out(op, sample)]
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
                        raise AssertionError(f"{what}: {_told(e)}") from e
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
        raise AssertionError(_told_with_line(op, e) + where) from e


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
            return op.backends[device].implementation(args, kwargs)

    got = _results(op, call, launch.measure.copied(sample, copies))
    try:
        guards.check(dict(zip(_names(op, got), got)))
    except AssertionError as e:
        raise AssertionError(f"{what}, {_shapes(sample)}: {e}") from None
    _within(worst_of(_names(op, got), got, wanted), what, sample)


def _within(worst: Worst, what: str, sample: Sequence[Any]) -> float:
    """Return an error. Raises AssertionError if it is more than is allowed."""
    if worst.error > worst.allowed:
        raise AssertionError(f"{what}, {_shapes(sample)}: {worst.told}")
    return worst.error


def _largest_of_each(samples: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
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

    exact: whether each number follows from one number of each argument, in a dtype of 16 bits, and
    the reference errs by its rounding alone. A kernel must then be as good.
    epsilon: of the dtype in which a rounding is counted; by default, that of each tensor.
    terms: gives how large the terms of a number are, by its tensor and index; see `_terms`.
    other: a rounding at a number is that of the number and of this one.
    """

    own: list[torch.Tensor]
    precise: list[torch.Tensor]
    exact: bool = False
    epsilon: float | None = None
    terms: Callable[[int, tuple[int, ...]], float] | None = None
    other: float = 1.0


class Worst(NamedTuple):
    """The number that is farthest from the reference in float64, in roundings of its dtype.

    told: its index, what was got and expected, the limit, and how many numbers are beyond it.
    """

    error: float
    allowed: float
    told: str


def _expected(op: Op, sample: Sequence[Any]) -> Expected:
    own = want = _results(op, op.run_reference, copied(sample))
    pointwise = False
    with contextlib.suppress(Exception):  # the reference takes no float64
        want = _results(op, op.run_reference, copied(sample, torch.float64))
        pointwise = all(t.dtype in _HALVES for t in own) and _is_pointwise(op, sample, want)
    wanted = Expected(own, [_wanted(a, b) for a, b in zip(own, want)], exact=pointwise)
    terms = functools.partial(_terms, op, sample)
    return wanted._replace(exact=pointwise and _largest(wanted) <= 1, terms=terms)


def _terms(op: Op, sample: Sequence[Any], number: int, index: tuple[int, ...]) -> float:
    """Return how large the terms are that add up to a number of the results, at least 1.

    That is the sum of |x * dy/dx| over the numbers x of the arguments. Rounding these n terms once
    changes y by no more roundings, and adding them one after the other by about sqrt(n) / 2 times
    as much: Higham and Mary, A new approach to probabilistic rounding error analysis, 2019. Equal
    terms, as those of an expanded tensor, round alike: by n / 2 times as much.
    """
    with contextlib.suppress(Exception):  # autograd cannot follow the reference
        inputs = copied(sample, torch.float64)
        leaves = [t.requires_grad_() for t in tensors_in(inputs) if t.is_floating_point()]
        y = _results(op, op.run_reference, inputs)[number][index]
        found = torch.autograd.grad(y, leaves, allow_unused=True)
        terms = [(x * g).detach().abs() for x, g in zip(leaves, found) if g is not None]
        many = sum(int(term.count_nonzero()) for term in terms)
        total = sum(float(term.sum()) for term in terms)
        alike = any(0 in tensor.stride() for tensor in tensors_in(sample))
        growth = (many if alike else math.sqrt(many)) / 2 / ROUNDINGS
        if math.isfinite(total):
            return max(1.0, total * max(1.0, growth))
    return 1.0


def _is_pointwise(op: Op, sample: Sequence[Any], want: list[torch.Tensor]) -> bool:
    """Whether the results are as large as the largest tensors, and follow them number by number."""
    other = copied(sample, torch.float64)
    largest = max((t.numel() for t in tensors_in(other)), default=0)
    if not largest or any(t.numel() != largest for t in want):
        return False
    for tensor in tensors_in(other):
        if tensor.numel() == largest and tensor.is_floating_point():
            tensor[(0,) * tensor.dim()] += 1
    pairs = zip(_results(op, op.run_reference, other), want)
    return all(int((a != b).sum()) == 1 for a, b in pairs)


def _largest(wanted: Expected) -> float:
    """Return the largest error of the reference itself."""
    pairs = zip(wanted.own, wanted.precise)
    errors = [float(_errors(a, b, wanted).max()) for a, b in pairs if a.numel()]
    return max(errors, default=0.0)


def compared(op: Op, sample: Sequence[Any], wanted: Expected | None = None) -> Worst:
    """Return the number of the op's results on a sample that is farthest from the reference."""
    got = _results(op, op, launch.measure.copied(sample, {}))
    return worst_of(_names(op, got), got, wanted or _expected(op, sample))


def worst_of(names: Sequence[str], got: list[torch.Tensor], wanted: Expected) -> Worst:
    """Return the number of some results that is farthest from what is expected.

    Results of another shape or dtype are infinitely far.
    """
    own, want = wanted.own, wanted.precise
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in own]:
        return Worst(math.inf, 0.0, f"gave {_shapes(got)}, the reference {_shapes(own)}")
    allowed = EXACT if wanted.exact else ROUNDINGS * max(1.0, _largest(wanted))
    worst = Worst(0.0, allowed, "")
    for number, (name, a, b) in enumerate(zip(names, got, want)):
        errors = _errors(a, b, wanted)
        scaled = wanted
        if wanted.terms and a.dtype not in _HALVES and bool((errors > allowed).any()):
            scaled = wanted._replace(other=wanted.terms(number, _index_of_worst(errors)))
            errors = _errors(a, b, scaled)
        if errors.numel() and (error := float(errors.max())) > worst.error:
            worst = Worst(error, allowed, name + _told_of(errors, a, b, scaled, allowed))
    return worst


def _names(op: Op, results: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of the tensors that `_results` returns."""
    names = [*op.signature.outputs, *(name for _, name in op.signature.changed)]
    if len(names) != len(results):  # a list is among the results
        return [f"tensor {number}" for number in range(len(results))]
    return names


def _told_of(
    errors: torch.Tensor, got: torch.Tensor, want: torch.Tensor, wanted: Expected, allowed: float
) -> str:
    """Return the index of the largest error, what was got and expected there, and the limit."""
    index = _index_of_worst(errors)
    a, b = got[index].item(), want[index].item()
    told, limit = f"got {a}, expected {b}", 0.0
    if got.is_floating_point() or got.is_complex():
        texts = f"{a:.9g}", f"{b:.9g}"
        told = "got {}, expected {}".format(*(texts if texts[0] != texts[1] else (a, b)))
        limit = allowed * float(_roundings(want, got.dtype, wanted)[index])
    at = f"[{', '.join(map(str, index))}]" if index else ""
    wrong = f"{int((errors > allowed).sum())} wrong of {counted(errors.numel(), 'number')}"
    return f"{at}: {told}, limit {limit:.3g}; {wrong}"


def _index_of_worst(errors: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(int, torch.unravel_index(errors.argmax(), errors.shape)))


def _results(op: Op, function: Callable[..., Any], sample: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that a function returns, and those that it changes in place."""
    args, kwargs = op.signature.complete(*op.signature.split(sample))
    result = function(*args, **kwargs)
    ordered = op.signature.in_order(args, kwargs)
    return tensors_in([result, *(ordered[position] for position, _ in op.signature.changed)])


def copied(sample: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Return the arguments with copied tensors, floating-point ones converted to a dtype."""

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


def _errors(got: torch.Tensor, want: torch.Tensor, wanted: Expected) -> torch.Tensor:
    """Return the error of each number in roundings: infinite for NaN, and integers that differ."""
    if not (got.is_floating_point() or got.is_complex()):
        return torch.where(got == want.to(got.dtype), 0.0, math.inf)
    precise = torch.complex128 if got.is_complex() else torch.float64
    a, b = got.to(precise), want.to(precise)
    same = (a == b) | (a.isnan() & b.isnan())
    errors = torch.where(same, 0.0, (a - b).abs() / _roundings(b, got.dtype, wanted))
    return torch.where(errors.isnan(), math.inf, errors)


def _roundings(want: torch.Tensor, dtype: torch.dtype, wanted: Expected) -> torch.Tensor:
    """Return how large a rounding is at each number: that of the number and of another one.

    The other is 1, or how large the terms are. In 16 bits it is the largest of these numbers, if
    that is less, and where results are exact a sixteenth of it. For gradients, which may be sums,
    it is the largest, if that is more.
    """
    sizes, other = want.abs(), wanted.other
    if (finite := sizes[sizes.isfinite()]).numel():
        largest = float(finite.max())
        if dtype in _HALVES:
            other = min(1.0, max(_SMALL, largest)) / (16 if wanted.exact else 1)
        if wanted.epsilon:
            other = max(other, largest)
    return (sizes + other) * (wanted.epsilon or torch.finfo(dtype).eps)


def _shapes(values: Sequence[Any]) -> str:
    return f"({', '.join(map(_shape, values))})"


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    return f"[{', '.join(map(_shape, value))}]" if isinstance(value, list) else str(value)


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
            text = f"{_told_with_line(op, e.__cause__ or e)}\nin {where}"
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
            raise _Untried(f"autograd cannot follow the reference: {_told(e)}") from e
        if not own:
            continue
        epsilon = max(torch.finfo(dtype).eps for dtype in floats)
        precise = [_wanted(a, b) for a, b in zip(own.values(), want.values())]
        wanted = Expected([*own.values()], precise, exact=False, epsilon=epsilon)
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
