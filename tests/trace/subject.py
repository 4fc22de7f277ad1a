"""Ops to trace, and what their programs and the Python launcher do."""

import itertools
import math
import re

import torch
from helpers import programs_of

from jitkern.declare import Cpp, kernel
from jitkern.launch.kernels import Kernels
from jitkern.launch.runner import Runner
from jitkern.runtime import specializer
from jitkern.target import Target

NAMESPACE = "jitkern_trace"
SOURCE = """
extern "C" void ints(long* out, long a, long b, long c, long d, long e, long f, long g, long h) {
  const long given[] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; i++) out[i] = given[i];
}
extern "C" void reals(double* out, double a, double b, double c, double d) {
  const double given[] = {a, b, c, d};
  for (int i = 0; i < 4; i++) out[i] = given[i];
}
extern "C" void narrow(double* out, int i, unsigned char u, float f, bool b) {
  out[0] = i, out[1] = u, out[2] = f, out[3] = b;
}
extern "C" void add(double* x, long n, double value) { for (long i = 0; i < n; i++) x[i] += value; }
#ifdef N
extern "C" void constant(double* out) { *out = N; }
#endif
#ifdef T
extern "C" void fill(T* x, long n, long from) { for (long i = 0; i < n; i++) x[i] = (T)(from + i); }
extern "C" void gather(T* out, const T* x, long n0, long n1, long n2, long s0, long s1, long s2) {
  for (long i = 0; i < n0; i++)
    for (long j = 0; j < n1; j++)
      for (long k = 0; k < n2; k++) *out++ = x[i * s0 + j * s1 + k * s2];
}
extern "C" void axpy(T* out, double a, const T* x, const T* y, long n) {
  for (long i = 0; i < n; i++) out[i] = (T)a * x[i] + (y ? y[i] : (T)0);
}
#endif
"""
_number = itertools.count()
INF, NAN, TOP, BOTTOM = math.inf, math.nan, 2**63 - 1, -(2**63)
E = torch.empty(0)


class Subject:
    """A fresh op on the real C compiler, called through Torch and through its Python launcher."""

    def __init__(self, folder, signature, launch, reference=None, text=SOURCE):
        folder.mkdir(exist_ok=True)
        (folder / "k.cpp").write_text(text)
        name = f"{NAMESPACE}::f{next(_number)}"
        self.op = kernel(
            f"{name}{signature}", cpu=Cpp(str(folder / "k.cpp"), flags=["-O0"], strided=True)
        )
        self.op.launch("cpu")(launch)
        if reference:
            self.op.reference(reference)
        source = self.op.sources["cpu"][0]
        self._launcher = self.op.launch_function(source, "cpu")
        self.runner = Runner(name, source, Target.current("cpu"), torch.device("cpu"))

    def python(self, *args):
        """What the Python launcher returns."""
        args, kwargs = self.op.signature.complete(args, {})
        return self._launcher(Kernels(self.runner), *args, **kwargs)

    @property
    def slot(self):
        return programs_of(self.op)

    @property
    def misses(self):
        return self.slot.misses

    @property
    def refusals(self):
        return list(self.slot.refused.values())

    def agrees(self, *args):
        """The op does to copies of these arguments what the Python launcher does; what that is."""
        wanted, found = outcome(self.python, args), outcome(self.op, args)
        assert found == wanted, f"called with {args}"
        return wanted

    def serves(self, *args):
        """Once settled, a call with these arguments agrees without asking Python."""
        specializer.settle()
        before = self.misses
        self.agrees(*args)
        assert self.misses == before, f"{args} asked Python: {self.refusals}"

    def learns(self, *args):
        """A call agrees, and the next one like it is served."""
        returned = self.agrees(*args)
        assert isinstance(returned, list), returned
        self.serves(*args)

    def asks_python(self, *args):
        """A call agrees, and the next one like it asks Python again."""
        for _ in range(2):
            specializer.settle()
            before = self.misses
            self.agrees(*args)
            assert self.misses > before, args


def copied(value):
    """A tensor of the same sizes, strides and alignment over memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(storage, value.storage_offset(), value.shape, value.stride())


def outcome(function, args):
    """What a call returns or raises, and what it leaves in its arguments."""
    made = {id(arg): copied(arg) for arg in args}  # one that is given twice stays one
    args = [made[id(arg)] for arg in args]
    try:
        result = function(*args)
    except Exception as e:
        return type(e), re.sub(r"^\S+\.py:\d+: ", "", str(e))  # which an op adds
    results = result if isinstance(result, (tuple, list)) else [result]
    return [described(value) for value in (*results, *args)]


def described(value):
    """All there is to a tensor but its address; numbers as Python prints them, so NaN is NaN."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.dtype, tuple(value.shape), value.stride(), repr(value.tolist())


def ints(k, *values):
    """A tensor of these integers, by a launch that takes them as arguments."""
    out = torch.empty(8, dtype=torch.int64)
    k.ints(out, *values, *[0] * (8 - len(values)))
    return out


def reals(k, *values):
    """A tensor of these floats, by a launch that takes them as arguments."""
    out = torch.empty(4, dtype=torch.float64)
    k.reals(out, *values, *[0.0] * (4 - len(values)))
    return out


def gathered(k, x):
    """The elements of a tensor of up to three dimensions, read by its sizes and strides."""
    sizes, strides = [*x.shape, 1, 1, 1][:3], [*x.stride(), 0, 0, 0][:3]
    out = torch.empty(x.shape, dtype=x.dtype)
    k.gather[{"T": x.dtype}](out, x, *sizes, *strides)
    return out


A = torch.arange(64, dtype=torch.float32)
MATRICES = {
    "3x4": A[:12].view(3, 4), "2x6": A[12:24].view(2, 6), "transposed": A[:12].view(4, 3).t(),
    "1x5": A[:5].view(1, 5), "5x1": A[:5].view(5, 1), "1x1": A[:1].view(1, 1), "0x4": A[:0].view(0, 4),
    "4x0": A[:0].view(4, 0), "columns": A[:32].view(4, 8)[:, 1:4], "unaligned": A[1:13].view(3, 4),
    "every_other": A[:24].view(3, 8)[:, ::2], "a_column_of_a_transposed": A[:12].view(3, 4).t()[:, :1],
    "odd_strides_of_1": torch.as_strided(A, (1, 4), (99, 1)),
    "odd_strides_of_0": torch.as_strided(A, (0, 3), (7, 2)), "expanded": A[:4].expand(3, 4),
    "expanded_columns": A[:3].view(3, 1).expand(3, 4),
}  # fmt: skip


def length_of(items):
    """The length of a sequence of one or two items, asked by a pattern."""
    match items:
        case [_]:
            return 1.0
        case [_, _]:
            return 2.0
    return 9.0
