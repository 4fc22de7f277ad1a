"""Seconds from nothing to a first result, in a fresh process: import, declare, build or load, call.

The clock starts after `import torch` and, on a GPU, the creation of its context; it stops when the
device has finished. Cold: every kernel cache is empty. Warm: the same caches again in a new
process, where jitkern runs with JITKERN_COMPILE=never, which proves that nothing compiles.
Importing is timed, but of modules whose bytecode is written already. Every result is compared with
Torch's, and every artifact of jitkern with the kind that was asked for. All kinds compute x + y on
1024 floats, but for jitkern.extension, which computes a * b + c. A kind that fails is named on
stderr and left out; the exit code is then 1.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benches import common
from benches.common import ChildFailed
from benches.kinds import KINDS, RAW, Kind

CHILD = "benches.one_first_call"
IMPORT = Kind("import jitkern.ops", ("cpu", "cuda"), "jitkern.ops")
WARM_ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(","),
        default=list(KINDS),
        help=f"some of {','.join(KINDS)}",
    )
    options = common.parsed(parser, arguments)
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"there is no kind `{unknown[0]}`: expected some of {','.join(KINDS)}")
    asked = [kind for kind in KINDS.values() if kind.name in options.kinds]
    kinds = [kind for kind in asked if _runs(kind, options.device)]
    with tempfile.TemporaryDirectory(prefix="benches-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(Path(scratch), options.device, options.rounds)
        cold = bench.cold(kinds)
        warm = bench.warm([kind for kind in kinds if kind.name in cold])
        import_ops_s = bench.import_ops()
    ratio = {**_ratio("cold", cold), **_ratio("warm", warm)}
    alone = {"import_ops_s": import_ops_s} if import_ops_s else {}
    rows = [(name, *_cells(cold, name), *_cells(warm, name)) for name in cold]
    rows += [(IMPORT.name, "", "", f"{seconds:.4f}", "") for seconds in alone.values()]
    header = ("first call", "cold s", "load_inline takes", "warm s", "load_inline takes")
    common.report(options, header, rows, cold=cold, warm=warm, ratio=ratio, **alone)
    return 1 if bench.failed else 0


class Bench:
    """The fresh processes of one run, and the caches that they leave each other."""

    def __init__(self, scratch: Path, device: str, rounds: int | None) -> None:
        self.scratch = scratch
        self.device = device
        self.rounds = rounds
        self.failed: set[str] = set()
        self._homes: dict[str, Path] = {}

    def cold(self, kinds: Sequence[Kind]) -> dict[str, float]:
        """Median seconds of each kind over empty caches."""
        self._warm_up(kinds)
        rounds = {kind.name: self.rounds or kind.cold_rounds for kind in kinds}
        return self._medians("cold", kinds, rounds, self._cold_seconds)

    def warm(self, kinds: Sequence[Kind]) -> dict[str, float]:
        """Median seconds of each kind over the caches that its last cold round left."""
        rounds = {kind.name: self.rounds or WARM_ROUNDS for kind in kinds}
        return self._medians(
            "warm", kinds, rounds, lambda kind: self._seconds(kind, JITKERN_COMPILE="never")
        )

    def import_ops(self) -> float | None:
        """Median seconds of `import jitkern.ops` over `import torch`, with a warm cache if any."""
        ours = [home for name, home in self._homes.items() if KINDS[name].op]
        self._homes[IMPORT.name] = ours[0] if ours else self.scratch / IMPORT.name
        rounds = {IMPORT.name: self.rounds or WARM_ROUNDS}
        return self._medians("warm", [IMPORT], rounds, self._seconds).get(IMPORT.name)

    def _warm_up(self, kinds: Sequence[Kind]) -> None:
        """Import, untimed, what the kinds import: bytecode is written and disks are read once."""
        environment = common.private_environment(self.scratch)
        for module in sorted({kind.imports for kind in kinds}):
            code = f"import torch, {module}; print(0)"
            with contextlib.suppress(ChildFailed):  # the kind itself will say so
                common.fresh_process("-c", code, environment=environment)

    def _cold_seconds(self, kind: Kind) -> float:
        self._homes[kind.name] = Path(tempfile.mkdtemp(prefix=f"{kind.name}-", dir=self.scratch))
        return self._seconds(kind)

    def _seconds(self, kind: Kind, **settings: str) -> float:
        if kind.op:
            settings |= {"JITKERN_PREFER": kind.prefer, "JITKERN_FALLBACK": "raise"}
        environment = common.private_environment(self._homes[kind.name], **settings)
        command = ("-m", CHILD, kind.name, self.device)
        return float(common.fresh_process(*command, environment=environment)["seconds"])

    def _medians(
        self,
        what: str,
        kinds: Sequence[Kind],
        rounds: Mapping[str, int],
        measure: Callable[[Kind], float],
    ) -> dict[str, float]:
        """The kinds take turns, so that a slow minute of the machine hits all of them."""
        measured: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        for number in range(1, max(rounds.values(), default=0) + 1):
            for kind in kinds:
                if kind.name in self.failed or number > rounds[kind.name]:
                    continue
                try:
                    seconds = measure(kind)
                except ChildFailed as e:
                    self.failed.add(kind.name)
                    print(
                        f"FAILED: {what} {kind.name} is left out:{_why(kind, e)}", file=sys.stderr
                    )
                    continue
                measured[kind.name].append(seconds)
                progress = f"{what} {kind.name} {number}/{rounds[kind.name]}: {seconds:.4f} s"
                print(progress, file=sys.stderr, flush=True)
        return {
            name: statistics.median(times)
            for name, times in measured.items()
            if times and name not in self.failed
        }


def _why(kind: Kind, e: ChildFailed) -> str:
    """Return why a kind failed: of a peer its version and the last line, else the whole text."""
    if kind.op or not kind.needs:
        return f"\n{e}"
    return f" it fails with {common.distribution(kind.needs)}: {str(e).splitlines()[-1]}"


def _runs(kind: Kind, device: str) -> bool:
    """Whether this machine can run the kind; what is missing here is said on stderr."""
    missing = kind.missing() if device in kind.devices else ""
    if missing:
        print(f"{kind.name} is left out: there is no {missing} here", file=sys.stderr)
    return device in kind.devices and not missing


def _ratio(what: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """How many times longer load_inline takes than the fastest of our raw kinds, where both ran."""
    raw = [seconds[name] for name in RAW if name in seconds]
    return {what: seconds["load_inline"] / min(raw)} if raw and "load_inline" in seconds else {}


def _cells(seconds: Mapping[str, float], name: str) -> tuple[str, str]:
    """Seconds, and how many times longer load_inline takes."""
    if name not in seconds:
        return "", ""
    times = f"{seconds['load_inline'] / seconds[name]:.1f}x" if "load_inline" in seconds else ""
    return f"{seconds[name]:.4f}", times


if __name__ == "__main__":
    sys.exit(main())
