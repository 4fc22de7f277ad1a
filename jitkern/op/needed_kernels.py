"""Find which kernels a set of calls needs, by running launch functions on meta tensors."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.calls.samples import Sample, ShapesAlone
from jitkern.errors import DeclarationError, JitkernError, called_at, raised_at, told
from jitkern.launch.autotune import configs_of
from jitkern.launch.call import Call, every_expansion, variant_of
from jitkern.launch.kernels import Choose, Kernels, check_result
from jitkern.launch.resources.device_view import AbsentDevice
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import ITSELF, Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.op.op import Op


class Unit(NamedTuple):
    """Kernels, and the calls that use all of them; without calls for an Extension.

    variants: each with the line that launches it, `kernel.py:19: `.
    """

    variants: dict[Variant, str]
    calls: list[tuple[Any, ...]]


class Needs(NamedTuple):
    """The kernels that the calls of one source of an op need.

    calls: the calls whose kernels are known. problems: why the kernels of others are unknown.
    """

    variants: Sequence[Variant]
    calls: Sequence[tuple[Any, ...]]
    problems: Sequence[str]


def needs_of(op: Op, source: Source, device: str, target: Target | None = None) -> Needs:
    """Return the kernels of `source` that the samples need, for a target or for any."""
    samples = [Sample("")] if source.runs == ITSELF else op.prewarm_samples()
    units, problems = units_of(op, source, device, samples, target)
    variants = dict.fromkeys(variant for unit in units for variant in unit.variants)
    return Needs(list(variants), [call for unit in units for call in unit.calls], problems)


def units_of(
    op: Op, source: Source, device: str, samples: Sequence[Sample], target: Target | None = None
) -> tuple[list[Unit], list[str]]:
    """Group the samples by the kernels of `source` that they use; also return the problems."""
    if source.runs == ITSELF:
        return [Unit({Variant(op.name, source): ""}, [])] if samples else [], []
    units: dict[frozenset[Variant], Unit] = {}
    problems: dict[str, None] = {}
    for sample in samples:
        used: dict[Variant, str] = {}
        problem = sample.problem or _problem(op, source, device, sample, used, target)
        if problem:
            problems[told(problem, op.name)] = None
        else:
            unit = units.setdefault(frozenset(used), Unit(used, []))
            unit.calls.append(sample.args)
    return list(units.values()), list(problems)


def _problem(
    op: Op, source: Source, device: str, sample: Sample, used: dict[Variant, str],
    target: Target | None,
) -> str:  # fmt: skip
    """Add the variants that a sample uses to `used`; return why they are unknown, or ""."""

    def add(variant: Variant) -> None:
        used.setdefault(variant, called_at(file))

    try:
        function = op.written(source, device)
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        for run in runs_of(op, source, device, sample.args, target):
            run(_variants_to(op, source, add))
    except DeclarationError as e:
        return told(str(e), op.name, op.place)
    except Exception as e:  # noqa: BLE001  whatever its author's code raises
        text = str(e) if isinstance(e, JitkernError) else f"{type(e).__name__}: {e}"
        return f"{raised_at(e, function)}its launch function failed on {sample.origin}: {text}"
    return ""


def runs_of(
    op: Op, source: Source, device: str, sample: tuple[Any, ...], target: Target | None = None
) -> Iterator[Callable[[Callable[[Call], None]], None]]:
    """Yield functions that run the launch function on a sample, one for each configuration.

    Each takes a function that replaces launches. The facts of a device are those usual for the
    target, by default the same for every machine. Raises DeclarationError; the yielded functions
    raise the errors of the launch function.
    """
    launcher = op.launcher(source, device)
    absent = AbsentDevice(target or (Target.current() if device == "cpu" else None))
    args, kwargs = op.signature.complete(*op.signature.split(sample))
    with ShapesAlone(device):
        configs = configs_of(launcher, args, kwargs) if isinstance(launcher, Tuned) else [None]
    for config in configs:
        choose = None if config is None else lambda *_, config=config: config

        def run(start: Callable[[Call], None], choose: Choose | None = choose) -> None:
            with ShapesAlone(device):
                result = launcher(Kernels(start, choose, absent), *args, **kwargs)
            check_result(op.name, launcher, op.signature.results, result)

        yield run


def _variants_to(op: Op, source: Source, add: Callable[[Variant], Any]) -> Callable[[Call], None]:
    """Return a replacement for launches that passes the variants of each launch to `add`."""

    def note(call: Call) -> None:
        for expansion in every_expansion(op.name, source, call):
            add(variant_of(op.name, source, expansion)[0])

    return note


def digest_of(op: Op, source: Source, device: str, call: tuple[Any, ...]) -> str:
    """Return a digest that is the same on every machine for calls that use the same kernels."""
    used: set[str] = set()
    if source.runs != ITSELF:
        note = _variants_to(op, source, lambda variant: used.add(repr(variant[2:])))
        with contextlib.suppress(Exception):  # prewarm reports what the author's code raises
            for run in runs_of(op, source, device, call):
                run(note)
    return hashlib.sha256(repr((op.name, sorted(used))).encode()).hexdigest()
