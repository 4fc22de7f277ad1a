"""Compiling Triton kernels through jitkern against Triton itself, in fresh processes, in turns.

All caches are empty, and no GPU is needed: kernels are compiled for `sm_90`. `one`: the first
kernel of a process, with imports. `forty`: forty kernels of forty files, that one included.
`package`: a further kernel, of a package whose import is slow and done. A ratio says how many times
longer jitkern takes, and how many times without the import of Torch: the kernels' files import it,
so that the process that compiles does so, too. It is measured beside the others.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benches import common
from benches.one_triton_compile import write

CHILD = "benches.one_triton_compile"
CONTENDERS = ("triton", "import", "jitkern")
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = common.parsed(common.parser(__doc__), arguments)
    times: dict[str, dict[str, list[float]]] = {who: {} for who in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="benches-", ignore_cleanup_errors=True) as scratch:
        kernels = Path(scratch, "kernels")
        kernels.mkdir()
        write(kernels)
        for number in range(options.rounds or ROUNDS):
            for who in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
                home = Path(tempfile.mkdtemp(prefix=f"{who}-", dir=scratch))
                found = common.fresh_process(
                    "-m", CHILD, who, str(kernels), environment=common.private_environment(home)
                )
                for what, seconds in found.items():
                    times[who].setdefault(what, []).append(seconds)
                print(f"{who} {number + 1}: {found}", file=sys.stderr, flush=True)
    seconds = {
        who: {what: statistics.median(values) for what, values in parts.items()}
        for who, parts in times.items()
    }
    ratio = {what: seconds["jitkern"][what] / of for what, of in seconds["triton"].items()}
    without = {
        what: (seconds["jitkern"][what] - seconds["import"][what]) / of
        for what, of in seconds["triton"].items()
    }
    rows = [
        (
            what,
            *(f"{seconds[who][what]:.3f}" for who in CONTENDERS),
            f"{ratio[what]:.2f}x",
            f"{without[what]:.2f}x",
        )
        for what in ratio
    ]
    header = ("compiled", "triton s", "import s", "jitkern s", "jitkern takes", "without import")
    common.report(options, header, rows, seconds=seconds, ratio=ratio, without=without)
    return 0


if __name__ == "__main__":
    sys.exit(main())
