"""Sources that take T need no include for 16-bit and 8-bit floats."""

import ctypes

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


_CONVERT = """
template <typename T, typename S> void convert(T* out, const S* x, long n) { for (; n--;) out[n] = T(x[n]); }
"""
_CONVERT_ON_CUDA = """
template <typename T, typename S> __global__ void convert(T* out, const S* x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = T(float(x[i]));
}
"""


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def codes(dtype):
    """All numbers of 8 bits."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def hard_to_convert(dtype, of):
    """Numbers of the dtype `of` that may become wrong in `dtype`; all of them, for 16 bits."""
    if of in _HALVES:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(of)
    finite = codes(dtype).double()
    finite = finite[finite.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    largest = torch.tensor([2.0**e for e in range(7, 1024, 3)], dtype=torch.float64)
    most = finite[-1] + (finite[-1] - finite[-2]) * torch.tensor([0.5, 1, 1.5, 2, 3])
    smallest = torch.tensor([2.0**-e for e in range(1075)], dtype=torch.float64)
    odd = torch.tensor([0.0, torch.inf, torch.nan], dtype=torch.float64)
    known = torch.cat([finite, middles, most, largest, smallest, smallest * 1.5, odd]).to(of)
    near = [torch.nextafter(known, torch.full_like(known, way)) for way in (torch.inf, -torch.inf)]
    close = (known * (1 + torch.tensor([[2.0**-e], [-(2.0**-e)]]).to(of)) for e in (21, 40))
    random = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    every = torch.cat([known, *near, *map(torch.flatten, close), random.view(torch.float32).to(of)])
    return torch.cat([every, -every])


@pytest.mark.parametrize("of", [torch.float32, torch.float64, *_HALVES])
def test_float8_is_rounded_as_torch_rounds(of):
    """Above the largest number too, where its versions differ: the number, or NaN before 2.13."""
    x = hard_to_convert(torch.float8_e4m3fn, of)
    out, wanted = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)
    template = {"T": out.dtype, "S": of}
    jitkern.cpp_kernel(text=_CONVERT, name="convert", template=template)(out, x, x.numel())
    wrong = bits(out) != bits(wanted)
    assert not wrong.any(), [*zip(x[wrong][:9].tolist(), out[wrong].float(), wanted[wrong].float())]
    some = torch.randperm(x.numel())[:64]  # Torch has another way for single numbers
    assert all(torch.equal(bits(x[i].to(out.dtype)), bits(out[i])) for i in some)


@pytest.mark.parametrize("to", [torch.float32, *_HALVES])
def test_float8_becomes_what_torch_makes_of_it(to):
    x = codes(torch.float8_e4m3fn)
    out = torch.empty(256, dtype=to)
    template = {"T": to, "S": x.dtype}
    jitkern.cpp_kernel(text=_CONVERT, name="convert", template=template)(out, x, 256)
    nan = x.float().isnan()
    assert torch.equal(out.isnan(), nan)
    same = ~nan if to != torch.float32 else slice(None)  # bits of a NaN, too
    assert torch.equal(bits(out)[same], bits(x.to(to))[same])


@pytest.mark.parametrize(
    ("torch_version", "expected"),
    [("2.11.0", 0x7F), ("2.12.1+cu130", 0x7F), ("2.13.0a0+git1", 0x7E), ("3.0.0", 0x7E)],
)
def test_a_float8_that_overflows_follows_the_torch_of_the_target(torch_version, expected):
    text = '#include "float16.h"\nvoid f(unsigned char* x) { *x = float8_e4m3fn(1e9f).bits; }\n'
    kernel = jitkern.cpp_kernel(text=text, name="f")
    entry = kernel.compile(_CPU._replace(torch=torch_version))
    code = ctypes.c_ubyte()
    address = ctypes.c_void_p(ctypes.addressof(code))
    library = ctypes.CDLL(str(entry.path / entry.manifest.meta["artifact"]))
    library.jitkern_function((ctypes.c_void_p * 1)(ctypes.addressof(address)))
    assert code.value == expected


@pytest.mark.gpu
@pytest.mark.parametrize("of", [torch.float32, torch.float64, *_HALVES])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_on_a_gpu_is_rounded_as_torch_rounds(dtype, of):
    """But NVIDIA's types become the largest number where Torch's become infinity, or NaN."""
    x = hard_to_convert(dtype, of).cuda()
    out, wanted = torch.empty_like(x, dtype=dtype), x.to(dtype).float()
    template = {"T": dtype, "S": of}
    kernel = jitkern.cuda_kernel(text=_CONVERT_ON_CUDA, name="convert", template=template)
    kernel(out, x, x.numel(), grid=1, block=256)
    too_large = ~x.isnan() & ~wanted.isfinite()
    wanted[too_large] = torch.finfo(dtype).max * x[too_large].sign().float()
    nan = x.isnan()
    assert out.float()[nan].isnan().all()
    assert torch.equal(bits(out)[~nan], bits(wanted.to(dtype))[~nan])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_on_a_gpu_becomes_what_torch_makes_of_it(dtype):
    x = codes(dtype).cuda()
    out = torch.empty(256, device="cuda")
    template = {"T": torch.float32, "S": dtype}
    kernel = jitkern.cuda_kernel(text=_CONVERT_ON_CUDA, name="convert", template=template)
    kernel(out, x, 256, grid=1, block=256)
    nan = x.float().isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(bits(out)[~nan], bits(x.float())[~nan])


@pytest.mark.parametrize("dtype", _HALVES)
def test_cpp(dtype):
    x = torch.arange(4.0).to(dtype)
    jitkern.cpp_kernel(text=_CPP, name="square", template=dtype)(x, 4)
    assert torch.equal(x, torch.tensor([1.0, 2, 5, 10], dtype=dtype))


def test_the_header_is_in_the_key():
    variant = Variant("x::square", Cpp(text=_CPP), "square", (("T", "f16"),))
    files = jit.request.Request.of(variant, _CPU).closure.files
    assert "<jitkern>/float16.h" in files


SPARED = {
    "other types in C++": (Cpp(text=_CPP), "f32", _CPU),
    "other types in CUDA": (Cuda(text=_CUDA), "f32", _H100),
    "the header": (Cuda(text=f"#include <cuda_fp16.h>\n{_CUDA}"), "f16", _H100),
    "a header of the same name": (Cuda(text=f"#include <sub/cuda_fp16.h>\n{_CUDA}"), "f16", _H100),
}


@pytest.mark.parametrize("case", SPARED)
def test_what_needs_no_header_has_the_key_that_it_had(case):
    assert "-include" not in _flags(*SPARED[case])


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
