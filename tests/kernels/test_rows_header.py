"""rows.h, vectors.h and float16.h: conversions as Torch has them, sums, maxima, scratch memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jitkern
from jitkern import kernels_src

pytestmark = pytest.mark.common_cache

TEXT = """
#include <algorithm>
#include "rows.h"
template <typename T> void to_float(float* out, const T* x, int64_t n) { widen(out, x, n); }
template <typename T> void of_float(T* out, const float* x, int64_t n) { narrow(out, x, n); }
template <typename T> void one_to_float(float* out, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = x[i];
}
template <typename T> void one_of_float(T* out, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = x[i];
}
template <typename T> void sums(T* out, const T* x, int64_t rows, int64_t n) {
  for_rows(rows, n, [=](int64_t r) {
    using A = accumulator<T>;
    A* v = scratch<A>(n);
    A* w = scratch<A, 1>(n);
    widen(v, x + r * n, n);
    std::copy(v, v + n, w);
    out[r] = T(sum<A>(n, [=](int64_t i, auto m) { return (load<A>(v + i, m) + load<A>(w + i, m)) / A(2); }));
  });
}
template <typename T> void maxima(T* out, const T* x, int64_t rows, int64_t n) {
  using A = accumulator<T>;
  constexpr A infinity = std::numeric_limits<A>::infinity();
  for (int64_t r = 0; r < rows; r++)
    out[r] = T(largest<A>(n, [=](int64_t i, auto m) { return with_rest(load<A>(x + r * n + i, m), m, -infinity); }));
}
"""


def function(name, native=True):
    return jitkern.cpp_kernel(text=TEXT, name=name, native=native, openmp=True)


def same(a, b):
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    bits = torch.int16 if a.itemsize == 2 else torch.int32
    assert torch.equal(a[~nan].view(bits), b[~nan].view(bits))


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_conversions_are_those_of_torch(dtype, native):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    for name in ("to_float", "one_to_float"):
        out = torch.empty(65536)
        function(name, native)[{"T": dtype}](out, every, 65536)
        same(out, every.float())
    # All results, what lies a little beside them and halfway between them, and any bits at all.
    exact = every.float().view(torch.int32)
    last = 1 << (12 if dtype == torch.float16 else 15)
    beside = [
        exact + step for step in (-last - 1, -last, 1 - last, -1, 0, 1, last - 1, last, last + 1)
    ]
    any_bits = torch.randint(-(2**31), 2**31, (100_003,)).to(torch.int32)
    x = torch.cat([*beside, any_bits]).view(torch.float32)
    for name in ("of_float", "one_of_float"):
        out = torch.empty(x.numel(), dtype=dtype)
        function(name, native)[{"T": dtype}](out, x, x.numel())
        same(out, x.to(dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_of_a_long_row_loses_nothing(dtype):
    for rows, n in ((1, 100_000), (3, 1025), (70, 1), (2, 0), (64, 4096)):
        x = torch.rand(rows, n).to(dtype)
        out = torch.full((rows,), torch.nan, dtype=dtype)
        function("sums")[{"T": dtype}](out, x, rows, n)
        error = (out.double() - x.double().sum(-1)).abs() / x.double().sum(-1).clamp_min(1)
        assert error.max() <= {2: 0.51, 4: 4, 8: 64}[x.itemsize] * torch.finfo(dtype).eps


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_maximum_counts_no_nan_and_nothing_beyond_the_row(dtype, native):
    for n in (*range(1, 20), 63, 64, 65, 1000):
        x = (-1 - torch.rand(3, n)).to(dtype)
        expected = x.amax(-1)
        x[0, n // 2] = torch.nan
        expected[0] = x[0].nan_to_num(-torch.inf).amax()
        out = torch.full((3,), torch.nan, dtype=dtype)
        function("maxima", native)[{"T": dtype}](out, x, 3, n)
        assert torch.equal(out, expected)


def test_each_header_is_documented_or_private():
    docs = Path(__file__).parents[2].joinpath("docs", "kernels.md").read_text()
    headers = [*Path(kernels_src.__file__).parent.joinpath("include").iterdir()]
    private = {h.name for h in headers if h.read_text().startswith("// Private. ")}
    assert {h.name for h in headers} - private == {h.name for h in headers if f"`{h.name}`" in docs}
