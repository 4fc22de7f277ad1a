"""Calls with any sizes, strides, alignments and numbers: the op, its Python launcher, its reference."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import by_python, programs_of
from subject import Subject, copied, outcome

from jitkern.ops import softmax, vec_add
from jitkern.runtime import binding, specializer

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

pytestmark = [
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
    pytest.mark.common_cache,
]
SOURCE = """
extern "C" void weigh(double* space, const T* x, const T* w, double a, double b, long n) {
  for (long i = 0; i < n; i++) space[i] = a * x[i] + (w ? double(w[i]) : b);
}
extern "C" void gather(double* out, long* counts, double* total, const double* space, long rows,
                       long cols, long shift) {
  for (long r = 0; r < rows; r++) {
    counts[r] = shift + r;
    for (long c = 0; c < cols; c++) out[r * cols + c] = -space[r * cols + c];
  }
  for (long i = 0; i < rows * cols; i++) total[0] += space[i];
}
"""


def settings(examples):
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )


@st.composite
def shapes(draw, least=0):
    return tuple(draw(st.lists(st.integers(0, 9), min_size=least, max_size=3)))


@st.composite
def tensors(draw, shape, dtype):
    """A tensor of this shape: permuted, sliced with an offset and a step, expanded, unaligned."""
    order = draw(st.permutations(range(len(shape))))
    plain = draw(st.booleans())
    layout = (
        st.tuples(st.just(0), st.just(1), st.just(False))
        if plain
        else st.tuples(st.integers(0, 2), st.integers(1, 2), st.booleans())
    )
    dims = [draw(layout) for _ in shape]
    whole = [1 if wide else start + size * step for size, (start, step, wide) in zip(shape, dims)]
    lead = draw(st.integers(0, 4))
    numbers = torch.arange(lead + math.prod(whole)) % 11 - 4
    x = (
        numbers.to(dtype)[lead:]
        .view([whole[d] for d in order])
        .permute([order.index(d) for d in range(len(shape))])
    )
    x = x[
        tuple(
            slice(None) if wide else slice(start, start + size * step, step)
            for size, (start, step, wide) in zip(shape, dims)
        )
    ]
    return x.expand(shape)


@st.composite
def of_one_shape(draw, dtypes, count, least=0):
    shape, dtype = draw(shapes(least)), draw(st.sampled_from(dtypes))
    return [draw(tensors(shape, dtype)) for _ in range(count)]


class Shipped(Subject):
    """An op that is declared already."""

    def __init__(self, op):
        self.op = op

    @property
    def slot(self):
        return programs_of(self.op)

    def python(self, *args):
        return by_python(self.op, self.op.sources["cpu"][0], "cpu", *args)


def agrees_with_its_reference(tested, *args):
    """Called twice, and once more when C serves: as Python, and as the reference, has it."""
    for _ in range(2):
        tested.agrees(*args)
    tested.serves(*args)
    given, wanted = [copied(a) for a in args], [copied(a) for a in args]
    found, right = tested.op(*given), tested.op.run_reference(*wanted)
    torch.testing.assert_close(found, right, equal_nan=True)
    tensors_of = lambda values: [v for v in values if isinstance(v, torch.Tensor)]
    torch.testing.assert_close(tensors_of(given), tensors_of(wanted), equal_nan=True)


@pytest.fixture(scope="module")
def added():
    return Shipped(vec_add)


@pytest.fixture(scope="module")
def normalised():
    return Shipped(softmax)


@pytest.mark.long
@settings(250)
@hypothesis.given(pair=of_one_shape([torch.float32, torch.float64, torch.float16], 2))
def test_vec_add_is_the_same_for_any_tensors(added, pair):
    agrees_with_its_reference(added, *pair)


@pytest.mark.long
@settings(80)
@hypothesis.given(
    x=of_one_shape([torch.float32, torch.float64], 1),
    y=of_one_shape([torch.float32, torch.float64], 1),
)
def test_vec_add_refuses_tensors_that_differ_as_python_does(added, x, y):
    for _ in range(2):
        added.agrees(*x, *y)
        specializer.settle()
    added.agrees(*x, *y)


@pytest.mark.long
@settings(200)
@hypothesis.given(one=of_one_shape([torch.float32, torch.float64, torch.float16], 1, least=1))
def test_softmax_is_the_same_for_any_tensor(normalised, one):
    agrees_with_its_reference(normalised, *one, -1, 1.0)


def launch(k, total, x, w, n, a, b):
    torch._check(x.dim() > 0, lambda: f"mixed: no scalars, got {x.dim()} dimensions")
    torch._check(
        w is None or w.shape == x.shape, lambda: f"mixed: w is {tuple(w.shape)}, x {tuple(x.shape)}"
    )
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    x = x.contiguous()
    w = w.contiguous() if w is not None else None
    space = torch.empty(rows * cols + 3, dtype=torch.float64)[3:]
    out = torch.empty_like(x, dtype=torch.float64)
    counts = torch.empty(2 * rows, dtype=torch.int64)[rows:]
    tall = torch.zeros(cols, rows + 1, dtype=torch.float64).t()[1:]
    k.weigh[{"T": x.dtype}](space, x, w, a, b if b is not None else 0.25, rows * cols)
    shift = -(-n // 4) % 1000 if n > 0 else max(n, -7)
    k.gather[{"T": x.dtype}](out, counts, total, space, rows, cols, shift)
    return out, counts, tall


def reference(total, x, w, n, a, b):
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    space = a * x.double() + (w.double() if w is not None else 0.25 if b is None else b)
    total[0] += space.sum()
    shift = -(-n // 4) % 1000 if n > 0 else max(n, -7)
    return -space, torch.arange(rows) + shift, torch.zeros(cols, rows, dtype=torch.float64).t()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    signature = "(Tensor(a!) total, Tensor x, Tensor? w, int n, float a, float? b=None) -> (Tensor, Tensor, Tensor)"
    return Subject(tmp_path_factory.mktemp("mixed"), signature, launch, reference, SOURCE)


@pytest.mark.long
@settings(250)
@hypothesis.given(
    pair=of_one_shape([torch.float32, torch.float64], 2, least=1),
    weighted=st.booleans(),
    n=st.integers(-9, 40) | st.integers(-(2**62), 2**62),
    a=st.floats(-100, 100) | st.sampled_from([math.nan, math.inf, -0.0]),
    b=st.none() | st.floats(-100, 100),
    lead=st.integers(0, 3),
)
def test_launch_functions_are_the_same_for_any_arguments(mixed, pair, weighted, n, a, b, lead):
    x, w = pair
    total = torch.arange(lead + 2.0, dtype=torch.float64)[lead:]
    agrees_with_its_reference(mixed, total, x, w if weighted else None, n, a, b)


@pytest.mark.long
@settings(80)
@hypothesis.given(
    x=of_one_shape([torch.float32, torch.float64], 1),
    w=of_one_shape([torch.float32, torch.float64], 1),
    n=st.integers(-9, 9),
)
def test_launch_functions_refuse_what_python_refuses(mixed, x, w, n):
    args = (torch.zeros(2, dtype=torch.float64), *x, *w, n, 0.5, None)
    for _ in range(2):
        mixed.agrees(*args)
        specializer.settle()
    assert outcome(mixed.op, args) == outcome(mixed.python, args)
