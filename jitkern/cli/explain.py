"""Show where an op's kernels come from, which of their variants are cached, and why others are not.

For a variant that is not cached, and for an entry that is named by its digest, show the nearest
entry of the same op with every input that differs. For a tuned op, list the chosen configurations;
for a Triton kernel, the arguments whose classes make many variants. `--source` prints the C stubs
that launch the kernels.
"""

from __future__ import annotations

import argparse
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jitkern import cache_tools, config, jit, op as room, prewarming, trace
from jitkern.cache.store import Cache
from jitkern.cli import hints
from jitkern.cli.choose import UnknownOp, choose_ops, choose_targets
from jitkern.cli.output import print_json
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.op.op import Op
    from jitkern.trace.trace import Traced


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op",
        metavar="OP|KEY",
        help="an op, e.g. softmax or mylib::softmax, or the beginning of an entry's digest",
    )
    parser.add_argument(
        "--target", action="append", default=[], metavar="T", help="default: this machine's targets"
    )
    parser.add_argument(
        "--source",
        action="store_true",
        help="also print the C stubs, with the lines of the launch function that caused them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    may_be_digest = re.fullmatch(r"(.*-)?[0-9a-f]{6,64}", args.op)
    if may_be_digest and cache_tools.find(Cache.open(config.current()), args.op):
        return explain_entries(args)
    targets = choose_targets(args.target)
    ops = []
    try:
        chosen = choose_ops([args.op])  # its name may look like a digest: `facade`
    except UnknownOp:
        if may_be_digest:
            return explain_entries(args)
        raise
    for op in chosen.ops:
        places = [(t, source) for t in targets for source in op.sources.get(t.device, ())]
        rows = [row for target, source in places for row in _explain_source(op, source, target)]
        texts = [hint for target, source in places for hint in hints.hints(op, source, target)]
        ops.append({"op": op.name, "schema": op.schema, "variants": rows, "hints": texts})
        if args.json:
            continue
        print(f"{op.schema}\n  declared in {_folder(op.sources)}")
        for row in rows:
            where = row["path"] or f"not cached: {row['reason']}"
            print(f"  {row['kind']:9} {row['variant'] or '-':20} {row['target']}\n    {where}")
            if row["note"]:
                print(f"    {row['note']}")
            if args.source and row["stub"]:
                print(textwrap.indent(row["stub"], "    "))
        print(*(f"  hint: {hint}\n" for hint in texts), sep="", end="")
        if not rows:
            print(
                f"  no kernel for {', '.join(map(str, targets))}: its PyTorch reference runs there"
            )
    if args.json:
        print_json(ops=ops, broken=chosen.broken)
    return int(bool(chosen.broken))


def _folder(sources: dict[str, Any]) -> str:
    return next(
        (source.folder for declared in sources.values() for source in declared),
        "no folder: it has no kernels",
    )


def _explain_source(op: Op, source: Source, target: Target) -> Iterator[dict[str, str]]:
    """Yield rows for a source: its kernels, the chosen configurations, and then its stubs.

    Calls without a stub get a row that says why the Python launcher runs.
    """
    variants, calls, problems = room.needed_kernels.needs_of(op, source, target.device)
    here = hints.installed(variants, target)
    for variant in variants:
        yield _explain(variant, target, here)
    for problem in problems:
        yield _row(source.kind, target, problem)
    yield from hints.choices(op, source, target)
    stubs, reasons = prewarming.ahead.stubs_of(op, source, target, calls)
    here = hints.installed([stub.variant for stub in stubs], target)
    written = op.written(source, target.device) if stubs else None
    for variant, traced in {stub.variant: stub.traced for stub in stubs}.items():
        row = _explain(variant, target, here)
        yield {**row, "stub": _beside(op.schema, traced, written)}
    for reason in reasons:
        yield _row("python", target, f"its Python launcher runs: {reason}")


def _row(kind: str, target: Target, reason: str) -> dict[str, str]:
    """Return a row without an entry, with the reason."""
    return {
        "kind": kind, "variant": "", "target": str(target), "key": "", "path": "",
        "reason": reason, "note": "", "stub": "",
    }  # fmt: skip


def _beside(schema: str, traced: Traced, written: Any) -> str:
    """Return the stub, each part below the line of the launch function that caused it."""
    path = written.__code__.co_filename
    shown: list[str] = []
    before = 0
    for text, line in trace.stub_text.lines_of(schema, traced):
        if line and line != before:
            before = line
            shown.append(f"  /* {line:4}: {linecache.getline(path, line).strip()} */")
        shown.append(text)
    return "\n".join(shown)


def _explain(variant: Variant, target: Target, here: list[dict[str, str]]) -> dict[str, str]:
    key = jit.key_of(variant, target)
    entry = Cache.open(config.current()).find(key)
    reason = "" if entry else _nearest(key.inputs)
    return {
        "kind": variant.source.kind,
        "variant": variant.label,
        "target": key.target,
        "key": key.digest,
        "path": str(entry.path) if entry else "",
        "reason": reason,
        "note": hints.newer(entry.manifest.compiler, here) if entry else "",
        "stub": "",
    }


def _nearest(inputs: dict[str, Any]) -> str:
    """Return, in words, which inputs differ from those of the nearest entry of this op."""
    nearest = cache_tools.nearest(Cache.open(config.current()), inputs)
    if not nearest:
        return "nothing of this op is"
    return "nearest entry differs in " + "; ".join(nearest[1])


def explain_entries(args: argparse.Namespace) -> int:
    """Print how each entry that a digest names differs from its nearest entry."""
    cache = Cache.open(config.current())
    matches = cache_tools.find(cache, args.op)
    if not matches:
        print(f"jitkern: no entry of {cache.root} matches `{args.op}`", file=sys.stderr)
        return 1
    rows = []
    for row, entry in matches:
        other = cache_tools.nearest(cache, entry.manifest.inputs)
        rows.append({
            **asdict(row),
            "nearest": str(other[0].path) if other else "",
            "differences": other[1] if other else [],
        })  # fmt: skip
    if args.json:
        print_json(entries=rows)
        return 0
    for described in rows:
        print(f"{described['path']}\n  {described['op']}, made by {described['compiler']}")
        if described["nearest"]:
            print(f"  nearest: {described['nearest']}; its values, against those of this entry:")
        print(*(f"    {line}" for line in described["differences"]), sep="\n")
    return 0
