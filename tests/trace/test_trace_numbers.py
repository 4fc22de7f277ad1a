"""Numbers of launch functions, by proxies and by the Python launcher."""

import math
import sys

import pytest
import torch
from subject import BOTTOM, INF, NAN, TOP, E, gathered, ints, reals

from jitkern.errors import LaunchError
from jitkern.trace import stand_ins

pytestmark = pytest.mark.common_cache


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


@pytest.mark.long
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


@pytest.mark.long
def test_an_odd_first_call_keeps_no_other_from_being_served(subject):
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("n", [2**53 + 1, -(2**53) - 1, TOP, BOTTOM], ids=str)
def test_an_inexact_integer_is_rounded_as_python_rounds_it(subject, n):
    tested = subject(
        "(Tensor x, int n) -> Tensor",
        lambda k, x, n: reals(k, n / 3, n * 0.5, n, float(n < 2.0**53)),
    )
    tested.learns(E, 5)
    tested.asks_python(E, n)


@pytest.mark.parametrize("rounds_once", [sys.version_info >= (3, 12), True])
def test_a_sum_of_floats_is_rounded_as_python_rounds_it(subject, monkeypatch, rounds_once):
    monkeypatch.setattr(stand_ins, "SUMS_ROUND_ONCE", rounds_once)
    made = subject(
        "(int n, float a, float b) -> Tensor",
        lambda k, n, a, b: reals(k, sum([a, b, -a]), sum([n, 1])),
    )
    (made.asks_python if rounds_once else made.learns)(1, 1e16, 1.0)


@pytest.mark.long
def test_numbers_are_narrowed_as_python_narrows_them(subject):
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


@pytest.mark.long
def test_a_negated_tensor_reaches_a_kernel_negated(subject):
    tested = subject("(Tensor x) -> Tensor", gathered)
    plain, z = torch.ones(2), torch.tensor([1 + 2j, 3 + 4j])
    tested.learns(plain)
    tested.learns(z.imag)
    assert tested.op(z.conj().imag).tolist() == [-2, -4]
    assert tested.op(torch._efficientzerotensor(2)).tolist() == [0, 0]


@pytest.mark.long
def test_a_number_out_of_the_kernels_range_is_a_launch_error(subject):
    tested = subject("(Tensor x, int n) -> Tensor", lambda k, x, n: ints(k, n + 1))
    tested.learns(E, 1)
    says = r"argument 2 \(`long a`\) must be an integer that fits i64, got 9223372036854775808"
    with pytest.raises(LaunchError, match=says):
        tested.op(E, TOP)


@pytest.mark.long
def test_one_variant_serves_numbers_that_branch_alike(subject):
    tested = subject(
        "(Tensor x, int n, float f) -> Tensor", lambda k, x, n, f: reals(k, n * 2, f * n, f)
    )
    tested.learns(torch.empty(3), 1, 0.5)
    for size, n, f in ((9, -5, 0.25), (0, 2**40, NAN), (2, 0, -INF)):
        tested.serves(torch.empty(size), n, f)
    assert tested.misses == 1
