"""kernels_src/include/exponential.h: the exponential function of the CPU kernels."""

import math
import subprocess

import pytest
import torch
from helpers import REPOSITORY

import jitkern
from jitkern import config

pytestmark = pytest.mark.common_cache

INCLUDE = REPOSITORY / "kernels_src" / "include"
LOOP = """
#include "exponential.h"
template <typename T> void all(T* out, const T* x, long n) {
  for (long i = 0; i < n; i++) out[i] = exponential(x[i]);
}
"""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
LEVELS = pytest.mark.parametrize("native", [False, True], ids=["baseline", "native"])


def exponential(x, native):
    out = torch.full_like(x, math.nan)
    function = jitkern.cpp_kernel(
        text=LOOP, name="all", template=x.dtype, include=[str(INCLUDE)], native=native
    )
    function(out, x, x.numel())
    return out


@pytest.mark.long
@DTYPES
@LEVELS
def test_is_within_two_units_of_the_last_place(dtype, native):
    least, most = (-86.98, 88.72) if dtype is torch.float32 else (-708.04, 709.78)
    x = torch.linspace(least, most, 1_000_003, dtype=torch.float64).to(dtype)
    x = torch.cat([x, torch.linspace(-1, 1, 100_003, dtype=dtype)])
    got = exponential(x, native)
    if dtype is torch.float32:
        want = x.double().exp()
    else:  # Python's is the C library's, within one unit of the exact result
        want = torch.tensor([math.exp(v) for v in x.tolist()], dtype=torch.float64)
    unit = torch.exp2(want.log2().floor()) * torch.finfo(dtype).eps
    assert ((got.double() - want).abs() / unit).max() <= 2


@pytest.mark.long
@DTYPES
@LEVELS
def test_at_the_ends(dtype, native):
    inf, nan = math.inf, math.nan
    most = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, -inf, inf, nan, -nan, most, -most, -800, 800], dtype=dtype)
    assert torch.equal(exponential(x, native).nan_to_num(7), x.exp().nan_to_num(7))
    smallest = torch.tensor(torch.finfo(dtype).smallest_normal, dtype=dtype)
    below = torch.linspace(smallest.log().item() - 50, smallest.log().item() + 1, 1001, dtype=dtype)
    assert (exponential(below, native) - below.exp()).abs().max() <= 1.5 * smallest


@pytest.mark.parametrize(
    ("number", "level"), [("float", 1), ("float", 3), ("double", 3), ("float", 4), ("double", 4)]
)
@pytest.mark.long
def test_gcc_vectorizes_it(number, level, tmp_path):
    compiler = config.current().cxx
    version = subprocess.check_output([compiler, "--version"], text=True)
    if "Free Software Foundation" not in version:
        pytest.skip(f"{compiler} is not GCC, whose report of vectorized loops this reads")
    march = "x86-64" if level == 1 else f"x86-64-v{level}"
    instance = f"template void all({number}*, const {number}*, long);\n"
    (tmp_path / "loop.cpp").write_text(LOOP + instance)
    report = subprocess.run(
        [compiler, "-O3", "-std=c++17", f"-march={march}", f"-I{INCLUDE}",
         "-fopt-info-vec-optimized", "-c", "loop.cpp", "-o", "loop.o"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "loop vectorized" in report.stderr
