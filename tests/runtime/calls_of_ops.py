"""Sources of small ops, and calls of them."""

import torch
from helpers import programs_of

from jitkern.runtime import specializer

X = torch.arange(6.0).reshape(2, 3)
SCALE = 'extern "C" void scale(T* out, const T* x, double alpha, long n) { for (long i = 0; i < n; i++) out[i] = T(alpha) * x[i]; }'
SQUARE = 'extern "C" void square(T* out, const T* x, long n) { for (long i = 0; i < n; i++) out[i] = x[i] * x[i]; }'
TWICE = 'extern "C" void twice(T* out, const T* grad, const T* x, long n) { for (long i = 0; i < n; i++) out[i] = 2 * grad[i] * x[i]; }'
INC = 'extern "C" void inc(float* x, long n) { for (long i = 0; i < n; i++) x[i] += 1; }'
MANY = (
    'extern "C" void many(float* out, const float* x, const float* b, double f, long k, long n)'
    " { for (long i = 0; i < n; i++) out[i] = x[i] * f + (b ? b[i] : 0) + k; }"
)
SUM = """
extern "C" void total(double *out, T *const *data, const long *numel, long count, double a) {
  for (long i = 0; i < count; i++)
    for (long j = 0; j < numel[i]; j++) *out += a * data[i][j];
}
"""


def misses(op):
    return programs_of(op).misses


def warmed(op, *args, **kwargs):
    """The op, once it serves such a call without Python."""
    op(*args, **kwargs)
    specializer.settle()
    before = misses(op)
    op(*args, **kwargs)
    assert misses(op) == before, programs_of(op).refused
    return op


def through(op, way):
    packet = getattr(torch.ops.jitkern_test, op.name.split("::")[1])
    return {"public": op, "torch.ops": packet, "overload": op.overload}[way]


WAYS = ("public", "torch.ops", "overload")
