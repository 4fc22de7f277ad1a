"""Launch functions run once with proxies, against the same functions run by the Python launcher."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import slot_of

from jitkern.declare import Cpp, kernel
from jitkern.errors import LaunchError
from jitkern.launch.kernels import Kernels, Runner
from jitkern.runtime import binding, linker
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")
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
        self.op = kernel(f"{name}{signature}", cpu=Cpp(str(folder / "k.cpp")))
        self.op.launch("cpu")(launch)
        if reference:
            self.op.reference(reference)
        source = self.op.sources["cpu"][0]
        self._launcher = self.op.launcher(source, "cpu")
        self._runner = Runner(name, source, Target.current("cpu"), torch.device("cpu"))

    def python(self, *args):
        """What the Python launcher returns."""
        args, kwargs = self.op.complete(args, {})
        return self._launcher(Kernels(self._runner), *args, **kwargs)

    @property
    def slot(self):
        return slot_of(self.op)

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
        linker.settle()
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
            linker.settle()
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
        return type(e), str(e)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [described(value) for value in (*results, *args)]


def described(value):
    """All there is to a tensor but its address; numbers as Python prints them, so NaN is NaN."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.dtype, tuple(value.shape), value.stride(), repr(value.tolist())


@pytest.fixture
def subject(tmp_path):
    return lambda *args, **kwargs: Subject(tmp_path / "k", *args, **kwargs)


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


# ---------------------------------------------------------------------------------- numbers

PAIRS = [
    (7, 3), (8, 4), (-7, 3), (7, -3), (-7, -3), (0, 5), (0, -5), (1, 1), (-1, 1), (3, 7), (2**31, 2),
    (-(2**40), 2**20), (2**53, 2**52), (2**62, 3), (TOP, 1), (BOTTOM, 1),
]  # fmt: skip
ZERO, NEG = [(7, 0), (0, 0)], [(BOTTOM, -1)]


def power_by_shifts(n):
    n -= 1
    for shift in (1, 2, 4, 8, 16, 32):
        n |= n >> shift
    return n + 1


def power_by_doubling(n):
    power = 1
    while power < n:
        power *= 2
    return power


def classed(n, m):
    if n < 0 and m < 0:
        return 1
    if n == m or n > 1000:
        return 2
    if not m:
        return 3
    if 0 < n <= m:
        return 4
    return n


