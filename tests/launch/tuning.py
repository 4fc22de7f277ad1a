"""Ops to tune, and a clock that says what their configurations cost."""

import itertools

import torch
from helpers import H100

from jitkern import jit
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
_number = itertools.count()
HERE = Target.current("cpu")


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
