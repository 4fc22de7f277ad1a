"""Kernels beside their peers: kernel and call times, and shares of what memory gives.

Each op is compared with its reference, run by PyTorch and by torch.compile with static and dynamic
shapes, and with kernels of other packages that are installed here: Liger, quack, FlashInfer, CuPy.
All take turns on the same random arguments, forward and backward. The shares are of a copy and of a
read by 16-byte accesses (on the CPU: by PyTorch), measured in the same run. `first s` is a cold
first call, in a process of its own. What is wrong against the reference in float64 gets no time.

OP is an op, a package, or `module:attribute`; by default all ops. A CSV and plots are written into
benches/results, or DIR; a --quick run writes only where --plot says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benches import common
from benches.kernels import report
from benches.kernels.bench import BACKWARD, FORWARD, SECONDS, Bench, bench_op
from benches.kernels.peers import check_names, known_names
from benches.kernels.shapes import shapes_of
from benches.kernels.subject import subjects_of
from jitkern.devtools import timing
from jitkern.errors import JitkernError
from jitkern.source.dtypes import DTYPES

QUICK_SECONDS, QUICK_SAMPLES = 0.1, 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write, and return the exit code: 1 if a kernel of ours is wrong or fails."""
    made = parser()
    options = common.parsed(made, arguments)
    quick = options.quick
    try:
        subjects = subjects_of(options.ops)
        check_names(options.peers)
        shapes = {}
        for subject in subjects:
            of = shapes_of(subject, options.device, dtype=options.dtype, names=options.shapes)
            shapes[subject.name] = of[:1] if quick and not options.shapes else of
    except JitkernError as e:
        made.error(str(e))
    folder = options.plot or (None if quick else report.RESULTS)
    benches: list[Bench] = []
    files: list[Path] = []
    for subject in subjects:
        try:
            bench = bench_op(
                subject,
                shapes[subject.name],
                device=options.device,
                only=options.peers,
                directions=options.directions,
                seconds=QUICK_SECONDS if quick else SECONDS,
                most=options.rounds or (QUICK_SAMPLES if quick else timing.MOST),
                cold=not quick,
            )
        except JitkernError as e:
            print(f"FAILED: {subject.name} is left out: {e}", file=sys.stderr)
            continue
        benches.append(bench)
        files += report.write(bench, folder) if folder else []
    _left_out(benches)
    rows = [report.cells(row) for bench in benches for row in bench.rows]
    common.report(
        options, report.HEADER, rows,
        ops=[bench.as_json() for bench in benches], files=[*map(str, files)],
    )  # fmt: skip
    return 0 if len(benches) == len(subjects) and not any(b.failed for b in benches) else 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = common.parser(__doc__)
    made.prog = "python -m benches.kernels"
    made.add_argument("ops", nargs="*", metavar="OP")
    made.add_argument(
        "--shapes", nargs="+", default=[], metavar="SHAPE",
        help="names of shapes, `all`, `samples`, or calls like 'bf16[8192, 4096], 0.5'",
    )  # fmt: skip
    made.add_argument(
        "--dtype", choices=list(DTYPES), default="", metavar="DTYPE",
        help="of named shapes; default: bf16 on a GPU, f32 on the CPU",
    )  # fmt: skip
    made.add_argument(
        "--peers", type=lambda text: text.split(","), default=[], metavar="NAME,…",
        help="some of " + ", ".join(known_names()[1:]),
    )  # fmt: skip
    made.add_argument(
        "--direction", dest="directions", type=lambda text: [text], choices=([FORWARD], [BACKWARD]),
        default=[FORWARD, BACKWARD], metavar="forward|backward", help="default: both",
    )  # fmt: skip
    made.add_argument("--plot", type=Path, metavar="DIR", help="write the CSV and the plots there")
    made.add_argument(
        "--quick", action="store_true", help="the first shape, few samples, no first calls"
    )
    return made


def _left_out(benches: Sequence[Bench]) -> None:
    """Name once, on stderr, what was not measured."""
    reasons = {
        f"{name} is left out: {reason}"
        for bench in benches
        for name, reason in bench.left_out.items()
    }
    for line in sorted(reasons):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
