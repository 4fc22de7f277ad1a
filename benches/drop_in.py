"""`jitkern.load_inline` against Torch's, in fresh processes: import, build or load, first call.

The clock starts after `import torch` and, on a GPU, the creation of its context; it stops when the
device has finished. Cold: the caches are empty. Warm: the same caches again in a new process, where
jitkern runs with JITKERN_COMPILE=never, which proves that nothing compiles. The contenders take
turns. Three kinds of source: `default` (torch/extension.h and pybind), `no_implicit_headers` (the
headers that it needs, TORCH_LIBRARY), `stable` (LibTorch's stable ABI). All compute x + y on 1024
floats, and every result is compared with Torch's. A ratio says how many times longer Torch takes;
`warm` and `cold` are those of `default`.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benches import common
from benches.common import ChildFailed

CHILD = "benches.one_drop_in"
CONTENDERS = ("torch", "jitkern")
COLD_ROUNDS = {"default": 1, "no_implicit_headers": 2, "stable": 3}
WARM_ROUNDS = 7


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(","),
        default=list(COLD_ROUNDS),
        help=f"some of {','.join(COLD_ROUNDS)}",
    )
    options = common.parsed(parser, arguments)
    if unknown := [kind for kind in options.kinds if kind not in COLD_ROUNDS]:
        parser.error(f"there is no kind `{unknown[0]}`: expected some of {','.join(COLD_ROUNDS)}")
    with tempfile.TemporaryDirectory(prefix="benches-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(Path(scratch), options.device, options.rounds)
        measured = {kind: bench.measure(kind) for kind in options.kinds}
    cold, warm = ({f"{who}.{kind}": times[what][who] for kind, times in measured.items() if times
                   for who in CONTENDERS} for what in ("cold", "warm"))  # fmt: skip
    ratio = {}
    for kind in (kind for kind, times in measured.items() if times):
        for what, seconds in (("warm", warm), ("cold", cold)):
            name = what if kind == "default" else f"{what}.{kind}"
            ratio[name] = seconds[f"torch.{kind}"] / seconds[f"jitkern.{kind}"]
    rows = [
        (f"{what} {kind}", f"{s[f'torch.{kind}']:.4f}", f"{s[f'jitkern.{kind}']:.4f}",
         f"{s[f'torch.{kind}'] / s[f'jitkern.{kind}']:.1f}x")
        for what, s in (("cold", cold), ("warm", warm)) for kind, times in measured.items() if times
    ]  # fmt: skip
    header = ("load_inline", "torch s", "jitkern s", "torch takes")
    common.report(options, header, rows, cold=cold, warm=warm, ratio=ratio)
    return 0 if all(measured.values()) else 1


class Bench:
    """The fresh processes of one run, and the caches that they leave each other."""

    def __init__(self, scratch: Path, device: str, rounds: int | None) -> None:
        self.scratch = scratch
        self.device = device
        self.rounds = rounds
        environment = common.private_environment(scratch)
        for module in ("torch.utils.cpp_extension", "jitkern.dropin.api, jitkern.jit", CHILD):
            with contextlib.suppress(ChildFailed):  # bytecode is written, and disks are read
                code = f"import torch, {module}; print(0)"
                common.fresh_process("-c", code, environment=environment)

    def measure(self, kind: str) -> dict[str, dict[str, float]]:
        """Median seconds, cold and warm, of both contenders; nothing where one of them fails."""
        homes: dict[str, Path] = {}
        times: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
        rounds = {"cold": self.rounds or COLD_ROUNDS[kind], "warm": self.rounds or WARM_ROUNDS}
        for what, total in rounds.items():
            for number in range(total):
                for who in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
                    if what == "cold":
                        homes[who] = Path(tempfile.mkdtemp(prefix=f"{who}-", dir=self.scratch))
                    try:
                        seconds = self._seconds(who, kind, homes[who], warm=what == "warm")
                    except ChildFailed as e:
                        print(f"FAILED: {what} {who}.{kind} is left out:\n{e}", file=sys.stderr)
                        return {}
                    times[what].setdefault(who, []).append(seconds)
                    progress = f"{what} {who}.{kind} {number + 1}/{total}: {seconds:.4f} s"
                    print(progress, file=sys.stderr, flush=True)
        return {
            what: {who: statistics.median(measured) for who, measured in by_contender.items()}
            for what, by_contender in times.items()
        }

    def _seconds(self, who: str, kind: str, home: Path, *, warm: bool) -> float:
        settings = {"JITKERN_COMPILE": "never"} if warm else {}
        environment = common.private_environment(home, **settings)
        command = ("-m", CHILD, who, kind, self.device)
        return float(common.fresh_process(*command, environment=environment)["seconds"])


if __name__ == "__main__":
    sys.exit(main())
