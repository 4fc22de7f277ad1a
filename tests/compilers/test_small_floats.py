"""Sources that take T need no include for 16-bit and 8-bit floats."""

import pytest
import torch
from helpers import H100

import jitkern
from jitkern import jit
from jitkern.source.kinds import Cpp, Cuda, Variant
from jitkern.target import Target

_CUDA = """
template <typename T>
__global__ void double_all(T* x, int n) {
  if (threadIdx.x < n) x[threadIdx.x] = T(float(x[threadIdx.x]) * 2.f);
}
"""
_CPP = "template <typename T> void square(T* x, long n) { for (; n--;) x[n] = x[n] * x[n] + 1; }\n"
_H100 = Target.parse(H100)
_CPU = Target.current("cpu")
_HALVES = [torch.float16, torch.bfloat16]


def _flags(source, code, target=_CPU):
    variant = Variant("x::f", source, "f", (("T", code),))
    return jit.request.Request.of(variant, target).key.inputs["flags"]


@pytest.mark.parametrize("dtype", [*_HALVES, torch.float8_e4m3fn, torch.float8_e5m2])
def test_cuda(dtype):
    kernel = jitkern.cuda_kernel(text=_CUDA, name="double_all", template=dtype)
    assert kernel.compile(_H100).path.is_dir()


@pytest.mark.parametrize("dtype", _HALVES)
def test_cpp(dtype):
    x = torch.arange(4.0).to(dtype)
    jitkern.cpp_kernel(text=_CPP, name="square", template=dtype)(x, 4)
    assert torch.equal(x, torch.tensor([1.0, 2, 5, 10], dtype=dtype))


def test_the_header_is_in_the_key():
    variant = Variant("x::square", Cpp(text=_CPP), "square", (("T", "f16"),))
    files = jit.request.Request.of(variant, _CPU).closure.files
    assert "<jitkern>/float16.h" in files


def test_a_kernel_of_other_types_has_the_key_that_it_had():
    assert "-include" not in _flags(Cpp(text=_CPP), "f32")
    assert "-include" not in _flags(Cuda(text=_CUDA), "f32", _H100)


@pytest.mark.parametrize("name", ["cuda_fp16.h", "sub/cuda_fp16.h"])
def test_a_file_that_includes_the_header_has_the_key_that_it_had(name):
    assert "-include" not in _flags(Cuda(text=f"#include <{name}>\n{_CUDA}"), "f16", _H100)


def test_a_type_of_the_same_name_is_left_alone(tmp_path):
    (tmp_path / "mine.h").write_text("struct float16 { unsigned short bits; };\n")
    text = '#include "mine.h"\ntemplate <typename T> void set(T* x) { x->bits = 0x3c00; }\n'
    source = Cpp(text=text, folder=str(tmp_path))
    assert "-include" not in _flags(source, "f16")


def test_a_missing_file_is_an_error_of_the_file(tmp_path):
    (tmp_path / "kernel.cu").write_text(_CUDA)
    kernel = jitkern.cuda_kernel(tmp_path / "kernel.cu", "double_all", template=torch.float16)
    (tmp_path / "kernel.cu").unlink()
    with pytest.raises(jitkern.JitkernError, match=r"kernel\.cu does not exist"):
        kernel.compile(_H100)
