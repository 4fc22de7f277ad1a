"""`jitkern.load` of several files against Torch's: a build from nothing, and one after an edit.

Each build is a fresh process, the contenders take turns, and both edit the same file: one of UNITS
that include Torch's headers, beside the one with the module. The clocks start after `import torch`
and stop when the module has answered; `processor` counts the compilers, too, and is what stays
when other programs run. A ratio says how many times longer Torch takes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benches import common

CONTENDERS = ("torch", "jitkern")
CLOCKS = ("seconds", "processor")
UNITS = 4
_UNIT = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
at::Tensor add%d(const at::Tensor& x) { return at::add(x, %d); }
"""
_CHILD = """
import json, os, sys, time
import torch
who, *files = sys.argv[1:]
started, before = time.perf_counter(), sum(os.times()[:4])
if who == "torch":
    from torch.utils.cpp_extension import load
else:
    from jitkern import load
answer = load(name="rebuild", sources=files).sum(torch.zeros(1)).item()
seconds, processor = time.perf_counter() - started, sum(os.times()[:4]) - before
print(json.dumps({"answer": answer, "seconds": seconds, "processor": processor}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = common.parsed(common.parser(__doc__), arguments)
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds or 1):
        for who in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
            with tempfile.TemporaryDirectory(prefix="benches-", ignore_cleanup_errors=True) as home:
                for what, measured in _round(who, Path(home)).items():
                    for clock in CLOCKS:
                        by_contender = times.setdefault(f"{what}.{clock}", {})
                        by_contender.setdefault(who, []).append(measured[clock])
    medians = {
        what: {who: statistics.median(all_) for who, all_ in by_contender.items()}
        for what, by_contender in times.items()
    }
    ratio = {what: by["torch"] / by["jitkern"] for what, by in medians.items()}
    rows = [
        (what, *(f"{medians[what][who]:.2f}" for who in CONTENDERS), f"{ratio[what]:.2f}x")
        for what in medians
    ]
    header = (f"load of {UNITS + 1} files", "torch s", "jitkern s", "torch takes")
    common.report(options, header, rows, medians=medians, ratio=ratio)
    return 0


def _round(who: str, home: Path) -> dict[str, dict[str, float]]:
    """Measure a contender: a build from nothing, and one after an edit of a unit."""
    files = [home / f"unit{number}.cpp" for number in range(UNITS)]
    for number, file in enumerate(files):
        file.write_text(_UNIT % (number, number))
    calls = " + ".join(f"add{number}(x)" for number in range(UNITS))
    declared = "".join(f"at::Tensor add{number}(const at::Tensor&);\n" for number in range(UNITS))
    bind = home / "bind.cpp"
    bind.write_text(
        f"#include <torch/extension.h>\n{declared}"
        f"static at::Tensor sum(at::Tensor x) {{ return {calls}; }}\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sum", &sum); }\n'
    )
    measured = {}
    for what, edited in (("cold", 0), ("edit", 100)):
        files[0].write_text(_UNIT % (0, edited))
        command = ("-c", _CHILD, who, *map(str, (bind, *files)))
        done = common.fresh_process(*command, environment=common.private_environment(home))
        if done["answer"] != edited + sum(range(UNITS)):
            raise common.ChildFailed(f"{who} answers {done['answer']} from {what}")
        measured[what] = done
        print(f"{who}, {what}: {json.dumps(done)}", file=sys.stderr, flush=True)
    return measured


if __name__ == "__main__":
    sys.exit(main())
