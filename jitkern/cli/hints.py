"""Remarks of `jitkern explain` on the cached kernels: choices made, and possible improvements."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jitkern import jit, launch
from jitkern.cache.entry import Entry
from jitkern.cache.key import canonical
from jitkern.compilers import compiler_for
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import SOURCES, Extension, Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.op.op import Op

MANY = 3  # variants that differ in the class of one argument alone


class ExplainRow(NamedTuple):
    """A row of `explain`: an entry, or what there is instead of one.

    path: of the entry, "" if it is not cached, for this reason. program: of a launch record.
    resources: what a kernel takes of a GPU; None if unknown.
    """

    kind: str
    variant: str
    target: str
    key: str = ""
    path: str = ""
    reason: str = ""
    note: str = ""
    program: str = ""
    resources: dict[str, int] | None = None


def choices(op: Op, source: Source, target: Target) -> Iterator[ExplainRow]:
    """Yield a row for each choice: device model, situation, configuration, and the times of all."""
    if isinstance(source, Extension):
        return
    for entry, choice in launch.autotune.choices_of(op.name, source, target):
        situation = ", ".join(f"{name}={value}" for name, value in choice["situation"].items())
        reasons = choice.get("reasons") or []  # the entry may be of a version that kept none
        listed = [
            f"{config} {f'{time:.4g} ms' if time is not None else _left_out(reason)}"
            for config, time, reason in itertools.zip_longest(
                choice["configs"], choice["milliseconds"], reasons
            )
        ]
        chosen = listed.pop(choice["choice"])
        yield ExplainRow(
            "choice", entry.variant, entry.path.parent.name, entry.manifest.digest,
            str(entry.path),
            note=f"on {choice['model']}, {situation}: {'; not '.join([chosen, *listed])}",
        )  # fmt: skip


def resources_of(entry: Entry) -> dict[str, int] | None:
    """Return what the kernel of an entry takes of a GPU; None for others, and if unknown."""
    meta = entry.manifest.meta
    resources: dict[str, int] | None = meta.get("resources") or None
    if resources and "smem" in meta:  # of a Triton kernel, which its launches ask for
        resources = {**resources, "dynamic_shared": meta["smem"]}
    return resources


def in_words(resources: dict[str, int] | None) -> str:
    """Return the resources of a kernel as a text; "" for None."""
    if not resources:
        return ""
    parts = [f"{resources['registers']} registers"]
    if resources["spills"]:
        parts.append(f"{resources['spills']} B of spills and reloads")
    if resources["local"]:
        parts.append(f"{resources['local']} B of local memory")
    if shared := resources["shared"] + resources.get("dynamic_shared", 0):
        parts.append(f"{shared} B of shared memory")
    return ", ".join([*parts, f"at most {resources['max_threads']} threads"])


def spills(rows: Sequence[ExplainRow]) -> Iterator[str]:
    """Yield a hint for each kernel that has not enough registers."""
    for row in rows:
        if row.resources and (moved := row.resources["spills"]):
            remedy = (
                "more num_warps, or smaller blocks of values" if SOURCES[row.kind].in_python
                else "fewer values a thread, or __launch_bounds__ with fewer threads"
            )  # fmt: skip
            yield (
                f"`{row.variant}` for {row.target} spills: its instructions move {moved} B of "
                f"registers to local memory and back, which is slow: {remedy}"
            )


def _left_out(reason: str | None) -> str:
    return f"is left out, because it does not run: {reason}" if reason else "does not run"


def hints(op: Op, source: Source, target: Target) -> Iterator[str]:
    """Yield a hint for each integer argument of a Triton kernel that makes many cached variants."""
    if not source.in_python:
        return
    known = jit.key_of(Variant(op.name, source), target).inputs
    alike: dict[tuple[str, str, bytes], set[str]] = defaultdict(set)
    for _, entry in jit.open_cache().entries():
        inputs = entry.manifest.inputs if isinstance(entry, Entry) else {}
        if any(inputs.get(name) != known[name] for name in ("op", "target", "source")):
            continue
        variant = inputs.get("variant")
        if not variant or not variant["signature"]:
            continue  # the entry is a choice, not a kernel
        names = launch.declared.declared_in(op.name, source, variant["function"]).parameters
        passed = [name for name in names if name not in dict(variant["template"])]
        for i, (name, kind) in enumerate(zip(passed, variant["signature"])):
            if _plain(kind) in ("i32", "i64", "u64"):
                others = [*variant["signature"][:i], *variant["signature"][i + 1 :]]
                rest = canonical([inputs["flags"], variant["template"], variant["options"], others])
                alike[variant["function"], name, rest].add(kind)
    largest: dict[tuple[str, str], set[str]] = {}
    for (function, name, _), kinds in alike.items():
        largest[function, name] = max(largest.get((function, name), set()), kinds, key=len)
    for (function, name), kinds in largest.items():
        left = {_plain(kind) for kind in kinds}
        if len(kinds) >= MANY and len(left) < len(kinds):
            yield (
                f"`{function}` has {len(kinds)} variants that differ in `{name}` alone "
                f'({", ".join(sorted(kinds))}): @triton.jit(do_not_specialize=["{name}"]) makes '
                f"{len(left)} of them"
            )


def _plain(kind: str) -> str:
    """Return the class of an argument if Triton did not specialise on its value."""
    return "i32" if kind == "1" else kind.partition(":")[0]


def installed(variants: Sequence[Variant], target: Target) -> list[dict[str, str]]:
    """Return the identities of installed compilers for these variants, which are of one source."""
    with contextlib.suppress(CompilerNotFound, TargetError):
        for variant in variants[:1]:
            exact = jit.exact_target(variant, target)
            return compiler_for(variant.source).identities(variant.source, exact)
    return []


def newer(maker: Mapping[str, str], here: list[dict[str, str]]) -> str:
    """Return a note if the installed compiler is newer than an entry's compiler, or ""."""
    for compiler in here[:1]:
        names = maker.get("name"), compiler["name"]
        versions = maker.get("version", ""), compiler["version"]
        old, new = map(jit.build.version_numbers, versions)
        if names[0] == names[1] and old < new:
            return (
                f"made by {names[0]} {versions[0]}, and {versions[1]} is installed: "
                "jitkern prewarm --refresh"
            )
    return ""
