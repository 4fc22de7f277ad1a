"""Seconds from nothing to the first result, each in a fresh process: import, declaration, build or load, call.

The clock starts after `import torch` and, on a GPU, the creation of its context; it stops when the device has
finished. Cold: every kernel cache is empty. Warm: the same caches again in a new process, where jitkern runs
with JITKERN_COMPILE=never, which proves that nothing compiles. Every result is compared with Torch's, and
every artifact of jitkern with the kind that was asked for. All kinds compute x + y on 1024 floats, but for
jitkern.extension, which computes a * b + c. A kind that fails is named on stderr and left out; the exit code
is then 1. Importing is timed, but of modules whose bytecode is written already.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

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
    kinds = [
        kind
        for kind in KINDS.values()
        if kind.name in options.kinds and _runs(kind, options.device)
    ]
    with tempfile.TemporaryDirectory(
        prefix="jitkern-bench-", ignore_cleanup_errors=True
    ) as scratch:
        bench = Bench(Path(scratch), options.device, options.rounds)
        cold = bench.cold(kinds)
        warm = bench.warm([kind for kind in kinds if kind.name in cold])
        import_ops_s = bench.import_ops()
    ratio = {
        what: ratio
        for what, seconds in (("cold", cold), ("warm", warm))
        if (ratio := _ratio(seconds))
    }
    fields = {
        "cold": cold,
        "warm": warm,
        "ratio": ratio,
        **({"import_ops_s": import_ops_s} if import_ops_s else {}),
    }
    rows = [
        (name, _seconds(cold, name), _seconds(warm, name), _times(cold, name), _times(warm, name))
        for name in cold
    ]
    rows += [(IMPORT.name, "", f"{import_ops_s:.4f}", "", "")] if import_ops_s else []
    common.report(
        options, ("first call", "cold s", "warm s", "load_inline cold", "warm"), rows, **fields
    )
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
        """Median seconds of `import jitkern.ops` over `import torch`, with the cache of a kind of ours if one ran."""
        ours = [home for name, home in self._homes.items() if KINDS[name].op]
        self._homes[IMPORT.name] = ours[0] if ours else self.scratch / IMPORT.name
        return self._medians(
            "warm", [IMPORT], {IMPORT.name: self.rounds or WARM_ROUNDS}, self._seconds
        ).get(IMPORT.name)

    def _warm_up(self, kinds: Sequence[Kind]) -> None:
        """Import what the kinds import once, untimed: bytecode gets written, and files read from disk, only once."""
        environment = common.private_environment(self.scratch)
        for module in sorted({kind.imports for kind in kinds}):
            with contextlib.suppress(ChildFailed):  # the kind itself will say so
                common.fresh_process(
                    "-c", f"import torch, {module}; print(0)", environment=environment
                )

    def _cold_seconds(self, kind: Kind) -> float:
        self._homes[kind.name] = Path(tempfile.mkdtemp(prefix=f"{kind.name}-", dir=self.scratch))
        return self._seconds(kind)

    def _seconds(self, kind: Kind, **settings: str) -> float:
        if kind.op:
            settings |= {"JITKERN_PREFER": kind.prefer, "JITKERN_FALLBACK": "raise"}
        environment = common.private_environment(self._homes[kind.name], **settings)
        return float(
            common.fresh_process("-m", CHILD, kind.name, self.device, environment=environment)[
                "seconds"
            ]
        )

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
                    measured[kind.name].append(measure(kind))
                except ChildFailed as e:
                    self.failed.add(kind.name)
                    print(f"FAILED: {what} {kind.name} is left out:\n{e}", file=sys.stderr)
                else:
                    print(
                        f"{what} {kind.name} {number}/{rounds[kind.name]}: {measured[kind.name][-1]:.4f} s",
                        file=sys.stderr,
                    )
        return {
            name: statistics.median(times)
            for name, times in measured.items()
            if times and name not in self.failed
        }


def _runs(kind: Kind, device: str) -> bool:
    """Whether this machine can run the kind; what is missing, but for the device, is said on stderr."""
    if device not in kind.devices:
        return False
    missing = kind.needs if kind.needs and not importlib.util.find_spec(kind.needs) else ""
    if kind.name == "compile_kernel" and not hasattr(torch.cuda, "_compile_kernel"):
        missing = "torch.cuda._compile_kernel"
    if missing:
        print(f"{kind.name} is left out: there is no {missing} here", file=sys.stderr)
    return not missing


def _ratio(seconds: Mapping[str, float]) -> float | None:
    """How many times longer load_inline takes than our fastest kind that needs no Torch header."""
    raw = [seconds[name] for name in RAW if name in seconds]
    return seconds["load_inline"] / min(raw) if raw and "load_inline" in seconds else None


def _seconds(seconds: Mapping[str, float], name: str) -> str:
    return f"{seconds[name]:.4f}" if name in seconds else ""


def _times(seconds: Mapping[str, float], name: str) -> str:
    both = name in seconds and "load_inline" in seconds
    return f"{seconds['load_inline'] / seconds[name]:.1f}x" if both else ""


if __name__ == "__main__":
    sys.exit(main())
