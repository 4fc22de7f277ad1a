"""C++ functions from elsewhere, as they are: by path and name."""

from __future__ import annotations

import pytest
import torch

import jitkern
from jitkern import config
from jitkern.errors import CompileError, DeclarationError, LaunchError, NotCached

CPP = """
#include <cstdint>
namespace a { template <typename T> void scale(T* out, const T* x, double alpha, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = T(alpha) * x[i];
} }
void fill(float* x, int n, float value) { for (int i = 0; i < n; i++) x[i] = value; }
extern "C" void three(int* x) { *x = 3; }
"""


@pytest.mark.long
def test_cpp_functions_run(file):
    path = file(CPP, "k.cpp")
    x = torch.arange(4.0)
    scale = jitkern.cpp_kernel(path, "scale")
    scale[x.dtype](x, x, 2.0, 4)
    scale[{"T": x.dtype}](x, x, 2.0, 4)
    jitkern.cpp_kernel(path, "scale<float>")(x, x, 0.5, 4)
    assert x.tolist() == [0, 2, 4, 6]
    jitkern.cpp_kernel(path, "fill")(x, 2, 7)
    assert x.tolist() == [7, 7, 4, 6]
    one = torch.zeros(1, dtype=torch.int32)
    jitkern.cpp_kernel(path, "three")(one)
    assert one.item() == 3


def test_a_kernel_without_a_reference_compiles_in_the_call(file):
    x = torch.zeros(3)
    with config.using(compile="background"):
        jitkern.cpp_kernel(file(CPP, "k.cpp"), "fill")(x, 3, 5.0)
    assert x.tolist() == [5, 5, 5]
    with config.using(compile="never"), pytest.raises(NotCached, match="its `compile` method"):
        jitkern.cpp_kernel(file(CPP, "k.cpp"), "fill", flags=["-DX"])(x, 3, 5.0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((torch.zeros(2), 2), r"takes 3 arguments \(float\* x, int n, float value\), got 2"),
        ((torch.zeros(2).double(), 2, 1.0), r"argument 1 \(`float\* x`\) must be a float32 tensor"),
        ((torch.zeros(2), 2**31, 1.0), r"argument 2 \(`int n`\) must be an integer that fits i32"),
        ((torch.zeros(2), 2, True), r"argument 3 \(`float value`\) must be f32, got bool"),
    ],
)
def test_wrong_arguments_never_reach_a_kernel(file, args, says):
    fill = jitkern.cpp_kernel(file(CPP, "k.cpp"), "fill")
    with pytest.raises(LaunchError, match=says):
        fill(*args)


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"// caf\xe9\n"])
def test_a_byte_order_mark_and_bytes_that_are_no_utf8_are_taken(file, mark):
    path = file("", "k.cpp")
    path.write_bytes(mark + b'void k(unsigned char* x) { *x = sizeof("\xe9"); }')
    x = torch.zeros(1, dtype=torch.uint8)
    jitkern.cpp_kernel(path, "k")(x)
    assert x.item() == 2


def test_an_overloaded_cpp_function_says_how_to_name_one(file):
    path = file("void k(float* x) { *x = 1; }\nvoid k(double* x) { *x = 2; }", "k.cpp")
    with pytest.raises(CompileError, match=r"is overloaded; name one: `k\(float\* x\)`, `k\(d"):
        jitkern.cpp_kernel(path, "k").compile()
    x = torch.zeros(1)
    jitkern.cpp_kernel(path, "k(float* x)")(x)
    assert x.item() == 1


def test_a_missing_cpp_function_lists_what_there_is(file):
    with pytest.raises(DeclarationError, match=r"no function `other`; it has: a::scale<T>, fill"):
        jitkern.cpp_kernel(file(CPP, "k.cpp"), "other")
