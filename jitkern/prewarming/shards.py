"""Divide the calls to prewarm among machines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from jitkern import jit
from jitkern.cache.key import canonical
from jitkern.calls.samples import Sample
from jitkern.errors import JitkernError
from jitkern.launch.tuned import parts_of
from jitkern.op.needed_kernels import digest_of
from jitkern.prewarming.op_calls import OpCalls
from jitkern.prewarming.tasks import Group
from jitkern.source.kinds import ITSELF, Variant
from jitkern.trace.scope import scope_of

Unit = tuple[str, str, str]  # device, kind of source, and the digest of a set of kernels


def shard_of(every: Iterable[OpCalls], part: int, parts: int) -> list[OpCalls]:
    """Keep only the calls that shard `part` (from 1) of `parts` must prewarm.

    The sets of kernels that calls use are dealt out evenly, so that one part builds a kernel and
    the launch records that need it. Every machine deals alike, whatever its targets.
    """
    every = list(every)
    units: dict[Unit, tuple[OpCalls, list[Sample]]] = {}
    for wanted in every:
        op = wanted.op
        of_op = [(device, source) for device, some in op.sources.items() for source in some]
        for device, source in of_op:
            for call in wanted.of(source, device):
                unit = device, source.kind, digest_of(op, source, device, call.args)
                units.setdefault(unit, (wanted, []))[1].append(call)
    shard: dict[OpCalls, dict[tuple[str, str], list[Sample]]] = {wanted: {} for wanted in every}
    for device, kind, digest in sorted(units)[part - 1 :: parts]:
        wanted, calls = units[device, kind, digest]
        shard[wanted].setdefault((device, kind), []).extend(calls)
    return [OpCalls(wanted.op, calls, node=wanted.node) for wanted, calls in shard.items()]


def name_of(groups: Iterable[Group]) -> str:
    """Return a name for all shards of a prewarm, equal wherever their entries would be."""
    return hashlib.sha256(canonical([_inputs_of(group) for group in groups])).hexdigest()


def _inputs_of(group: Group) -> list[Any]:
    """Return the inputs of the keys of a group's entries that are known here."""
    op, source, target = group.op, group.source, group.target
    inputs: list[Any] = [op.schema, str(target)]
    with suppress(JitkernError, OSError):  # the build reports it
        inputs.append(jit.key_of(Variant(op.name, source), target).inputs)
        if source.runs != ITSELF:
            scope = scope_of(parts_of(op.launch_function(source, target.device)))
            inputs.append(scope.identity if scope.portable and not scope.traps else "")
    return inputs
