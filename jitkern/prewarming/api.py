"""`jitkern.prewarm`: compile ahead of the first call, for any target. Nothing is loaded."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config, prewarming
from jitkern.compilers import parallelism
from jitkern.errors import DeclarationError, SettingError, meant_op, then
from jitkern.op.all_ops import all_ops, op_of, ops_named
from jitkern.op.op import Op
from jitkern.prewarming.builder import Builder
from jitkern.prewarming.op_calls import OpCalls, read_recording, recorded_calls
from jitkern.prewarming.shards import shard_of
from jitkern.prewarming.tasks import Group, Result, Step
from jitkern.source.kinds import ITSELF
from jitkern.target import EXAMPLE, Target

if TYPE_CHECKING:
    from jitkern.prewarming.jobs import Executor


def prewarm(
    ops: Iterable[Op | str | OpCalls] = (),
    targets: Iterable[Target | str] = (),
    *,
    recording: str | os.PathLike[str] | None = None,
    shard: tuple[int, int] = (1, 1),
    jobs: int | None = None,
    keep_going: bool = False,
    refresh: bool = False,
    progress: Callable[[Step], object] | None = None,
    executor: Executor | None = None,
    parts: int | None = None,
) -> list[Result]:
    """Compile all that calls of ops need, for this machine or for any target, without its device.

    ops: ops, or names of ops, namespaces, packages or modules, or one name; by default all
        declared ops.
    targets: targets or their texts; by default the targets of this machine.
    recording: a file that JITKERN_RECORD wrote: build only for the calls in this file.
    shard: (part, parts): do only this part of the work, from 1.
    jobs: the number of builds at once; by default from cores and free memory, and 1 in each part
        of an executor.
    keep_going: whether to continue after a failed build.
    refresh: whether to compile cached entries again; not with an executor.
    progress: called in this thread with a Step after each task, and for remarks.
    executor: builds in the workers of a `concurrent.futures.Executor`, or of submitit's, which
        import the packages of the ops by name. The entries come back into the cache of this
        process. Entries that this cache has are not built again.
    parts: the number of parts for the executor; by default 4 for each worker.

    Returns a Result for each entry, and for each task that failed or was skipped, with the reason.
    The status of an op without sample calls is `unsampled`.
    Raises DeclarationError for an op that is not declared and for a file that is not a recording,
    TargetError for a text that is not a target, SettingError, and CacheError for an unusable cache.
    """
    if executor and refresh:
        raise SettingError("refresh is not for an executor: workers build into caches of their own")
    if not 1 <= shard[0] <= shard[1]:
        raise SettingError(f"shard={shard!r} is not (part, parts) with a part from 1 to parts")
    parsed = [Target.parse(t) if isinstance(t, str) else t for t in targets] or Target.visible()
    chosen = _chosen(ops)
    if recording is not None:
        path = Path(recording)
        recorded = read_recording(path)
        for call in recorded:
            if call.op not in all_ops():
                raise DeclarationError(
                    f"{path} has calls of {call.op}, which is not declared: import {call.module} "
                    "first"
                )
        chosen = recorded_calls([wanted.op for wanted in chosen], recorded, path)
    rest = [*_unmatched(chosen, parsed), *_without_calls(chosen, parsed)]
    if shard[1] > 1:
        chosen = shard_of(chosen, *shard)
    # A fallback to a private cache would keep nothing.
    with config.using(fallback="raise", jobs=jobs or config.current().jobs):
        tell = progress or (lambda _: None)
        elsewhere = prewarming.jobs.ExecutorBuilder(
            executor, tell, parts=parts or 0, jobs=jobs or 1, keep_going=keep_going
        ) if executor else None  # fmt: skip
        builder = Builder(
            parallelism.limit(), tell, elsewhere=elsewhere, keep_going=keep_going, refresh=refresh
        )
        return [*builder.build(groups_of(chosen, parsed)), *rest]


def groups_of(chosen: Iterable[OpCalls], targets: Sequence[Target]) -> list[Group]:
    """Return each source of the ops for each target that it is for."""
    return [
        Group(wanted, source, target)
        for wanted in chosen
        for target in targets
        for source in wanted.op.sources.get(target.device, ())
    ]


def _chosen(ops: Iterable[Op | str | OpCalls]) -> list[OpCalls]:
    chosen: dict[str, OpCalls] = {}
    for item in [ops] if isinstance(ops, str) else ops:
        if isinstance(item, str):
            if not (matches := ops_named(item)):
                importlib.import_module("jitkern.ops")
                matches = ops_named(item)
            if not matches:
                unknown = f"`{item}` is not a declared op or namespace{meant_op(item, all_ops())}"
                remedy = (
                    "import the module of your own ops first; `jitkern list` prints installed ones"
                )
                raise DeclarationError(then(unknown, remedy))
            chosen.update({op.name: OpCalls(op) for op in matches})
        else:
            wanted = item if isinstance(item, OpCalls) else OpCalls(op_of(item))
            chosen[wanted.op.name] = wanted
    return [*chosen.values()] or [OpCalls(op) for _, op in sorted(all_ops().items())]


def _without_calls(chosen: Iterable[OpCalls], targets: Iterable[Target]) -> list[Result]:
    """Return a Result for each op without known calls."""
    lacking = []
    for wanted in chosen:
        op = wanted.op
        for device in dict.fromkeys(target.device for target in targets):
            kernels = [s for s in op.sources.get(device, ()) if s.runs != ITSELF]
            if not kernels or wanted.calls is not None or wanted.of(kernels[0], device):
                continue
            reason = (
                f'{op.place}{op.name}: no sample calls: add `@op.samples` (called with "meta"), '
                "`prewarm=[...]`, or use `--from RECORDING`"
            )
            lacking.append(Result(op.name, "", device, "unsampled", reason=reason))
    return lacking


def _unmatched(chosen: Iterable[OpCalls], targets: Iterable[Target]) -> list[Result]:
    """Return a Result for each recorded call that no target or source fits."""
    results = []
    for wanted in chosen:
        op = wanted.op
        for (device, kind), calls in (wanted.calls or {}).items():
            known = any(source.kind == kind for source in op.sources.get(device, ()))
            if known and any(target.device == device for target in targets):
                continue
            remedy = (
                f"no target is of this device: add e.g. --target {example(device)}" if known
                else f"the op has no {kind} source for it any more; record again"
            )  # fmt: skip
            count = f"{len(calls)} recorded call{'s' * (len(calls) > 1)}"
            reason = f"{op.name}: {count} on {device}: {remedy}"
            results.append(Result(op.name, kind, device, "skipped", reason=reason))
    return results


def example(device: str) -> Target:
    """Return a target of a device, for messages."""
    this = Target.current("cpu")
    return this if device == "cpu" else Target.parse(EXAMPLE)._replace(torch=this.torch)
