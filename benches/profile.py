"""A trace of calls of an op, for Perfetto or chrome://tracing, and the times of its kernels.

Each call has a range, `softmax forward 0`, in the trace and as an NVTX range for Nsight Systems.
The trace is written into benches/results, or to the file that --trace names.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benches import common
from benches.kernels import report
from benches.kernels.bench import BACKWARD, FORWARD
from benches.kernels.shapes import Shape, random_like, shapes_of
from benches.kernels.subject import Subject, differentiable, subjects_of
from jitkern.calls.signature import tensors_in
from jitkern.devtools.check import leaves
from jitkern.errors import JitkernError
from jitkern.runtime import specializer

CALLS, WARM_UPS = 10, 3
_MOST = 20  # rows of the table


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print, write, and return the exit code."""
    made = parser()
    options = common.parsed(made, arguments)
    try:
        subjects = subjects_of([options.op])
        if len(subjects) != 1:
            made.error(f"`{options.op}` means {len(subjects)} ops: name one")
        (subject,) = subjects
        names = [options.shape] if options.shape else []
        shape = shapes_of(subject, options.device, dtype=options.dtype, names=names)[0]
        found = profiled(subject, shape, options.device, options.rounds or CALLS)
    except JitkernError as e:
        made.error(str(e))
    stem = report.file_stem(subject.name, options.device)
    path = options.trace or report.RESULTS / f"{stem}.trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    kernels = kernels_of(found, options.device)
    shares = sum(kernel["us"] for kernel in kernels)
    rows = [
        (k["name"], k["calls"], f"{k['us'] / k['calls']:.2f}", f"{k['us'] / shares:.1%}")
        for k in kernels[:_MOST]
    ]
    print(f"the trace is in {path}: open it in https://ui.perfetto.dev", file=sys.stderr)
    header = ("kernel" if options.device == "cuda" else "op", "calls", "us each", "of all")
    common.report(
        options, header, rows,
        op=subject.name, shape=shape.name, trace=str(path), kernels=kernels,
    )  # fmt: skip
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = common.parser(__doc__)
    made.prog = "python -m benches.profile"
    made.add_argument("op", metavar="OP", help="an op, or `module:attribute`")
    made.add_argument(
        "--shape", help="a named shape of benches.kernels, or a call like 'bf16[8192, 4096], 0.5'"
    )
    made.add_argument("--dtype", default="", help="of named shapes")
    made.add_argument("--trace", type=Path, metavar="FILE", help="where to write the trace")
    return made


def profiled(subject: Subject, shape: Shape, device: str, calls: int) -> Any:
    """Return the profile of forward and backward passes. What compiles does so before."""
    passes = Passes(subject, shape, device)
    for number in range(WARM_UPS):
        passes.run(number)
        specializer.settle()  # the next calls are served by C
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, acc_events=True) as found:
        for number in range(calls):
            passes.run(number)
        if device == "cuda":
            torch.cuda.synchronize()
    return found


class Passes:
    """Forward passes of a shape, each followed by its backward pass if the op has one."""

    def __init__(self, subject: Subject, shape: Shape, device: str) -> None:
        self.subject, self.device = subject, device
        self.args = subject.complete(shape.make())
        self.differentiable = subject.op.gradient is not None
        if self.differentiable:
            self.args = leaves(subject.op, self.args)
            outputs = self._outputs()
            self.grads = [random_like(t.detach().to("meta"), device) for t in outputs]

    def _outputs(self) -> list[torch.Tensor]:
        results = tensors_in([self.subject.call(self.subject.function, self.args)])
        return [tensor for tensor in results if tensor.requires_grad]

    def run(self, number: int) -> None:
        """Make the passes, each within a range."""
        if not self.differentiable:
            with self._range(FORWARD, number):
                self.subject.call(self.subject.function, self.args)
            return
        with self._range(FORWARD, number):
            outputs = self._outputs()
        with self._range(BACKWARD, number):
            torch.autograd.grad(outputs, differentiable(self.args), self.grads, allow_unused=True)

    @contextlib.contextmanager
    def _range(self, what: str, number: int) -> Iterator[None]:
        """A range in the trace, and for NVIDIA's tools."""
        name = f"{self.subject.name} {what} {number}"
        nvtx = torch.cuda.nvtx.range(name) if self.device == "cuda" else contextlib.nullcontext()
        with record_function(name), nvtx:
            yield


def kernels_of(found: Any, device: str) -> list[dict[str, Any]]:
    """Return name, number of calls and microseconds of each kernel, or on the CPU of each op."""
    kernels = []
    for event in found.key_averages():
        on_gpu = event.device_type == DeviceType.CUDA
        if on_gpu != (device == "cuda") or event.is_user_annotation:
            continue
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append({"name": event.key, "calls": event.count, "us": us})
    return sorted(kernels, key=lambda kernel: -kernel["us"])


if __name__ == "__main__":
    sys.exit(main())
