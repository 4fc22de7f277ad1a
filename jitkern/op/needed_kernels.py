"""Find which kernels a set of calls needs, by running launch functions on meta tensors."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.calls.samples import Sample, ShapesAlone
from jitkern.errors import DeclarationError, JitkernError, call_site, error_site, told
from jitkern.launch.autotune import configs_of
from jitkern.launch.call import Call, all_configurations, check_contiguous, variant_of
from jitkern.launch.kernels import Choose, Kernels, LeftToReference, check_result
from jitkern.launch.resources.device_view import AbsentDevice
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import ITSELF, Source, Variant
from jitkern.target import Target
from jitkern.trace.fast_check import with_fast_check

if TYPE_CHECKING:
    from jitkern.op.declaration import DeclaredOp


# The configurations of `.tune`; of each, the launches; of each, those of `@triton.autotune`.
Choices = list[list[list[Variant]]]


class NeededKernels(NamedTuple):
    """Kernels, and the calls that use all of them; without calls for an Extension.

    variants: each with the line that launches it, `kernel.py:19: `.
    choices: of each call, what one of its configurations is enough of.
    left_out: why the launch function refuses other configurations.
    """

    variants: dict[Variant, str]
    calls: list[tuple[Any, ...]]
    choices: list[Choices]
    left_out: dict[str, None]


class Needs(NamedTuple):
    """The kernels that the calls of one source of an op need.

    calls: the calls whose kernels are known. problems: why the kernels of others are unknown.
    """

    variants: Sequence[Variant]
    calls: Sequence[tuple[Any, ...]]
    problems: Sequence[str]


def needs_of(op: DeclaredOp, source: Source, device: str, target: Target | None = None) -> Needs:
    """Return the kernels of `source` that the samples need, for a target or for any."""
    samples = [Sample("")] if source.runs == ITSELF else op.prewarm_samples()
    units, problems = units_of(op, source, device, samples, target)
    variants = dict.fromkeys(variant for unit in units for variant in unit.variants)
    return Needs(list(variants), [call for unit in units for call in unit.calls], problems)


def units_of(
    op: DeclaredOp,
    source: Source,
    device: str,
    samples: Sequence[Sample],
    target: Target | None = None,
) -> tuple[list[NeededKernels], list[str]]:  # fmt: skip
    """Group the samples by the kernels of `source` that they use; also return the problems."""
    if source.runs == ITSELF:
        return [NeededKernels({Variant(op.name, source): ""}, [], [], {})] if samples else [], []
    units: dict[frozenset[Variant], NeededKernels] = {}
    problems: dict[str, None] = {}
    for sample in samples:
        used, choices, refused = (
            ({}, [], [sample.problem]) if sample.problem
            else _used(op, source, device, sample, target)
        )  # fmt: skip
        if choices:
            unit = units.setdefault(frozenset(used), NeededKernels(used, [], [], {}))
            unit.calls.append(sample.args)
            unit.choices.append(choices)
            unit.left_out.update(dict.fromkeys(refused))
        else:
            problems[told(refused[0], op.name)] = None
    return list(units.values()), list(problems)


def _used(
    op: DeclaredOp, source: Source, device: str, sample: Sample, target: Target | None
) -> tuple[dict[Variant, str], Choices, list[str]]:
    """Return the variants that a sample uses, with their lines, its choices, and what is refused.

    There are no choices if all configurations are refused.
    """
    used: dict[Variant, str] = {}
    choices: Choices = []
    refused: list[str] = []
    try:
        function = op.launch_function(source, device)
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        for run in runs_of(op, source, device, sample.args, target):
            launches: list[tuple[list[Variant], str]] = []

            def add(found: list[Variant], to: list[tuple[list[Variant], str]] = launches) -> None:
                to.append((found, call_site(file)))

            try:
                run(_variants_to(op, source, add, target))
            except DeclarationError:
                raise
            except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
                refused.append(_failure(e, function, sample))
                continue
            choices.append([variants for variants, _ in launches])
            for variants, place in launches:
                used |= {**dict.fromkeys(variants, place), **used}
    except DeclarationError as e:
        return {}, [], [told(str(e), op.name, op.place)]
    except Exception as e:  # noqa: BLE001  of `.tune`'s own functions
        return {}, [], [_failure(e, function, sample)]
    return used, choices, refused


def _failure(e: BaseException, function: Callable[..., Any], sample: Sample) -> str:
    text = str(e) if isinstance(e, JitkernError) else f"{type(e).__name__}: {e}"
    return f"{error_site(e, function)}its launch function failed on {sample.origin}: {text}"


def runs_of(
    op: DeclaredOp,
    source: Source,
    device: str,
    sample: tuple[Any, ...],
    target: Target | None = None,
) -> Iterator[Callable[[Callable[[Call], None]], None]]:  # fmt: skip
    """Yield functions that run the launch function on a sample, one for each configuration.

    Each takes a function that replaces launches. The facts of a device are those usual for the
    target, by default the same for every machine. Raises DeclarationError; the yielded functions
    raise the errors of the launch function.
    """
    launcher = with_fast_check(op.launch_function(source, device))
    absent = AbsentDevice(target or (Target.current() if device == "cpu" else None))
    args, kwargs = op.signature.complete(*op.signature.split(sample))
    with ShapesAlone(device):
        configs = configs_of(launcher, args, kwargs) if isinstance(launcher, Tuned) else [None]
    for config in configs:
        choose = None if config is None else lambda *_, config=config: config

        def run(start: Callable[[Call], None], choose: Choose | None = choose) -> None:
            with ShapesAlone(device):
                try:
                    result = launcher(Kernels(start, choose, absent), *args, **kwargs)
                except LeftToReference:
                    return
            check_result(op.name, launcher, op.signature.results, result)

        yield run


def _variants_to(
    op: DeclaredOp,
    source: Source,
    add: Callable[[list[Variant]], Any],
    target: Target | None = None,
) -> Callable[[Call], None]:
    """Return a replacement for launches that passes the variants of each launch to `add`."""

    def note(call: Call) -> None:
        check_contiguous(op.name, source, call)
        expansions = all_configurations(op.name, source, call, target)
        add([variant_of(op.name, source, e, target=target)[0] for e in expansions])

    return note


def digest_of(op: DeclaredOp, source: Source, device: str, call: tuple[Any, ...]) -> str:
    """Return a digest that is the same on every machine for calls that use the same kernels."""
    used: set[str] = set()
    if source.runs != ITSELF:
        note = _variants_to(op, source, lambda found: used.update(repr(v[2:6]) for v in found))
        with contextlib.suppress(Exception):  # prewarm reports what the author's code raises
            for run in runs_of(op, source, device, call):
                run(note)
    return hashlib.sha256(repr((op.name, sorted(used))).encode()).hexdigest()
