"""What an op's samples will need, found on meta tensors, for any target, without its device."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from jitkern.entry import Entry
from jitkern.errors import NotCached
from jitkern.kernel import Extension, Source, Variant
from jitkern.launch.linker import keep, stub_variant
from jitkern.launch.plans import Plans, situation_of
from jitkern.launch.python import CachedKernels, Kernels
from jitkern.launch.symbols import Unsupported
from jitkern.launch.trace import Traced, trace
from jitkern.launch.variants import Call, every_expansion, variant_of
from jitkern.register import Op
from jitkern.target import Target


class Stub(NamedTuple):
    """A stub that a sample uses, and the situation of that."""

    variant: Variant
    traced: Traced
    situation: tuple[str, ...]


def variants_of(op: Op, source: Source, device: str) -> list[Variant]:
    """The variants of `source` that the samples use."""
    if isinstance(source, Extension):
        recorded = op.recorded is None or op.prewarm_inputs(source, device)
        return [Variant(op.name, source)] if recorded else []
    found: dict[Variant, None] = {}
    note = _noting(op, source, found.setdefault)
    launcher = op.launcher(source, device)
    for sample in op.prewarm_inputs(source, device):
        args, kwargs = op.split(sample)
        launcher(Kernels(note), *args, **kwargs)
    return list(found)


def _noting(op: Op, source: Source, tell: Callable[[Variant], Any]) -> Callable[[Call], None]:
    """What a launch function that only tells which variants it would use starts."""

    def note(call: Call) -> None:
        for one in every_expansion(op.name, source, call):
            tell(variant_of(op.name, source, one)[0])

    return note


def keep_shard(op: Op, part: int, parts: int) -> None:
    """Leave to `op` those calls alone that part `part` (from 1) of `parts` is to make ready.

    What is split are the sets of kernels that calls use, so that one part builds a kernel, and the
    stubs and plans that need it. Every machine splits alike.
    """
    kept: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    for device, sources in op.sources.items():
        for source in sources:
            calls = [()] if isinstance(source, Extension) else op.prewarm_inputs(source, device)
            kept[device, source.kind] = [
                call for call in calls if _number_of(op, source, device, call) % parts == part - 1
            ]
    op.recorded = kept


def _number_of(op: Op, source: Source, device: str, call: tuple[Any, ...]) -> int:
    """The same on every machine for calls that use the same kernels."""
    used: set[str] = set()
    if not isinstance(source, Extension):
        note = _noting(op, source, lambda variant: used.add(repr(variant[2:])))
        args, kwargs = op.split(call)
        with contextlib.suppress(Exception):  # whatever its author's code raises: prewarm tells
            op.launcher(source, device)(Kernels(note), *args, **kwargs)
    text = repr((op.name, device, source.kind, sorted(used)))
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def stubs_of(op: Op, source: Source, target: Target) -> tuple[list[Stub], list[str]]:
    """The stubs that the samples use, and why the op keeps to its Python launcher for others.

    Those whose kernels are not in the cache are left out.
    """
    samples = op.prewarm_inputs(source, target.device)
    if isinstance(source, Extension) or not samples:
        return [], []
    parameters = op.trampolines.parameters
    if parameters is None:
        return [], [f"its schema has types that only Python passes: {op.schema}"]
    found: dict[tuple[Variant, tuple[str, ...]], Stub] = {}
    reasons: dict[str, None] = {}
    device = torch.device("cuda:0" if target.device == "cuda" else "cpu")
    kernels = CachedKernels(op.name, source, target)
    function = op.written(source, target.device)
    for sample in samples:
        args = op.in_order(*op.split(sample))
        try:
            traced = trace(
                op.name, function, parameters, args, frozenset(), op.trampolines.returns,
                device, kernels.where, kernels,
            )  # fmt: skip
        except Unsupported as e:
            reasons[str(e)] = None
            continue
        except NotCached:
            continue  # its kernel could not be built, or nobody has yet
        variant = stub_variant(op.name, op.schema, traced, parameters, args)
        stub = Stub(variant, traced, situation_of(args))
        found[variant, stub.situation] = stub
    return list(found.values()), list(reasons)


def keep_plans(
    op: Op, source: Source, target: Target, stubs: Sequence[Stub]
) -> list[tuple[Entry, bool]]:
    """Publish, for stubs that are in the cache, what spares a process the trace.

    Returns the entries, and which of them are new.
    """
    if not stubs:
        return []
    plans = Plans(op.name, op.schema, op.written(source, target.device), source, target)
    kept = [keep(plans, situation, variant, traced, target) for variant, traced, situation in stubs]
    return [found for found in kept if found]
