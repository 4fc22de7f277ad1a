"""Show where an op's kernels come from, which of their variants are cached, and why others are not.

For a variant that is not cached, and for an entry that is named by its digest, show the nearest
entry of the same op with every input that differs. For a cached GPU kernel, show its registers,
spills, memory and threads; for a tuned op, list the chosen configurations. `--source` prints the
programs that launch the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import linecache
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from jitkern import cache_tools, config, jit, launch, op as ops, prewarming, remote, runtime, trace
from jitkern.cache.entry import Entry
from jitkern.cache_tools import Row
from jitkern.cache_tools.check import counted
from jitkern.cli import clangd
from jitkern.cli.choose import UnknownOp, choose_ops, choose_targets
from jitkern.cli.filters import opened
from jitkern.cli.output import BOLD, YELLOW, print_json, styled
from jitkern.cli.parser import UsageError, take_targets
from jitkern.compilers import compiler_for
from jitkern.errors import CompilerNotFound, TargetError, meant_op, then
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import SOURCES, Extension, Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.op.op import Op
    from jitkern.trace.trace import Traced

MOST = 8  # entries that are compared without `-v`
SHORT = 8  # hexadecimal digits of a digest in a listing
_SPILLS = (
    "`{variant}` for {target} spills: its instructions move {spills} B of registers to local "
    "memory and back, which is slow: "
)
HINTS = (  # the resource of which a kernel uses some, whether it is a function of Python, the text
    ("spills", True, f"{_SPILLS}more num_warps, or smaller blocks of values"),
    ("spills", False, f"{_SPILLS}fewer values a thread, or __launch_bounds__ with fewer threads"),
)


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


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op",
        metavar="OP|KEY",
        help="an op, e.g. softmax or mylib::softmax, or the beginning of an entry's digest",
    )
    take_targets(parser, "default: this machine's targets")
    parser.add_argument(
        "--source",
        action="store_true",
        help="also print the programs, with the lines of the launch function that caused them",
    )
    parser.add_argument(
        "--compile-commands",
        action="store_true",
        help=f"write {clangd.NAME}, for clangd, beside the sources of the op",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    may_be_digest = re.fullmatch(r"(.*-)?[0-9a-f]{6,64}", args.op)
    if may_be_digest and cache_tools.find(opened(), args.op):
        return explain_entries(args)
    targets = choose_targets(args.target)
    explained = []
    try:
        chosen = choose_ops([args.op])  # its name may look like a digest: `facade`
    except UnknownOp:
        if may_be_digest:
            return explain_entries(args)
        raise
    if args.compile_commands:
        print(*clangd.write(chosen.ops), sep="\n")
        return int(bool(chosen.broken))
    for op in chosen.ops:
        places = [(t, source) for t in targets for source in op.sources.get(t.device, ())]
        rows = [row for target, source in places for row in _explain_source(op, source, target)]
        texts = [
            text.format(variant=row.variant, target=row.target, **row.resources)
            for row in rows if row.resources
            for name, in_python, text in HINTS
            if row.resources[name] and SOURCES[row.kind].in_python == in_python
        ]  # fmt: skip
        texts += ["its variants are not known: add `@op.samples`"] * bool(places and not rows)
        variants = [row._asdict() for row in rows]
        explained.append({"op": op.name, "schema": op.schema, "variants": variants, "hints": texts})
        if args.json:
            continue
        print(f"{styled(op.schema, BOLD)}\n  declared in {op.place.removesuffix(': ')}")
        groups: dict[tuple[str, str], list[ExplainRow]] = defaultdict(list)
        for row in rows:
            groups[row.kind, row.target].append(row)
        for (kind, target), group in groups.items():
            print(f"  {kind}  {target}")
            _print_group(group, whole=args.level > 0, source=args.source)
        print(*(f"  hint: {hint}\n" for hint in texts), sep="", end="")
        if not places:
            print(
                f"  no kernel for {', '.join(map(str, targets))}: its PyTorch reference runs there"
            )
    if args.json:
        print_json(ops=explained, broken=chosen.broken)
    return int(bool(chosen.broken))


def _print_group(rows: list[ExplainRow], *, whole: bool, source: bool) -> None:
    """Print rows of one kind for one target: those cached, then the others by their reasons."""
    cached = [row for row in rows if row.path]
    short = cached and cached[0].program and not (whole or source)
    if short:
        print(f"    {counted(len(cached), 'record')} cached")
    for row in () if short else cached:
        digest = row.path if whole else row.path.rpartition("-")[2][:SHORT]
        used = _in_words(row.resources)
        print("  ".join(filter(None, ("  ", digest, row.variant or "the kernel", used))))
        if source and row.program:
            print(textwrap.indent(row.program, "    "))
    for note in dict.fromkeys(row.note for row in cached if row.note):
        print(f"      {note}")
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if not row.path:
            reasons[row.reason].append(row.variant)
    for reason, variants in reasons.items():
        names = ", ".join(dict.fromkeys(filter(None, variants)))
        if names:
            print(f"    {styled('not cached', YELLOW)}  {names}")
        print(f"    {'  ' * bool(names)}{reason}")


def _explain_source(op: Op, source: Source, target: Target) -> Iterator[ExplainRow]:
    """Yield rows for a source: its kernels, the chosen configurations, and then its records.

    Calls without a program get a row that says why the Python launcher runs.
    """
    variants, needing, problems = ops.needed_kernels.needs_of(op, source, target.device, target)
    here = _installed(variants, target)
    for variant in variants:
        yield _explain(variant, target, here)
    for problem in problems:
        yield ExplainRow(source.kind, "", str(target), reason=problem)
    yield from _choices(op, source, target)
    traces, reasons, _ = prewarming.call_traces.traces_of(op, source, target, needing, {})
    written = op.launch_function(source, target.device) if traces else None
    for traced, of_class in traces:
        entry = runtime.records.entry_of(of_class, traced)
        label = entry.variant if entry else ".".join(("call", *of_class.call))
        yield ExplainRow(
            "call", label, str(target.for_host_code()),
            entry.manifest.digest if entry else "", str(entry.path) if entry else "",
            reason="" if entry else _absent(op.name, target),
            program=_beside(op, traced, written),
        )  # fmt: skip
    for reason in reasons:
        yield ExplainRow("python", "", str(target), reason=f"its Python launcher runs: {reason}")


def _beside(op: Op, traced: Traced, written: Any) -> str:
    """Return the program, each part below the line of the launch function that caused it."""
    path = written.__code__.co_filename
    shown: list[str] = []
    before = 0
    names = [argument.name for argument in op.signature.arguments]
    _, constants, texts, *_ = traced.program
    for text, line in trace.program.listing(traced.steps, constants, texts, names):
        if line and line != before:
            before = line
            shown.append(f"# {line:4}: {linecache.getline(path, line).strip()}")
        shown.append(text)
    return "\n".join(shown)


def _explain(variant: Variant, target: Target, here: dict[str, str]) -> ExplainRow:
    key = jit.key_of(variant, target)
    cache = opened()
    entry = cache.find(key)
    reason = ""
    if not entry:
        places = remote.fetch.places_of(cache, key) if config.current().remotes else ()
        reason = "; in the remote ".join((_nearest(key.inputs, target), *places))
    path, note = (str(entry.path), _newer(entry.manifest.compiler, here)) if entry else ("", "")
    return ExplainRow(
        variant.source.kind, variant.label, key.target, key.digest, path, reason=reason, note=note,
        resources=resources_of(entry) if entry else None,
    )  # fmt: skip


def _choices(op: Op, source: Source, target: Target) -> Iterator[ExplainRow]:
    """Yield a row for each choice: device model, situation, configuration, and the times of all."""
    if isinstance(source, Extension):
        return
    for entry, choice in launch.autotune.choices_of(op.name, source, target):
        situation = ", ".join(f"{name}={value}" for name, value in choice["situation"].items())
        whys = [f": {why}" if why else "" for why in choice.get("reasons") or ()]
        rows = zip_longest(choice["configs"], choice["milliseconds"], whys, fillvalue="")
        listed = [
            f"{config} {time:.4g} ms" if time else f"{config} does not run{why}"
            for config, time, why in rows
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


def _in_words(resources: dict[str, int] | None) -> str:
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


def _installed(variants: Sequence[Variant], target: Target) -> dict[str, str]:
    """Return the identity of the compiler for these variants of one source; empty without it."""
    with contextlib.suppress(CompilerNotFound, TargetError):
        for variant in variants[:1]:
            compiler, source = compiler_for(variant.source), variant.source
            return next(iter(compiler.identities(source, compiler.target(source, target))), {})
    return {}


def _newer(made: Mapping[str, str], here: dict[str, str]) -> str:
    """Return a note if the installed compiler is newer than an entry's compiler, or ""."""
    versions = made.get("version", ""), here.get("version", "")
    old, new = map(jit.build.version_numbers, versions)
    if made.get("name") != here.get("name") or old >= new:
        return ""
    told = f"made by {here['name']} {versions[0]}, and {versions[1]} is installed"
    return f"{told}: jitkern prewarm --refresh"


