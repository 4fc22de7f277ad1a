"""Prewarm throughput: artifacts a second, with one build at a time and with several.

Every shipped kernel and all that launches it, for several targets, on an empty cache: a fresh
process for each count of jobs, all in turn in each round. Seconds are what prewarm itself counts,
over `import torch`; the ratio is the throughput over that of one job. It is for another Torch than
the installed one, which leaves out Extensions: three of them would take longer than all else.

Then a second run, on the full cache, over a process that imports Torch and the ops and ends: both
are timed from outside, in turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benches import common

TARGETS = ("cuda-sm_80", "cuda-sm_90", "cuda-sm_100")
IMPORTING = "import torch, jitkern.ops; print('{}')"
CODE = "import sys; from jitkern.cli import main; sys.exit(main(sys.argv[1:]))"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--ops", nargs="+", default=["softmax", "softmax_backward", "vec_add"])
    parser.add_argument("--jobs", nargs="+", type=int, default=job_counts())
    options = common.parsed(parser, arguments)
    targets = [f"{arch}-cu130-torch{torch_version()}" for arch in TARGETS]
    seconds: dict[int, list[float]] = {jobs: [] for jobs in options.jobs}
    built = 0
    for _ in range(options.rounds or 2):
        for jobs, taken in seconds.items():
            report = prewarm(options.ops, targets, jobs)
            built = report["built"]
            taken.append(report["seconds"])
    per_second = {jobs: built / statistics.median(taken) for jobs, taken in seconds.items()}
    first = per_second[options.jobs[0]]
    ratio = {str(jobs): rate / first for jobs, rate in per_second.items()}
    rows = [
        (jobs, f"{statistics.median(seconds[jobs]):.2f}", f"{rate:.1f}", f"{ratio[str(jobs)]:.2f}")
        for jobs, rate in per_second.items()
    ]
    importing, again = second_run(options.ops, targets, options.rounds or 3)
    rows += [
        ("importing", f"{importing:.2f}", "", ""),
        ("second run", f"{again:.2f}", "", f"{again / importing:.2f}"),
    ]
    common.report(
        options, ("jobs", "seconds", "artifacts/s", "ratio"), rows,
        artifacts=built, targets=targets, cores=os.cpu_count(),
        seconds={str(jobs): statistics.median(taken) for jobs, taken in seconds.items()},
        per_second={str(jobs): rate for jobs, rate in per_second.items()}, ratio=ratio,
        second_run={"importing": importing, "seconds": again, "ratio": again / importing},
    )  # fmt: skip
    return 0


def job_counts() -> list[int]:
    """1, 2, 4, ... up to the cores of this machine."""
    return [1 << power for power in range((os.cpu_count() or 1).bit_length())]


def torch_version() -> str:
    """One that is not installed."""
    from jitkern.target import Target

    return "2.11.0" if Target.current("cpu").torch != "2.11.0" else "2.12.0"


def prewarm(ops: Sequence[str], targets: Sequence[str], jobs: int) -> dict[str, float]:
    """The report of `jitkern prewarm` on an empty cache."""
    with tempfile.TemporaryDirectory(prefix="prewarm-") as home:
        environment = common.private_environment(Path(home))
        return common.fresh_process(
            *command(ops, targets), f"--jobs={jobs}", environment=environment
        )


def second_run(ops: Sequence[str], targets: Sequence[str], rounds: int) -> tuple[float, float]:
    """The seconds that a process takes to import all, and to prewarm what is there already."""
    with tempfile.TemporaryDirectory(prefix="prewarm-") as home:
        environment = common.private_environment(Path(home))
        common.fresh_process(*command(ops, targets), environment=environment)
        taken: dict[tuple[str, ...], list[float]] = {
            ("-W", "ignore", "-c", IMPORTING): [], command(ops, targets): [],
        }  # fmt: skip
        for _ in range(rounds):
            for arguments, seconds in taken.items():
                started = time.perf_counter()
                common.fresh_process(*arguments, environment=environment)
                seconds.append(time.perf_counter() - started)
    importing, again = map(statistics.median, taken.values())
    return importing, again


def command(ops: Sequence[str], targets: Sequence[str]) -> tuple[str, ...]:
    """The arguments of a Python that prewarms, and reports in JSON."""
    named = [f"--target={target}" for target in targets]
    return ("-W", "ignore", "-c", CODE, "prewarm", *ops, *named, "--json")


if __name__ == "__main__":
    sys.exit(main())
