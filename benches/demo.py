"""Calls every shipped op from every kernel that fits this machine and compares it with PyTorch."""

from __future__ import annotations

import sys

import torch

import jitkern.ops  # noqa: F401  declares the ops
from jitkern import config
from jitkern.cache import events
from jitkern.errors import JitkernError
from jitkern.op import check
from jitkern.op.all_ops import all_ops
from jitkern.op.op import Op


def main() -> int:
    """Print one row for each op, device and kind of source; returns 1 if a result was wrong."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    wrong = 0
    print(f"{'op':32} {'device':6} {'source':10} {'samples':>7}  largest error, in rounding errors")
    for name, op in sorted(all_ops().items()):
        for device in devices:
            declared = op.sources[device]
            for source in declared or [None]:
                op.sources[device] = (source,) if source else ()  # else another steps in for it
                op.backends[device].forget()  # the source before it, and its stubs
                kind, fallback = (source.kind, "raise") if source else ("reference", "reference")
                with config.using(fallback=fallback):
                    try:
                        count, error, right = compare(op, device)
                    except JitkernError as e:
                        why = str(e).splitlines()[0]
                        print(f"{name:32} {device:6} {kind:10} {'-':>7}  {why}")
                        continue
                wrong += not right
                print(f"{name:32} {device:6} {kind:10} {count:7}  {error:.2f}")
            op.sources[device] = declared
    stats = events.stats()
    print(
        f"{stats['compiles']:.0f} kernels compiled now, {stats['hits']:.0f} came from "
        f"{config.current().cache_dir}"
    )
    return 1 if wrong else 0


def compare(op: Op, device: str) -> tuple[int, float, bool]:
    """Return the samples, the largest error, and whether all are within what `check` allows.

    Errors are against the reference in float64, in units of the dtype's epsilon.
    """
    found = [check.compared(op, args) for args in op.sample_inputs(device)]
    right = all(error <= allowed for error, allowed in found)
    return len(found), max((error for error, _ in found), default=0.0), right


if __name__ == "__main__":
    sys.exit(main())