def _nearest(inputs: dict[str, Any], target: Target) -> str:
    """Return, in words, which inputs differ from those of the nearest similar entry."""
    nearest = cache_tools.nearest(opened(), inputs)
    if not nearest:
        return _absent(inputs["op"], target)
    return "nearest entry: " + "; ".join(nearest[1])


def _absent(op: str, target: Target) -> str:
    name = op.removeprefix("jitkern::")
    return f"no similar entry; build it: jitkern prewarm {name} --target {target}"


def found(text: str) -> list[tuple[Row, Entry]]:
    """Return the entries that a text names. Raises UsageError if it names none."""
    matches = cache_tools.find(opened(), text)
    if not matches:
        near = meant_op(text, {row.op for row in cache_tools.rows(opened(), verify="none")})
        unknown = f"no entry of {config.current().cache_dir} matches `{text}`{near}"
        raise UsageError(then(unknown, "`jitkern cache ls` prints all, with their digests"))
    return matches


def explain_entries(args: argparse.Namespace) -> int:
    """Print how each entry that a digest names differs from its nearest entry."""
    cache = opened()
    rows = []
    for row, entry in found(args.op):
        other = cache_tools.nearest(cache, entry.manifest.inputs)
        rows.append({
            **asdict(row),
            "resources": resources_of(entry),
            "nearest": str(other[0].path) if other else "",
            "differences": other[1] if other else [],
        })  # fmt: skip
    if args.json:
        print_json(entries=rows)
        return 0
    shown = rows if args.level > 0 else rows[:MOST]
    for described in shown:
        print(f"{described['path']}\n  {described['op']}, made by {described['compiler']}")
        if used := _in_words(described["resources"]):
            print(f"  {used}")
        if described["nearest"]:
            print(f"  nearest entry: {described['nearest']}, which differs:")
        else:
            print("  no other entry of this op has the same device and kind")
        print(*(f"    {line}\n" for line in described["differences"]), sep="", end="")
    if len(rows) > len(shown):
        print(f"and {counted(len(rows) - len(shown), 'entry')} more: -v")
    return 0
