"""Divide the calls to prewarm among machines, as many as an engine says that there are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from jitkern import config, jit
from jitkern.cache.key import canonical
from jitkern.calls.samples import Sample
from jitkern.errors import JitkernError, SettingError
from jitkern.launch.tuned import parts_of
from jitkern.op.needed_kernels import digest_of
from jitkern.prewarming.op_calls import OpCalls
from jitkern.prewarming.tasks import Group
from jitkern.source.kinds import ITSELF, Variant
from jitkern.trace.world import world_of

Unit = tuple[str, str, str]  # device, kind of source, and the digest of a set of kernels


class Numbering(NamedTuple):
    """The variables by which an engine numbers the processes of a job.

    number, of: the variables with the number of this process, and with how many there are.
    first: the number of the first process. remedy: what to do where `of` is not set.
    """

    name: str
    number: str
    of: str
    first: int = 0
    remedy: str = "set it to the number of processes"


SLURM_ARRAY = Numbering("Slurm array", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
SRUN = Numbering("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# In this order: the tasks of an array, for one, have the variables of `srun`, too.
ENGINES = (
    SLURM_ARRAY,
    Numbering(
        "Kubernetes indexed Job", "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS",
        remedy="Kubernetes does not set it, so the manifest does: beside `completions: 8`, give "
        'the container `env: [{name: JOB_COMPLETIONS, value: "8"}]`',
    ),
    Numbering("AWS Batch array", "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    Numbering("Cloud Run job", "CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    Numbering("Google Batch", "BATCH_TASK_INDEX", "BATCH_TASK_COUNT"),
    Numbering("Buildkite", "BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT"),
    Numbering("GitLab CI", "CI_NODE_INDEX", "CI_NODE_TOTAL", first=1),
    Numbering("torchrun", "RANK", "WORLD_SIZE"),
    Numbering("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Numbering("PMI", "PMI_RANK", "PMI_SIZE"),
    SRUN,
)  # fmt: skip


def announced(environ: Mapping[str, str] | None = None) -> tuple[int, int, str]:
    """Return the part of this process, from 1, the number of parts, and the job system.

    environ: by default, the environment of this process. Raises SettingError if no engine has set
    its variables, or if they do not number the processes one after the other.
    """
    environ = config.current().environment if environ is None else environ
    present = [engine for engine in ENGINES if environ.get(engine.number)]
    shards = [_announced(engine, environ) for engine in present if environ.get(engine.of)]
    if shards:
        return next((shard for shard in shards if shard[1] > 1), shards[0])
    for engine in present:
        if engine is not SRUN:  # it numbers the one process of a job's script as well
            raise SettingError(
                f"--shard auto: {engine.number} says that this is a process of a {engine.name}, "
                f"but {engine.of} does not say of how many: {engine.remedy}"
            )
    read = ", ".join(f"{engine.number} and {engine.of} ({engine.name})" for engine in ENGINES)
    raise SettingError(
        f"--shard auto: no job system numbers this process; it reads {read}. Name the shard "
        "instead, as in --shard 1/4"
    )


def _announced(engine: Numbering, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return the shard that one engine announces. Raises SettingError."""
    number, count = (_number(engine, name, environ) for name in (engine.number, engine.of))
    first, step = engine.first, 1
    if engine is SLURM_ARRAY:
        first, last, step = (
            _number(engine, f"SLURM_ARRAY_TASK_{name}", environ) for name in ("MIN", "MAX", "STEP")
        )
        if not step or (last - first) // step + 1 != count:
            raise SettingError(
                f"--shard auto: the Slurm array has {count} tasks from {first} to {last} with "
                "gaps, and no task is told which numbers are left out: submit an array without "
                f"gaps, as in `sbatch --array=0-{count - 1}`"
            )
    place, off = divmod(number - first, step)
    if off or not 0 <= place < count:
        raise SettingError(
            f"--shard auto: {engine.number}={number} is not one of the {count} processes of this "
            f"{engine.name}, which are numbered from {first}"
        )
    return place + 1, count, engine.name


def _number(engine: Numbering, name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise SettingError(f"--shard auto: {name}=`{text}` of {engine.name} is not a number")
    return int(text)


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
            world = world_of(parts_of(op.launch_function(source, target.device)))
            inputs.append(
                world.identity if world.portable and not (world.refusal or world.traps) else ""
            )
    return inputs
