"""Divide the calls to prewarm among machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jitkern.calls.samples import Sample
from jitkern.op.needed_kernels import digest_of
from jitkern.prewarming.wanted import Wanted

Unit = tuple[str, str, str]  # device, kind of source, and the digest of a set of kernels


def shard_of(every: Iterable[Wanted], part: int, parts: int) -> list[Wanted]:
    """Keep only the calls that shard `part` (from 1) of `parts` must prewarm.

    The sets of kernels that calls use are dealt out evenly, so that one part builds a kernel and
    the stubs and plans that need it. Every machine deals alike, whatever its targets.
    """
    every = list(every)
    units: dict[Unit, tuple[Wanted, list[Sample]]] = {}
    for wanted in every:
        for unit, call in _units(wanted):
            units.setdefault(unit, (wanted, []))[1].append(call)
    shard: dict[Wanted, dict[tuple[str, str], list[Sample]]] = {wanted: {} for wanted in every}
    for device, kind, digest in sorted(units)[part - 1 :: parts]:
        wanted, calls = units[device, kind, digest]
        shard[wanted].setdefault((device, kind), []).extend(calls)
    return [Wanted(wanted.op, calls) for wanted, calls in shard.items()]


def _units(wanted: Wanted) -> Iterator[tuple[Unit, Sample]]:
    op = wanted.op
    for device, sources in op.sources.items():
        for source in sources:
            for call in wanted.of(source, device):
                yield (device, source.kind, digest_of(op, source, device, call.args)), call
