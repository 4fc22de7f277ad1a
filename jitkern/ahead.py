"""What an op's samples will need, found on meta tensors, for any target, without its device."""

from __future__ import annotations

from typing import NamedTuple

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

    def note(call: Call) -> None:
        for one in every_expansion(op.name, source, call):
            found[variant_of(op.name, source, one)[0]] = None

    launcher = op.launcher(source, device)
    for sample in op.prewarm_inputs(source, device):
        args, kwargs = op.split(sample)
        launcher(Kernels(note), *args, **kwargs)
    return list(found)


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
            continue  # its kernel could not be built, or another shard builds it
        variant = stub_variant(op.name, op.schema, traced, parameters, args)
        stub = Stub(variant, traced, situation_of(args))
        found[variant, stub.situation] = stub
    return list(found.values()), list(reasons)


def keep_plans(op: Op, source: Source, target: Target) -> list[tuple[Entry, bool]]:
    """Publish, for stubs that are in the cache, what spares a process the trace.

    Returns the entries, and which of them are new.
    """
    stubs, _ = stubs_of(op, source, target)
    if not stubs:
        return []
    plans = Plans(op.name, op.schema, op.written(source, target.device), source, target)
    kept = [keep(plans, situation, variant, traced, target) for variant, traced, situation in stubs]
    return [found for found in kept if found]
