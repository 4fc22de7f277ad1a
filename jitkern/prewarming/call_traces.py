"""Make the records that calls need, by tracing them on meta tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from jitkern.cache.entry import Entry
from jitkern.calls.signature import class_of
from jitkern.errors import JitkernError, NotCached, error_site
from jitkern.launch.autotune import choices_of
from jitkern.launch.call import Call, all_configurations
from jitkern.launch.runner import CachedKernels
from jitkern.launch.symbols import Unsupported
from jitkern.launch.tuned import Tuned
from jitkern.named_tuple import NamedTuple
from jitkern.op.needed_kernels import runs_of
from jitkern.op.op import Op
from jitkern.runtime.records import CallClass
from jitkern.source.kinds import ITSELF, Source, Variant
from jitkern.target import Target
from jitkern.trace import trace
from jitkern.trace.tracer import metadata_of


class TracedCall(NamedTuple):
    """A trace that a sample uses, and the class of calls that it is for."""

    trace: trace.Traced
    calls: CallClass


class Traces(NamedTuple):
    """The traces that calls use.

    reasons: why other calls keep the Python launcher. without: the calls that have no trace, for
    these reasons or because a kernel of theirs is not in the cache.
    """

    traces: Sequence[TracedCall]
    reasons: Sequence[str]
    without: Sequence[tuple[Any, ...]]


def refused_by(
    op: Op,
    source: Source,
    target: Target,
    calls: Iterable[tuple[Any, ...]],
    entries: dict[Variant, Entry],
) -> list[str]:
    """Return why calls cannot launch their kernels: the messages that the calls would raise.

    The launch function runs in Python, up to each launch. Kernels that are not in the cache are
    left out. Of several configurations, one that fits is enough. entries: see `CachedKernels`.
    """
    kernels = CachedKernels(op.name, source, target, "", entries)

    def check(call: Call) -> None:
        for expansion in all_configurations(op.name, source, call, target):
            with contextlib.suppress(NotCached):
                kernels.check(expansion)

    reasons: dict[str, None] = {}
    for call in calls:
        refused = []
        for run in runs_of(op, source, target.device, call, target):
            try:
                run(check)
            except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
                text = str(e) if isinstance(e, JitkernError) else f"{type(e).__name__}: {e}"
                refused.append(f"{error_site(e, op.launch_function(source, target.device))}{text}")
            else:
                break
        else:
            reasons[refused[0]] = None
    return list(reasons)


def traces_of(
    op: Op,
    source: Source,
    target: Target,
    calls: Sequence[tuple[Any, ...]],
    entries: dict[Variant, Entry],
) -> Traces:
    """Trace calls. entries: see `CachedKernels`."""
    if source.runs == ITSELF or not calls:
        return Traces([], [], [])
    if op.signature.parameters is None:
        reason = f"its schema has types that only Python passes: {op.schema}"
        return Traces([], [reason], calls)
    traces: dict[tuple[Any, ...], TracedCall] = {}
    reasons: dict[str, None] = {}
    without = []
    models = {""}  # the device models that have chosen among the op's configurations, if any
    if source.declares or isinstance(op.launch_function(source, target.device), Tuned):
        models = {str(c["model"]) for _, c in choices_of(op.name, source, target)} or models
    known = [CachedKernels(op.name, source, target, m, entries) for m in sorted(models)]
    for call in calls:
        refused, traced = [], False
        for kernels in known:
            try:
                one = _traced(op, source, target, kernels, call)
            except Unsupported as e:
                refused.append(str(e))
            except NotCached:
                continue  # its kernel failed to build, or was not built yet
            else:
                references = tuple(kernel.reference for kernel in one.trace.kernels)
                key = one.trace.program, references, one.calls.call, one.trace.model
                traces[key], traced = one, True
        if len(refused) == len(known):
            reasons[refused[0]] = None
        if not traced:
            without.append(call)
    return Traces([*traces.values()], [*reasons], without)


def _traced(
    op: Op, source: Source, target: Target, kernels: CachedKernels, call: tuple[Any, ...]
) -> TracedCall:
    """Return the trace for calls like this one. Raises Unsupported, NotCached."""
    args, kwargs = op.signature.complete(*op.signature.split(call))
    descriptions = metadata_of(op.signature.in_order(args, kwargs))
    device = torch.device("cuda:0" if target.device == "cuda" else "cpu")
    function = op.launch_function(source, target.device)
    keywords = frozenset(kwargs)
    traced = trace.trace(op.signature, function, descriptions, keywords, device, kernels)
    calls = CallClass(op.signature, function, source, target, device, class_of(descriptions))
    return TracedCall(traced, calls)
