"""Ops to tune, and a clock that says what their configurations cost."""

import itertools

import torch
from helpers import H100

from jitkern import jit
from jitkern.declare import Cpp, kernel
from jitkern.launch import autotune, measure
from jitkern.target import Target

SOURCE = """
#if WAY == 13
#error a configuration that does not compile
#endif
extern "C" void scale(T* y, const T* x, double a, long n) {
  for (long i = 0; i < n; i++) y[i] = a * x[i];
}
extern "C" void add(T* x, double a, long n) {
  for (long i = 0; i < n; i++) x[i] += a;
}
"""
ROWS = """
import triton
import triton.language as tl

@triton.jit{plain}
def rows(out, x, n, m, B: tl.constexpr):
    pass
"""
MODULE = """
import torch
from jitkern.declare import Cpp, kernel
op = kernel("jitkern_tuned::scaled(Tensor x, *, float a=2.0) -> Tensor", cpu=Cpp("k.cpp"))
@op.reference
def _(x, a): return x * a
@op.tune("cpu", key=lambda x, a: {key})
def _(x, a): return [{{"WAY": way}} for way in {ways}]
@op.launch("cpu")
def _(k, x, *, a):
    out = torch.empty_like(x)
    k.scale[{{"T": x.dtype, "WAY": k.config["WAY"]}}](out, x, a * k.config["WAY"], x.numel())
    return out
@op.samples
def _(device): yield torch.ones(3, device=device), 2.0
"""
RUN = """
import sys, torch
if {warm}:
    class Refuse:
        def find_spec(self, name, *_):
            if name in ("jitkern.trace.trace", "jitkern.launch.runner", "jitkern.launch.autotune"):
                raise AssertionError(f"a warm process imported {{name}}")
    sys.meta_path.insert(0, Refuse())
else:
    from jitkern.launch import measure
    measured = []
    def milliseconds(run, candidate, device, *, cold):
        run(candidate)()
        measured.append(candidate["WAY"])
        return float(candidate["WAY"])
    measure.milliseconds = milliseconds
import jitkern, tuned
from jitkern.runtime import binding, programs
x = torch.ones(3)
results = {{str(tuned.op(x, a=2.0).tolist()) for _ in range(2)}}
from jitkern import jit
if {warm}:
    print(*results, jitkern.stats()["compiles"])
else:
    from jitkern.runtime import specializer
    specializer.settle()
    print(*results, measured)
"""
_number = itertools.count()
HERE = Target.current("cpu")


def op_of(source, launch, *, schema="(Tensor x) -> Tensor", sample=None):
    """A fresh op of one source. sample: the arguments of its sample on a device."""
    device = "cpu" if isinstance(source, Cpp) else "cuda"
    op = kernel(f"jitkern_launch::f{next(_number)}{schema}", **{device: source})
    op.launch(device)(launch)
    if sample:
        op.samples(lambda device: iter([sample(device)]))
    return op


class Clock:
    """Stands for time: what a configuration costs. Each is run once, and noted."""

    def __init__(self, monkeypatch, cost):
        self.measured = []

        def milliseconds(run, candidate, device, *, cold):
            run(candidate)()
            self.measured.append(candidate)
            return cost(candidate)

        monkeypatch.setattr(measure, "milliseconds", milliseconds)


def ways(x):
    return [{"WAY": 1}, {"WAY": 3}, {"WAY": 2}]


def double(k, x):
    x = x.contiguous()
    y = torch.empty_like(x)
    k.scale[{"T": x.dtype, "WAY": k.config["WAY"]}](y, x, 2.0, x.numel())
    return y


def length(x):
    return x.shape[-1]


def choices(op):
    source = op.sources["cpu"][0]
    return [choice for _, choice in autotune.choices_of(op.name, source, HERE)]


def ways_built(op):
    return {
        dict(entry.manifest.inputs["variant"]["template"]).get("WAY")
        for _, entry in jit.open_cache().entries()
        if entry.op == op.name and "variant" in entry.manifest.inputs
    } - {None}


GPU = Target.parse(H100)
