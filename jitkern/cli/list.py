"""List the installed ops: the shipped ops, and the ops that installed packages declare."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jitkern.cache_tools.check import counted
from jitkern.cli.choose import choose_ops, take_ops
from jitkern.cli.output import fitted, on_screen, print_json


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    take_ops(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = choose_ops(args.what)
    ops: list[dict[str, Any]] = [
        {
            "op": op.name,
            "schema": op.schema,
            "kernels": {
                device: [source.kind for source in sources]
                for device, sources in op.sources.items()
                if sources
            },
            "differentiable": op.gradient is not None,
            "fusible": op.declaration.fusible,
        }
        for op in sorted(chosen.ops, key=lambda op: op.name.startswith("jitkern::"))
    ]
    if args.json:
        print_json(ops=ops, broken=chosen.broken)
        return int(bool(chosen.broken))
    shown, rest = on_screen(ops, whole=args.level != 0, lines=2)
    for op in shown:
        kernels = [f"{device}: {', '.join(kinds)}" for device, kinds in op["kernels"].items()]
        marks = [mark for mark in ("differentiable", "fusible") if op[mark]]
        lines = op["schema"], f"  {'; '.join([*kernels, *marks]) or 'no kernels'}"
        print(*(fitted(line, whole=args.level != 0) for line in lines), sep="\n")
    if args.level >= 0:
        print(counted(len(ops), "op") + rest, file=sys.stderr)
    return int(bool(chosen.broken))
