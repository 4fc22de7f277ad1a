"""Records of finished prewarms, so that the next prewarm need not trace the same calls again.

A record lists the entries that the calls of one source of an op need, for one target. The record is
valid as long as all that the calls depend on is the same (`fingerprint`). It vouches for no entry:
each entry is looked up and verified, as for a call. There is one record per source and target, in
`v1/prewarm`, which the next prewarm overwrites.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jitkern import config, jit
from jitkern.cache import VERSION, events
from jitkern.cache.key import canonical, label_of
from jitkern.cache.manifest import NAME
from jitkern.compilers import compiler_for
from jitkern.errors import DeclarationError, JitkernError
from jitkern.files import atomic
from jitkern.launch.tuned import Tuned, parts_of
from jitkern.prewarming.identity import calls_of, code_of_jitkern
from jitkern.prewarming.tasks import Group, Result
from jitkern.source.kinds import ITSELF, Variant
from jitkern.source.variant_key import make_key
from jitkern.target import this_platform
from jitkern.trace.world import world_of

MAX_BYTES = 16 << 20
Steps = tuple[list[Result], list[Result], list[Result]]  # kernels, the runtime, launch records


class Known(NamedTuple):
    """The content of a record: the entries of a group, and the notes to report."""

    steps: Steps
    notes: list[str]


class Records:
    """The records of the present cache; unused if only entries of the exact compiler are hits."""

    def __init__(self) -> None:
        self._cache = jit.open_cache()
        self._folder = self._cache.root / VERSION / "prewarm"
        self._usable = config.current().compiler != "exact"
        self._fingerprints: dict[Group, str | None] = {}
        self._listed: dict[str, list[Path]] = {}

    def find(self, group: Group) -> Known | None:
        """Return a group's record, or None if an entry is gone or anything has changed."""
        fingerprint = self._fingerprint(group)  # taken now, to notice all later changes
        if fingerprint is None:
            return None
        try:
            path = self._folder / _name(group)
            if path.stat().st_size > MAX_BYTES:
                return None
            record = json.loads(path.read_bytes())
            if record["fingerprint"] != fingerprint:
                return None
            steps = [[self._result_of(*row) for row in step] for step in record["steps"]]
            if len(steps) != 3 or any(None in step for step in steps):
                return None
            kernels, runtimes, launches = [[r for r in step if r] for step in steps]
            return Known((kernels, runtimes, launches), list(map(str, record["notes"])))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, group: Group, known: Known) -> None:
        """Write the record of a group, under the fingerprint that `find` took."""
        fingerprint = self._fingerprint(group)
        if fingerprint is None or not any(known.steps):
            return
        steps = [
            [(r.op, r.variant, Path(r.path).parent.name, Path(r.path).name) for r in step]
            for step in known.steps
        ]
        with contextlib.suppress(OSError):
            atomic.make_directory(self._folder, 0o755, fsync=False)
            data = canonical({"fingerprint": fingerprint, "notes": known.notes, "steps": steps})
            atomic.write(self._folder / _name(group), data)

    def _result_of(self, op: str, variant: str, target: str, name: str) -> Result | None:
        """Return the result for an entry, looked up as for a call; None if the entry is gone."""
        entry = self._cache.look_up(target, name).entry
        if entry is None:
            return None
        events.use(entry.path)
        return Result(op, variant, target, "hit", path=str(entry.path))

    def _fingerprint(self, group: Group) -> str | None:
        """Return a digest of all that decides which entries calls need; None if unknown."""
        if group not in self._fingerprints:
            parts = self._parts(group) if self._usable else None
            digest = None if parts is None else hashlib.sha256(canonical(parts)).hexdigest()
            self._fingerprints[group] = digest
        return self._fingerprints[group]

    def _parts(self, group: Group) -> list[Any] | None:
        op, (wanted, source, target) = group.op, group
        found = identity_of(group)
        if found is None:
            return None
        function, launch, inputs = found
        calls: list[str] | None = []
        if function is None and wanted.calls is not None:
            calls = ["some"] if group.samples else ["none"]
        if function:
            calls = calls_of(group) if launch else None
        if calls is None:
            return None
        tunable = isinstance(function, Tuned) or source.kind == "triton"
        return [
            code_of_jitkern(), torch.__version__, sys.implementation.cache_tag, this_platform(),
            str(torch.get_default_dtype()), op.schema, str(target), inputs,
            wanted.node, launch, calls,
            self._chosen(op.name, str(target.for_device_code())) if tunable else [],
        ]  # fmt: skip

    def _chosen(self, op: str, place: str) -> list[str]:
        """Return digests of an op's choices among configurations in the cache for a target."""
        if place not in self._listed:
            folders = [layer.root / VERSION / place for layer in self._cache.trusted_layers()]
            self._listed[place] = [
                path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())
            ]
        begin = label_of(op, "choice", place)
        entries = [path for path in self._listed[place] if path.name.startswith(begin)]
        manifests = [path / NAME for path in entries if (path / NAME).is_file()]
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in manifests]


class Identity(NamedTuple):
    """The inputs that decide the keys of a group's entries, beside its calls.

    function: the launch function as it was written, or None for a source that runs itself.
    launch: the identity of the launch function and of all that it reads; "" if that is open.
    inputs: the inputs of the keys that all variants of the source have in common.
    """

    function: Any
    launch: str
    inputs: dict[str, Any]


def identity_of(group: Group) -> Identity | None:
    """Return the identity of a group; None if it is unknown, which the build will report."""
    op, (_, source, target) = group.op, group
    variant = Variant(op.name, source)
    try:
        compiler, exact = compiler_for(source), jit.exact_target(variant, target)
        key = make_key(variant, exact, compiler.flags(source, exact), compiler.closure(source))
        function = None if source.runs == ITSELF else op.written(source, target.device)
    except (DeclarationError, JitkernError, OSError):
        return None
    launch = ""
    if function:
        world = world_of(parts_of(function))
        launch = world.identity if world.kept and world.closed() else ""
    return Identity(function, launch, key.inputs)


def _name(group: Group) -> str:
    op, (_, source, target) = group.op, group
    names = [op.name, source.kind, list(source.files), list(source.flags), str(target)]
    return f"{hashlib.sha256(canonical(names)).hexdigest()[:32]}.json"