# name: (function of n and m, pairs that it is served for, pairs that Python has to answer)
INTEGERS = {
    "add": (lambda n, m: [n + m, n + 5, -3 + n], PAIRS[:-2], [(TOP, 1), (BOTTOM, -1)]),
    "sub": (lambda n, m: [n - m, n - 5, 5 - m], PAIRS[:-2], [(BOTTOM, 1), (TOP, -1)]),
    "mul": (lambda n, m: [n * m, m * 3, 1 * n, n * 1], PAIRS[:-4], [(2**62, 3), (2**40, 2**40), (BOTTOM, -1)]),
    "mul_then_back": (lambda n, m: [n * m // m], PAIRS[:5], [(2**40, 2**40), (2**62, -4), *ZERO]),
    "floordiv": (lambda n, m: [n // m, n // 4, n // -4, 100 // m, -100 // m], PAIRS, [*ZERO, *NEG]),
    "mod": (lambda n, m: [n % m, n % 4, n % -4, 100 % m, -100 % m], PAIRS[:-2], ZERO),
    "divmod": (lambda n, m: [*divmod(n, m), *divmod(n, 5), *divmod(17, m)], PAIRS[:-1], [*ZERO, *NEG]),
    "cdiv": (lambda n, m: [-(-n // m), -(-n // 256), (n + 255) // 256], PAIRS[:-2], [*ZERO, (BOTTOM, 1)]),
    "square": (lambda n, m: [m**2, m**3, m**1, m**0], PAIRS[:12], [(1, 2**40)]),
    "power_below_zero": (lambda n, m: [int(m**-1 * 64)], PAIRS[:8], ZERO),
    "power_with_a_modulus": (lambda n, m: [pow(n, 2, 7), pow(n, 3, m)], PAIRS[:8], []),
    "neg": (lambda n, m: [-n, +n, -m], PAIRS[:-1], [(BOTTOM, 1)]),
    "abs": (lambda n, m: [abs(n), abs(m)], PAIRS[:-1], [(BOTTOM, 1)]),
    "min_max": (lambda n, m: [min(n, m), max(n, m), min(n, 4, m), max(0, n), max([n, m, 2])], PAIRS, []),
    "bits": (lambda n, m: [n & m, n | m, n ^ m, n & 15, ~0 ^ n], PAIRS, []),
    "shifts": (lambda n, m: [n >> 2, m << 3, n >> 70], PAIRS, [(1, 2**61)]),
    "shifts_by_n": (lambda n, m: [5 >> m, n >> m], [(7, 3), (-7, 3), (7, 0), (7, 90)], [(7, -3)]),
    "shifted_one": (lambda n, m: [1 << m], [(0, 3), (0, 62), (0, 0)], [(0, 63), (0, -1), (0, 200)]),
    "power_of_2_by_bit_length": (lambda n, m: [1 << (n - 1).bit_length()], [(5, 0), (1, 0), (2**20, 0), (2**20 + 1, 0), (2**62, 0)], [(2**62 + 1, 0), (0, 0)]),
    "power_of_2_by_shifts": (lambda n, m: [power_by_shifts(n)], [(5, 0), (1, 0), (0, 0), (-9, 0), (2**20, 0), (2**40 + 1, 0), (2**62, 0)], [(2**62 + 1, 0), (BOTTOM, 0)]),
    "power_of_2_by_doubling": (lambda n, m: [power_by_doubling(n)], [(5, 0), (-1, 0), (0, 0), (1, 0), (8, 0), (9, 0), (2**40 + 1, 0)], []),
    "comparisons": (lambda n, m: [int(n < m), int(n <= m), int(n > m), int(n >= m), int(n == m), int(n != m)], PAIRS, []),
    "comparisons_at_the_edge": (lambda n, m: [int(n < 2**63), int(n <= TOP), int(n > BOTTOM), int(n >= BOTTOM), int(n == BOTTOM), int(n != 2**63), int(n < BOTTOM)], PAIRS, []),
    "chained": (lambda n, m: [int(0 < n <= m), int(n == m == 1)], PAIRS, []),
    "branches": (lambda n, m: [classed(n, m)], [*PAIRS, *ZERO], []),
    "and_or_not": (lambda n, m: [n and m, n or m, int(not n), n if m else -1], [*PAIRS, *ZERO], []),
    "membership": (lambda n, m: [int(n in (1, 7, 8)), int(m == 3), int(n in {0, 7})], PAIRS[:8], []),
    "sum_and_sorted": (lambda n, m: [sum([n, m, 1]), *sorted([n, 4, m])], PAIRS[:-3], []),
    "int": (lambda n, m: [int(n) + m, n.__index__() if n is None else 0], PAIRS[:5], []),
    "math": (lambda n, m: [math.floor(n), math.ceil(n), math.trunc(n), round(n)], PAIRS[:6], []),
    "prod": (lambda n, m: [math.prod([n, m, 2])], PAIRS[:8], [(2**40, 2**40)]),
    "bool_arithmetic": (lambda n, m: [(n > m) + 1, n * True, n + (m > 3)], PAIRS[:-2], []),
    "a_constant": (lambda n, m: [TOP, BOTTOM, -1, 2**31], PAIRS, []),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_computed_as_python_computes_them(subject, name):
    compute, served, odd = INTEGERS[name]
    tested = subject(
        "(Tensor x, int n, int m) -> Tensor", lambda k, x, n, m: ints(k, *compute(n, m))
    )
    for pair in served:
        tested.learns(E, *pair)
    for pair in served:
        tested.serves(E, *pair)
    for pair in odd:
        tested.asks_python(E, *pair)
    for pair in served:
        tested.serves(E, *pair)


def test_an_odd_first_call_does_not_keep_the_others_from_being_served(subject):
    tested = subject("(Tensor x, int n) -> Tensor", lambda k, x, n: ints(k, n * n // n))
    tested.asks_python(E, 2**40)
    tested.learns(E, 5)


FLOATS = [
    (1.5, 2.0), (-1.5, 2.0), (2.5, -0.5), (0.1, 0.3), (3.0, 3.0), (0.0, 1.0), (-0.0, 1.0),
    (1e-320, 2.0), (-7.25, 0.75), (2.0**53 + 2, 3.0), (1e18, -4.0), (1e300, 1e10),
]  # fmt: skip
ODD = [(INF, 1.0), (-INF, 2.0), (NAN, 1.0), (1.0, INF), (INF, INF)]
BIG = 2**53 + 1
# as above; `f` and `g` are floats, `n` is an int
REALS = {
    "add": (lambda f, g, n: [f + g, f + 1, 0.5 + g, n + f], [*FLOATS, *ODD], []),
    "sub": (lambda f, g, n: [f - g, f - 1, 0.5 - g, n - f], [*FLOATS, *ODD], []),
    "mul": (lambda f, g, n: [f * g, f * 3, 1 * f, n * g], [*FLOATS, *ODD, (1e300, 1e300)], []),
    "truediv": (lambda f, g, n: [f / g, f / 3, n / 7, n / g], [*FLOATS, *ODD], [(1.0, 0.0), (0.0, -0.0)]),
    "truediv_by_a_large_constant": (lambda f, g, n: [n / (2**60 + 1), n / (2**62 - 3)], [], FLOATS[:2]),
    "reciprocal": (lambda f, g, n: [1 / g, 1.0 / n], FLOATS, [(1.0, 0.0)]),
    "neg": (lambda f, g, n: [-f, +f, -g], [*FLOATS, *ODD], []),
    "abs": (lambda f, g, n: [abs(f), abs(g)], [*FLOATS, *ODD], []),
    "min_max": (lambda f, g, n: [min(f, g), max(f, g), max(f, 0), max(0.0, f)], [*FLOATS, *ODD], []),
    "square": (lambda f, g, n: [f**2, g**1], FLOATS[:-1], [(1e200, 1.0)]),
    "cube": (lambda f, g, n: [f**3, g**4], [*FLOATS[:8], (1.1, 1.3), (0.7, 2.3), (12345.678, 0.123)], [(1e200, 1.0)]),
    "comparisons": (lambda f, g, n: [float(f < g), float(f <= g), float(f == g), float(f != g)], [*FLOATS, *ODD], []),
    "comparisons_with_integers": (lambda f, g, n: [float(f < n), float(f >= 2), float(g == n), float(n > f)], [*FLOATS, *ODD], []),
    "less_than_a_large_constant": (lambda f, g, n: [float(f < BIG)], [], [(2.0**53 + 2, 0.0), (2.0**53, 0.0)]),
    "more_than_a_large_constant": (lambda f, g, n: [float(f > BIG - 2)], [(2.0**53 - 2, 0.0), (2.0**53, 0.0), (2.0**54, 0.0)], []),
    "branches": (lambda f, g, n: [1.0 if f > 0 else 2.0, f or g, float(not f), f and g], [*FLOATS, (INF, 1.0)], []),
    "floor_ceil_trunc": (lambda f, g, n: [math.floor(f) * 1.0, math.ceil(f) * 1.0, math.trunc(f) * 1.0, math.floor(g) + n], FLOATS[:-1], [(INF, 1.0), (NAN, 1.0), (1e19, 1.0)]),
    "int_of_a_float": (lambda f, g, n: [int(f) * 1.0, float(int(g) // 2)], FLOATS[:-1], [(INF, 1.0)]),
    "sqrt": (lambda f, g, n: [math.sqrt(abs(n)), 1 / math.sqrt(g * g)], FLOATS[:6], []),
    "exp_and_log": (lambda f, g, n: [math.exp(f), math.log2(abs(g)), math.isinf(f) * 1.0], FLOATS[:6], []),
    "passed_on": (lambda f, g, n: [f, g, n, 1], [*FLOATS, *ODD], []),
    "constants": (lambda f, g, n: [INF, -INF, NAN, -0.0], FLOATS[:2], []),
}  # fmt: skip


@pytest.mark.parametrize("name", REALS)
def test_floats_are_computed_as_python_computes_them(subject, name):
    compute, served, odd = REALS[name]
    tested = subject(
        "(Tensor x, float f, float g, int n) -> Tensor",
        lambda k, x, f, g, n: reals(k, *compute(f, g, n)),
    )
    calls = [(E, *pair, (5, -3, 1, 2**53)[i % 4]) for i, pair in enumerate(served)]
    for call in calls:
        tested.learns(*call)
    for pair in odd:
        tested.asks_python(E, *pair, 5)
    for call in calls:
        tested.serves(*call)


@pytest.mark.parametrize("n", [2**53 + 1, -(2**53) - 1, TOP, BOTTOM], ids=str)
def test_an_integer_that_is_not_exact_as_a_float_is_rounded_as_python_rounds_it(subject, n):
    tested = subject(
        "(Tensor x, int n) -> Tensor",
        lambda k, x, n: reals(k, n / 3, n * 0.5, n, float(n < 2.0**53)),
    )
    tested.learns(E, 5)
    tested.asks_python(E, n)


def test_numbers_are_narrowed_as_the_python_launcher_narrows_them(subject):
    def launch(k, x, n, f, b):
        out = torch.empty(4, dtype=torch.float64)
        k.narrow(out, n, n, f, b)
        return out

    tested = subject("(Tensor x, int n, float f, bool b) -> Tensor", launch)
    for call in ((0, 0.1, True), (255, 3e38, True), (7, NAN, False), (7, -INF, False)):
        tested.learns(E, *call)
    for f in (1e300, -1e300, 2.0**128):
        tested.asks_python(E, 0, f, True)
    for n in (-1, 256, 2**31, BOTTOM):
        tested.asks_python(E, n, 0.1, True)


def test_a_tensor_that_torch_negates_when_it_is_read_reaches_a_kernel_negated(subject):
    tested = subject("(Tensor x) -> Tensor", gathered)
    plain, z = torch.ones(2), torch.tensor([1 + 2j, 3 + 4j])
    tested.learns(plain)
    tested.learns(z.imag)
    assert tested.op(z.conj().imag).tolist() == [-2, -4]
    assert tested.op(torch._efficientzerotensor(2)).tolist() == [0, 0]


def test_a_number_out_of_the_kernels_range_is_a_launch_error(subject):
    tested = subject("(Tensor x, int n) -> Tensor", lambda k, x, n: ints(k, n + 1))
    tested.learns(E, 1)
    with pytest.raises(
        LaunchError,
        match=r"argument 2 \(`long a`\) must be an integer that fits i64, got 9223372036854775808",
    ):
        tested.op(E, TOP)


def test_one_variant_serves_every_number_that_takes_the_same_branches(subject):
    tested = subject(
        "(Tensor x, int n, float f) -> Tensor", lambda k, x, n, f: reals(k, n * 2, f * n, f)
    )
    tested.learns(torch.empty(3), 1, 0.5)
    for x, n, f in (
        (torch.empty(9), -5, 0.25),
        (torch.empty(0), 2**40, NAN),
        (torch.empty(2), 0, -INF),
    ):
        tested.serves(x, n, f)
    assert tested.misses == 1


# ---------------------------------------------------------------------------- what tensors are

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
ASKED = {
    "sizes": lambda x: [x.shape[0], x.shape[-1], x.size(1), x.size()[0], *x.shape],
    "products": lambda x: [math.prod(x.shape[:-1]), x.shape[:-1].numel(), x.numel(), x.nelement(), x.nbytes, x.shape.numel()],
    "strides": lambda x: [x.stride(0), x.stride(-1), *x.stride()],
    "kinds": lambda x: [x.dim(), x.ndim, x.element_size(), x.itemsize, int(x.is_cuda), int(x.is_floating_point()), int(x.is_cpu)],
    "contiguous": lambda x: [int(x.is_contiguous())],
    "alignment": lambda x: [x.data_ptr() % 16, int(x.data_ptr() % 8 == 0), int((x.data_ptr() | x.shape[1] * 4) & 15 == 0)],
    "compared": lambda x: [int(x.shape == (3, 4)), int(x.shape[0] == x.shape[1]), int(x.stride() == (4, 1)), int(1 in x.shape), x.shape.count(1)],
    "unpacked": lambda x: [math.prod(s for s in x.shape if s > 1), sum(x.shape), max(x.shape), *reversed(x.shape)],
    "instances": lambda x: [int(isinstance(x, torch.Tensor)), int(isinstance(x.shape[0], int)), int(isinstance(x.shape, tuple)), int(isinstance(x.shape, torch.Size))],
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_tensor_answers_in_a_trace_as_it_does_in_python(subject, name):
    tested = subject("(Tensor x) -> Tensor", lambda k, x: ints(k, *ASKED[name](x)))
    for matrix in MATRICES.values():
        tested.learns(matrix)
    for matrix in MATRICES.values():
        tested.serves(matrix)


def test_another_dtype_or_rank_is_another_variant(subject):
    def launch(k, x):
        kind = {torch.float32: 1, torch.float64: 2}.get(x.dtype, 3)
        return ints(k, kind, x.dim(), x.numel(), *([x.shape[1]] if x.dim() == 2 else []))

    tested = subject("(Tensor x) -> Tensor", launch)
    given = [
        torch.ones(2, 3),
        torch.ones(2, 3).double(),
        torch.ones(4).int(),
        torch.ones(()).bool(),
    ]
    for x in given:
        tested.learns(x)
    for x in given:
        tested.serves(x)
    assert tested.misses == 4


def test_two_tensors_are_told_apart_by_what_they_are(subject):
    def launch(k, x, y):
        return ints(
            k,
            int(x.shape == y.shape),
            int(x.dtype == y.dtype),
            int(x.stride() == y.stride()),
            int(x.data_ptr() == y.data_ptr()),
        )

    tested = subject("(Tensor x, Tensor y) -> Tensor", launch)
    for y in (torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3).int()):
        tested.learns(torch.ones(2, 3), y)


# ------------------------------------------------------------------------------------- views

VIEWS = {
    "view_flat": lambda x: x.view(-1),
    "view_swapped": lambda x: x.view(x.shape[1], x.shape[0]),
    "view_with_a_hole": lambda x: x.view(x.shape[0], -1, 1),
    "view_same": lambda x: x.view(x.shape),
    "reshape_flat": lambda x: x.reshape(-1),
    "reshape_swapped": lambda x: x.reshape((x.shape[1], x.shape[0])),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(-1, 0),
    "permute": lambda x: x.permute(1, 0),
    "torch_transpose": lambda x: torch.transpose(x, 0, 1),
    "rows_from_1": lambda x: x[1:],
    "rows_to_the_last": lambda x: x[:-1],
    "rows_beyond": lambda x: x[:100],
    "rows_backwards": lambda x: x[2:1],
    "first_columns": lambda x: x[:, :2],
    "inner": lambda x: x[1:, 1:],
    "half": lambda x: x[: x.shape[0] // 2],
    "last_row": lambda x: x[-1],
    "first_column": lambda x: x[:, 0],
    "last_column": lambda x: x[..., -1],
    "element": lambda x: x[0, 0],
    "none": lambda x: x[None],
    "none_last": lambda x: x[..., None],
    "all": lambda x: x[:],
    "select": lambda x: x.select(1, 0),
    "narrow": lambda x: x.narrow(1, 0, 1),
    "unsqueeze_first": lambda x: x.unsqueeze(0),
    "unsqueeze_inner": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "squeeze_first": lambda x: x.squeeze(0),
    "squeeze_last": lambda x: x.squeeze(-1),
    "expand_new": lambda x: x.expand(2, -1, -1),
    "expand_new_to_1": lambda x: x.expand(1, *x.shape),
    "expand_row": lambda x: x[:1].expand(3, -1),
    "detach": lambda x: x.detach(),
    "twice": lambda x: x.t()[1:].t()[1:],
    "contiguous": lambda x: x.contiguous(),
    "contiguous_view": lambda x: x.t().contiguous()[1:],
}  # fmt: skip
# `reshape` may copy where Torch views, and the strides are then those of the copy.
KEEPING_STRIDES = [name for name in VIEWS if not name.startswith(("reshape", "flatten"))]


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_the_same_elements(subject, name):
    tested = subject("(Tensor x) -> Tensor", lambda k, x: gathered(k, VIEWS[name](x)))
    tested.learns(MATRICES["3x4"])
    for matrix in MATRICES.values():
        tested.agrees(matrix)
    linker.settle()
    for matrix in MATRICES.values():
        tested.agrees(matrix)
    tested.serves(MATRICES["2x6"])


@pytest.mark.parametrize("name", KEEPING_STRIDES)
def test_a_view_has_the_sizes_strides_and_address_that_torch_gives_it(subject, name):
    def launch(k, x):
        y = VIEWS[name](x)
        moved = y.data_ptr() - x.data_ptr() if y.numel() and "contiguous" not in name else 0
        return ints(k, int(y.is_contiguous()), moved, *y.shape, *y.stride())

    tested = subject("(Tensor x) -> Tensor", launch)
    matrices = [m for m in MATRICES.values() if m.numel()]
    for matrix in matrices * 2:
        tested.agrees(matrix)
        linker.settle()
    tested.serves(MATRICES["3x4"])


@pytest.mark.parametrize(
    "x", [MATRICES["0x4"], MATRICES["4x0"], MATRICES["1x5"]], ids=["0x4", "4x0", "1x5"]
)
def test_the_address_of_an_empty_view_is_that_of_python(subject, x):
    tested = subject("(Tensor x) -> Tensor", lambda k, x: ints(k, x[1:].data_ptr() % 16))
    tested.learns(torch.ones(3, 5))
    tested.agrees(x)
    linker.settle()
    tested.agrees(x)


@pytest.mark.parametrize(
    ("launch", "good", "bad"),
    [
        (lambda k, x, n, m: ints(k, *x.view(n, m).shape), (3, 4), [(-3, -4), (4, 4), (-1, 4)]),
        (lambda k, x, n, m: ints(k, *x.view(-1, n).shape), (3, 0), [(-3, 0), (5, 0), (0, 0)]),
        (lambda k, x, n, m: ints(k, *x.reshape(n, m).shape), (3, 4), [(-3, -4), (5, 1)]),
        (
            lambda k, x, n, m: ints(k, x[:1].expand(n, m).numel()),
            (3, 12),
            [(-3, 12), (3, -5), (3, 11)],
        ),
        (lambda k, x, n, m: gathered(k, x[n]), (3, 0), [(12, 0), (-13, 0), (-1, 0)]),
        (lambda k, x, n, m: gathered(k, x.select(0, n)), (3, 0), [(12, 0), (-13, 0)]),
        (lambda k, x, n, m: gathered(k, x.narrow(0, n, m)), (3, 4), [(3, 12), (3, -1), (-3, 2)]),
        (lambda k, x, n, m: gathered(k, x[n:m]), (3, 4), [(-3, 12), (5, 1), (-100, 100), (0, 0)]),
        (lambda k, x, n, m: gathered(k, x.new_zeros(n, m)), (3, 4), [(-3, 4), (-3, -4), (0, 7)]),
        (lambda k, x, n, m: gathered(k, x.transpose(n, m)), (0, 0), [(1, 0), (0, -1), (0, 3)]),
    ],
    ids=[
        "view",
        "hole",
        "reshape",
        "expand",
        "index",
        "select",
        "narrow",
        "slice",
        "new_zeros",
        "transpose",
    ],
)
def test_a_bad_size_or_index_is_refused_at_a_later_call_too(subject, launch, good, bad):
    tested = subject("(Tensor x, int n, int m) -> Tensor", launch)
    x = torch.arange(12.0)
    x = x.view(1, 12) if "expand" in launch.__code__.co_names else x
    tested.learns(x, *good)
    for pair in bad:
        tested.agrees(x, *pair)


# ------------------------------------------------------------------------------- allocations


def odd_cube(*order):
    return torch.arange(24.0).view(2, 3, 4).permute(order)


DENSE = {
    **{name: MATRICES[name] for name in ["3x4", "2x6", "transposed", "1x5", "5x1", "1x1", "0x4", "4x0", "unaligned", "a_column_of_a_transposed", "odd_strides_of_1", "odd_strides_of_0"]},
    "cube": odd_cube(0, 1, 2), "permuted_cube": odd_cube(2, 0, 1), "other_cube": odd_cube(1, 0, 2),
    "cube_with_a_1": odd_cube(2, 0, 1)[:, :1], "empty_cube": odd_cube(2, 1, 0)[:0], "scalar": torch.tensor(3.0),
    "vector": torch.arange(5.0), "unaligned_vector": torch.arange(5.0)[1:], "integers": torch.arange(6).view(2, 3).t(),
    "halves": torch.arange(6.0).half().view(2, 3).t(), "bools": torch.ones(3, dtype=torch.bool),
}  # fmt: skip
LOOSE = {
    **{name: MATRICES[name] for name in ["columns", "every_other", "expanded", "expanded_columns"]},
    "every_other_cube": torch.arange(48.0).view(2, 3, 8)[..., ::2], "every_other_vector": torch.arange(9.0)[::2],
    "expanded_cube": torch.arange(4.0).view(1, 1, 4).expand(2, 3, 4),
}  # fmt: skip
ALLOCATED = {
    "empty": lambda k, x: torch.empty(x.shape, dtype=x.dtype).zero_(),
    "empty_of_a_constant": lambda k, x: torch.empty(3, 5).zero_(),
    "empty_of_a_tuple": lambda k, x: torch.empty((x.numel(), 2), dtype=torch.float64).zero_(),
    "empty_by_size": lambda k, x: torch.empty(size=(x.numel(),), device=x.device).zero_(),
    "empty_strided": lambda k, x: torch.empty_strided((2, x.numel()), (1, 2)).zero_(),
    "empty_strided_with_gaps": lambda k, x: torch.empty_strided((2, x.numel()), (2 * x.numel() + 7, 2)).zero_(),
    "zeros": lambda k, x: torch.zeros(x.numel() + 1, dtype=torch.int32).zero_(),
    "zeros_of_a_shape": lambda k, x: torch.zeros(*x.shape, 2).zero_(),
    "new_empty": lambda k, x: x.new_empty(x.shape).zero_(),
    "new_empty_of_a_dtype": lambda k, x: x.new_empty((x.numel(), 0), dtype=torch.int64).zero_(),
    "new_zeros": lambda k, x: x.new_zeros(x.numel(), 1).zero_(),
    "new_empty_strided": lambda k, x: x.new_empty_strided((x.numel(), 3), (1, x.numel())).zero_(),
    "empty_like": lambda k, x: torch.empty_like(x).zero_(),
    "empty_like_of_a_dtype": lambda k, x: torch.empty_like(x, dtype=torch.float64).zero_(),
    "empty_like_contiguous": lambda k, x: torch.empty_like(x, memory_format=torch.contiguous_format).zero_(),
    "empty_like_a_transposed": lambda k, x: (torch.empty_like(x.t()) if x.dim() == 2 else torch.empty_like(x)).zero_(),
    "empty_like_a_contiguous": lambda k, x: torch.empty_like(x.contiguous()).zero_(),
    "zeros_like": lambda k, x: torch.zeros_like(x).zero_(),
    "transposed": lambda k, x: torch.empty(2, x.numel()).t().zero_(),
    "sliced": lambda k, x: torch.empty(x.numel() + 4, 3)[2:, 1:].zero_(),
    "viewed": lambda k, x: torch.empty(x.numel() * 6).view(-1, 3).zero_(),
    "viewed_like": lambda k, x: torch.empty_like(x).view(x.shape).zero_(),
    "unsqueezed": lambda k, x: torch.empty(x.numel(), 2).unsqueeze(1).zero_(),
    "expanded": lambda k, x: torch.zeros(x.numel(), 1).expand(-1, 3).zero_(),
    "expanded_to_1": lambda k, x: torch.zeros(x.numel()).expand(1, -1).zero_(),
    "selected": lambda k, x: torch.empty(2, x.numel())[1].zero_(),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOCATED)
def test_an_output_has_the_dtype_sizes_and_strides_of_pythons(subject, name):
    tested = subject("(Tensor x) -> Tensor", ALLOCATED[name])
    for x in [*DENSE.values(), *LOOSE.values()] * 2:
        tested.agrees(x)
        linker.settle()
    for x in (MATRICES["3x4"], MATRICES["2x6"], MATRICES["0x4"]):
        tested.serves(x)


COPIED = {
    "clone": lambda k, x: x.clone(),
    "clone_contiguous": lambda k, x: x.clone(memory_format=torch.contiguous_format),
    "to": lambda k, x: x.to(torch.complex64),
    "to_and_back": lambda k, x: x.to(torch.int64).to(x.dtype).clone(),
    "float": lambda k, x: x.float().clone(),
    "double": lambda k, x: x.double().clone(),
    "half": lambda k, x: x.half().clone(),
    "copy_": lambda k, x: torch.empty_like(x).copy_(x),
    "copy_to_another_dtype": lambda k, x: torch.empty(x.shape, dtype=torch.float64).copy_(x),
    "contiguous": lambda k, x: x.contiguous().clone(),
    "contiguous_transposed": lambda k, x: x.transpose(0, -1).contiguous().clone(),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_has_the_values_and_strides_of_pythons(subject, name):
    tested = subject("(Tensor x) -> Tensor", COPIED[name])
    for x in [*DENSE.values(), *LOOSE.values()] * 2:
        tested.agrees(x)
        linker.settle()
    for x in (MATRICES["3x4"], MATRICES["2x6"], MATRICES["0x4"]):
        tested.serves(x)


@pytest.mark.parametrize("name", ["3x4", "transposed", "columns", "0x4", "expanded", "1x5"])
def test_contiguous_copies_only_what_is_not(subject, name):
    def launch(k, x):
        y = x.contiguous()
        copies = int(y.data_ptr() != x.data_ptr()) if x.is_contiguous() else 1
        out = torch.empty_like(y)
        k.axpy[{"T": x.dtype}](out, 1.0 + copies, y, None, y.numel())
        return out

    tested = subject("(Tensor x) -> Tensor", launch)
    tested.learns(MATRICES[name])
    tested.learns(MATRICES["2x6"])
    tested.serves(MATRICES[name])


def test_several_outputs_are_returned_in_order(subject):
    def launch(k, x, n):
        a, b, c = torch.empty(n, dtype=torch.int64), torch.empty(2, n).t(), torch.zeros(())
        k.fill[{"T": torch.int64}](a, n, 5)
        k.fill[{"T": torch.float32}](b, 2 * n, x.numel())
        return c, a, b

    tested = subject("(Tensor x, int n) -> (Tensor, Tensor, Tensor)", launch)
    tested.learns(torch.ones(3), 4)
    tested.serves(torch.ones(7), 0)
    tested.serves(torch.ones(0), 9)
    tested.agrees(E, -1)


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "symbolic"])
def test_a_workspace_is_the_calls_own(subject, constant):
    def launch(k, x):
        n = x.numel()
        space = torch.empty(64 if constant else 2 * n, dtype=torch.float64)
        out = torch.empty(n, dtype=torch.float64)
        k.fill[{"T": torch.float64}](space, n, 3)
        k.gather[{"T": torch.float64}](space[n:], space, n, 1, 1, 1, 0, 0)
        k.axpy[{"T": torch.float64}](out, 2.0, space[n : 2 * n], x, n)
        return out

    tested = subject("(Tensor x) -> Tensor", launch)
    tested.learns(torch.ones(5).double())
    for n in (1, 17, 32):
        tested.serves(torch.arange(n).double())


def test_a_kernel_gets_the_address_of_a_view_of_an_allocation(subject):
    def launch(k, x, n):
        out = torch.zeros(x.shape[0], 6, dtype=torch.float64)
        k.fill[{"T": torch.float64}](out[n], 6, 10)
        k.fill[{"T": torch.float64}](out[n + 1 :, 3:], 2, 20)
        return out

    tested = subject("(Tensor x, int n) -> Tensor", launch)
    tested.learns(torch.ones(4), 1)
    tested.serves(torch.ones(6), 3)
    for n in (6, -1):
        tested.agrees(torch.ones(6), n)


def test_the_alignment_of_an_allocation_is_known(subject):
    def launch(k, x, n):
        out = torch.empty(x.numel() + 64)
        return ints(k, out.data_ptr() % 16, out[1:].data_ptr() % 16, out[n:].data_ptr() % 64)

    tested = subject("(Tensor x, int n) -> Tensor", launch)
    tested.learns(E, 3)
    for n in (0, 5, 16):
        tested.serves(torch.ones(100), n)


# ------------------------------------------------------------------- optional and in-place


def present(k, x, y, n, f, b):
    first = y.numel() if y is not None else -1
    flag = -1 if b is None else 10 if b else 20
    return reals(k, first, n if n is not None else -2, -3.5 if f is None else f * 2, flag)


def test_none_is_told_from_what_is_given(subject):
    tested = subject(
        "(Tensor x, Tensor? y=None, int? n=None, float? f=None, bool? b=None) -> Tensor", present
    )
    given = list(
        itertools.product(
            (None, torch.ones(4)), (None, 0, 7), (None, 0.0, NAN), (None, True, False)
        )
    )
    for call in given:
        tested.learns(E, *call)
    for call in given:
        tested.serves(E, *call)
    tested.serves(E)
    assert tested.misses == 2 * 2 * 2 * 3


def test_an_optional_tensor_reaches_its_kernel_as_null(subject):
    def launch(k, x, y, a):
        x = x.contiguous()
        out = torch.empty_like(x)
        k.axpy[{"T": x.dtype}](out, a if a is not None else 1.0, x, y, x.numel())
        return out

    tested = subject("(Tensor x, Tensor? y=None, float? a=None) -> Tensor", launch)
    for call in ((torch.ones(3),), (torch.ones(4), torch.ones(4)), (torch.ones(2), None, 5.0)):
        tested.learns(*call)
    tested.agrees(torch.ones(3), torch.ones(3).double())


def test_a_bool_is_constant_in_a_variant(subject):
    tested = subject(
        "(Tensor x, bool b, bool c=False) -> Tensor",
        lambda k, x, b, c: ints(k, int(b), int(b is True), int(b and not c), int(c is False)),
    )
    for b, c in itertools.product((True, False), repeat=2):
        tested.learns(E, b, c)
    assert tested.misses == 4


def test_keyword_only_arguments_are_traced_too(subject):
    tested = subject(
        "(Tensor x, int n=3, *, float f=0.5, Tensor? y=None) -> Tensor",
        lambda k, x, n, *, f, y: reals(k, n, f, int(y is not None)),
    )
    for given in ({}, {"f": 2.0}, {"n": -1}, {"y": torch.ones(1)}, {"f": -0.5, "n": 9}):
        wanted = [given.get("n", 3), given.get("f", 0.5), int("y" in given), 0]
        for _ in range(2):
            assert tested.op(E, **given).tolist() == wanted
            linker.settle()
    assert tested.misses == 2


def add_in_place(k, x, value):
    k.add(x, x.numel(), value)


def test_an_argument_that_is_changed_has_another_version(subject):
    tested = subject("(Tensor(a!) x, float value) -> ()", add_in_place)
    tested.learns(torch.zeros(4).double(), 2.0)
    x, before = torch.zeros(3).double(), tested.misses
    for count in (1, 2):
        tested.op(x, 1.5)
        assert (x._version, x.tolist()) == (count, [1.5 * count] * 3)
    assert tested.misses == before


def test_an_argument_that_is_only_read_keeps_its_version(subject):
    tested = subject("(Tensor x) -> Tensor", gathered)
    x = torch.ones(2, 3).t()
    tested.learns(x)
    tested.op(x)
    assert x._version == 0


def test_an_inference_tensor_is_changed_though_it_has_no_version(subject):
    tested = subject("(Tensor(a!) x, float value) -> ()", add_in_place)
    with torch.inference_mode():
        x = torch.zeros(3).double()
        for _ in range(2):
            tested.op(x, 1.0)
            linker.settle()
        assert x.tolist() == [2, 2, 2]
    assert tested.misses == 1


IN_PLACE = {
    "first": lambda k, x: k.add(x, 1, 1.0),
    "slice": lambda k, x: k.add(x[1:], 1, 1.0) if x.shape[0] > 1 else None,
    "zero_": lambda k, x: (x.zero_(), None)[1],
    "zero_a_column": lambda k, x: (x[:, 0].zero_(), None)[1],
    "copy_": lambda k, x: (x.copy_(torch.zeros(x.shape, dtype=x.dtype)), None)[1],
    "copy_to_a_view": lambda k, x: (x.t()[0].copy_(torch.zeros(x.shape[0], dtype=x.dtype)), None)[1],
    "through_contiguous": lambda k, x: (x.copy_(twice(k, x.contiguous())), None)[1],
    "through_view": lambda k, x: k.add(x.view(-1), x.numel(), 1.0),
    "through_reshape": lambda k, x: k.add(x.reshape(-1), x.numel(), 1.0),
    "through_flatten": lambda k, x: k.add(x.flatten(), x.numel(), 1.0),
    "first_of_a_reshaped": lambda k, x: k.add(x.reshape(x.shape[0], x.shape[1], 1), 1, 1.0),
    "to_the_same_dtype": lambda k, x: k.add(x.to(torch.float64), 1, 1.0),
}  # fmt: skip


def twice(k, x):
    out = torch.empty_like(x)
    k.axpy[{"T": x.dtype}](out, 2.0, x, None, x.numel())
    return out


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_done_in_place_is_done_to_the_argument(subject, name):
    tested = subject("(Tensor(a!) x) -> ()", IN_PLACE[name])
    loose = torch.arange(24.0).double().view(4, 6)
    given = [
        torch.ones(3, 4).double(),
        loose.t(),
        loose[:, 2:4],
        loose[::2],
        loose[:, ::2],
        loose[1:, :1],
        torch.ones(1, 1).double(),
    ]
    for x in given * 2:
        tested.agrees(x)
        linker.settle()
    tested.serves(given[0])


def test_an_in_place_change_is_not_made_twice_where_a_later_allocation_fails(subject):
    def launch(k, x, n):
        k.add(x, x.numel(), 1.0)
        return torch.empty(n)

    tested = subject("(Tensor(a!) x, int n) -> Tensor", launch)
    x = torch.zeros(3).double()
    tested.op(x, 0)
    linker.settle()
    with pytest.raises(RuntimeError):
        tested.op(x, -1)
    assert x.tolist() == [2, 2, 2]


# -------------------------------------------------------------------------- launches and errors


def test_launches_run_in_order(subject):
    def launch(k, x):
        out = torch.zeros(x.numel(), dtype=torch.float64)
        n = out.numel()
        k.add(out, n, 1.0)
        k.axpy[{"T": out.dtype}](out, 3.0, out, None, n)
        if n > 2:
            k.add(out[2:], n - 2, 10.0)
        return out

    tested = subject("(Tensor x) -> Tensor", launch)
    for n in (5, 2, 0):
        tested.learns(torch.ones(n))
    for n in (3, 1, 50):
        tested.serves(torch.ones(n))


@pytest.mark.parametrize(
    ("template", "signature", "values"),
    [
        (lambda x, n, f: n, "int n, float f", [(3, 0.0), (-7, 0.0), (2**40, 0.0)]),
        (
            lambda x, n, f: 1 << (n - 1).bit_length(),
            "int n, float f",
            [(3, 0.0), (5, 0.0), (9, 0.0)],
        ),
        (lambda x, n, f: f, "int n, float f", [(1, 1.5), (1, -2.25), (1, 1e30)]),
        (lambda x, n, f: x.shape[0] % 4, "int n, float f", [(1, 0.0)]),
        (lambda x, n, f: n > 3, "int n, float f", [(3, 0.0), (4, 0.0)]),
    ],
    ids=["int", "computed_int", "float", "size", "bool"],
)
def test_another_value_of_a_template_argument_is_another_variant(
    subject, template, signature, values
):
    def launch(k, x, n, f):
        out = torch.empty(1, dtype=torch.float64)
        k.constant[{"N": template(x, n, f)}](out)
        return out

    tested = subject(f"(Tensor x, {signature}) -> Tensor", launch)
    for value in values:
        tested.learns(E, *value)
    for value in values:
        tested.serves(E, *value)
    assert tested.misses == len(values)


def test_a_negative_zero_is_a_template_argument_of_its_own(subject):
    def launch(k, x, f):
        out = torch.empty(1, dtype=torch.float64)
        k.constant[{"N": f}](out)
        return out

    tested = subject("(Tensor x, float f) -> Tensor", launch)
    for f in (0.0, -0.0) * 2:
        assert str(tested.op(E, f).item()) == str(f)
        linker.settle()


def test_a_value_that_is_looked_at_is_constant_in_a_variant(subject):
    names = {1: 10, 2: 20}
    tested = subject(
        "(Tensor x, int n) -> Tensor",
        lambda k, x, n: ints(k, names.get(n, n), len(str(n)), len(f"{n:>9}"), hash(n)),
    )
    for n in (1, 2, 3, -4, 1000):
        tested.learns(E, n)
    for n in (1000, 3, 1, -4, 2):
        tested.serves(E, n)


def check(k, x, n):
    torch._check(x.dim() == 2, lambda: f"check: x must be a matrix, got {tuple(x.shape)}")
    torch._check(
        n > 0 and x.shape[1] % n == 0,
        lambda: f"check: {x.shape[1]} columns do not make groups of {n}",
    )
    if n == 13:
        raise ValueError(f"check: {n} is unlucky")
    return ints(k, x.shape[1] // n)


BAD = [
    (torch.ones(3, 5), 2, RuntimeError, "check: 5 columns do not make groups of 2"),
    (torch.ones(3, 8), -2, RuntimeError, "check: 8 columns do not make groups of -2"),
    (torch.ones(7), 2, RuntimeError, r"check: x must be a matrix, got \(7,\)"),
    (torch.ones(3, 26), 13, ValueError, "check: 13 is unlucky"),
]


@pytest.mark.parametrize(("x", "n", "kind", "says"), BAD, ids=["size", "number", "rank", "typed"])
def test_the_authors_error_reaches_the_caller_with_what_was_given(subject, x, n, kind, says):
    tested = subject("(Tensor x, int n) -> Tensor", check)
    tested.learns(torch.ones(3, 4), 2)
    with pytest.raises(kind, match=says) as typed:
        tested.op(x, n)
    assert type(typed.value) is kind
    with pytest.raises(RuntimeError, match=says):
        getattr(torch.ops.jitkern_trace, tested.op.name.split("::")[1])(x, n)
    tested.serves(torch.ones(3, 6), 3)


def test_a_division_by_zero_is_raised_at_a_later_call(subject):
    tested = subject(
        "(Tensor x, int n, float f) -> Tensor", lambda k, x, n, f: reals(k, 5 // n, 2.0 / f, 7 % n)
    )
    tested.learns(E, 2, 0.5)
    for n, f in ((0, 0.5), (2, 0.0), (2, -0.0)):
        with pytest.raises(ZeroDivisionError):
            tested.op(E, n, f)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            getattr(torch.ops.jitkern_trace, tested.op.name.split("::")[1])(E, n, f)
    tested.serves(E, -3, 1.0)


@pytest.mark.parametrize(
    "given",
    [
        "x",
        "out",
        "n",
        "v0",
        "v",
        "y0",
        "K",
        "odd",
        "call",
        "real",
        "api",
        "owned",
        "int",
        "DONE",
        "MISS",
        "i64",
        "Tensor",
        "stub",
        "linux",
        "failed",
        "release",
        "a0",
    ],
)
def test_an_argument_may_have_any_name(subject, given):
    tested = subject(
        f"(Tensor t, int {given}, int other) -> Tensor",
        lambda k, t, n, other: ints(k, n + 1, n * other, t.numel(), n // other),
    )
    tested.learns(torch.ones(3), 7, 2)
    for n in (0, 1, 2, 3, -5):
        tested.serves(torch.ones(4), n, 5)
    tested.asks_python(torch.ones(4), 3, 0)


def test_a_stub_serves_torch_ops_and_the_op_alike(subject):
    tested = subject("(Tensor x, int n) -> Tensor", lambda k, x, n: ints(k, n, x.numel()))
    tested.learns(torch.ones(3), 4)
    before = tested.misses
    assert getattr(torch.ops.jitkern_trace, tested.op.name.split("::")[1])(torch.ones(5), 6)[
        :2
    ].tolist() == [6, 5]
    assert tested.misses == before


def test_the_same_tensor_may_be_given_twice(subject):
    tested = subject(
        "(Tensor x, Tensor y) -> Tensor",
        lambda k, x, y: ints(k, x.numel(), int(x.data_ptr() == y.data_ptr())),
    )
    x = torch.ones(3)
    for y in (x, torch.ones(3)):
        tested.learns(x, y)
    tested.serves(x, x)
