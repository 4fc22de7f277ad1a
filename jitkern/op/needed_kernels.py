"""Which kernels calls need, found on meta tensors, for any target, without its device."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitkern import trace
from jitkern.calls.samples import Sample, ShapesAlone
from jitkern.errors import DeclarationError, JitkernError
from jitkern.launch.autotune import configs_of
from jitkern.launch.call import Call, every_expansion, variant_of
from jitkern.launch.kernels import Choose, Kernels, check_result
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import ITSELF, Source, Variant

if TYPE_CHECKING:
    from jitkern.op.op import Op


class Unit(NamedTuple):
    """Calls that use the same kernels, and those kernels; for an Extension there are no calls."""

    variants: tuple[Variant, ...]
    calls: list[tuple[Any, ...]]


class Needs(NamedTuple):
    """What the calls of one source of an op need.

    calls: those of which it is known. problems: why it is not, of the others.
    """

    variants: Sequence[Variant]
    calls: Sequence[tuple[Any, ...]]
    problems: Sequence[str]


def needs_of(op: Op, source: Source, device: str) -> Needs:
    """What the samples need of `source`."""
    samples = [Sample("")] if source.runs == ITSELF else op.prewarm_samples()
    units, problems = units_of(op, source, device, samples)
    variants = dict.fromkeys(variant for unit in units for variant in unit.variants)
    return Needs(list(variants), [call for unit in units for call in unit.calls], problems)


def units_of(
    op: Op, source: Source, device: str, samples: Sequence[Sample]
) -> tuple[list[Unit], list[str]]:
    """The samples by the kernels of `source` that they use, and why that of others is not known."""
    if source.runs == ITSELF:
        return [Unit((Variant(op.name, source),), [])] if samples else [], []
    units: dict[frozenset[Variant], Unit] = {}
    problems: dict[str, None] = {}
    for sample in samples:
        used: dict[Variant, None] = {}
        problem = sample.problem or _problem(op, source, device, sample, used)
        if problem:
            problems[f"{op.name}: {problem}"] = None
        else:
            unit = units.setdefault(frozenset(used), Unit(tuple(used), []))
            unit.calls.append(sample.args)
    return list(units.values()), list(problems)


def _problem(op: Op, source: Source, device: str, sample: Sample, used: dict[Variant, None]) -> str:
    """Note which variants a sample uses; why that is not known, or ""."""
    try:
        for run in runs_of(op, source, device, sample.args):
            run(_noting(op, source, used.setdefault))
    except DeclarationError as e:
        return str(e)
    except Exception as e:  # noqa: BLE001  whatever its author's code raises
        said = str(e) if isinstance(e, JitkernError) else f"{type(e).__name__}: {e}"
        place = trace.trace.place_of(e, op.written(source, device))
        return f"{place}its launch function failed on {sample.origin}: {said}"
    return ""


def runs_of(
    op: Op, source: Source, device: str, sample: tuple[Any, ...]
) -> Iterator[Callable[[Callable[[Call], None]], None]]:
    """What runs the launch function on a sample, once for each of its configurations.

    It is told what a launch is to do instead. Raises DeclarationError, and what the launch function
    raises.
    """
    launcher = op.launcher(source, device)
    args, kwargs = op.split(sample)
    with ShapesAlone():
        configs = configs_of(launcher, args, kwargs) if isinstance(launcher, Tuned) else [None]
    for config in configs:
        choose = None if config is None else lambda *_, config=config: config

        def run(start: Callable[[Call], None], choose: Choose | None = choose) -> None:
            with ShapesAlone():
                result = launcher(Kernels(start, choose), *args, **kwargs)
            check_result(op.name, launcher, op.returned, result)

        yield run


def _noting(op: Op, source: Source, tell: Callable[[Variant], Any]) -> Callable[[Call], None]:
    """What a launch function that only tells which variants it would use starts."""

    def note(call: Call) -> None:
        for one in every_expansion(op.name, source, call):
            tell(variant_of(op.name, source, one)[0])

    return note


def digest_of(op: Op, source: Source, device: str, call: tuple[Any, ...]) -> str:
    """The same on every machine for calls that use the same kernels."""
    used: set[str] = set()
    if source.runs != ITSELF:
        note = _noting(op, source, lambda variant: used.add(repr(variant[2:])))
        with contextlib.suppress(Exception):  # whatever its author's code raises: prewarm tells
            for run in runs_of(op, source, device, call):
                run(note)
    return hashlib.sha256(repr((op.name, sorted(used))).encode()).hexdigest()
