"""out = x + y as one writes it without jitkern; each function imports, builds, calls: a first call.

They take float32 only; jitkern's op takes every dtype, contiguous or not, and compiles for the one
that it meets.
"""

from __future__ import annotations

import torch

_KERNEL = """
extern "C" __global__ void vec_add_kernel(float* __restrict__ out, const float* __restrict__ x,
                                          const float* __restrict__ y, %s n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
"""
_CPP = """
torch::Tensor vec_add(torch::Tensor x, torch::Tensor y) {
  TORCH_CHECK(x.sizes() == y.sizes(), "vec_add: shapes differ");
  TORCH_CHECK(x.scalar_type() == y.scalar_type(), "vec_add: dtypes differ");
  x = x.contiguous();
  y = y.contiguous();
  torch::Tensor out = torch::empty_like(x);
  float* o = out.data_ptr<float>();
  const float *a = x.data_ptr<float>(), *b = y.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); i++) o[i] = a[i] + b[i];
  return out;
}
"""
_CUDA = """
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
%s
torch::Tensor vec_add(torch::Tensor x, torch::Tensor y) {
  TORCH_CHECK(x.sizes() == y.sizes(), "vec_add: shapes differ");
  TORCH_CHECK(x.scalar_type() == y.scalar_type(), "vec_add: dtypes differ");
  const c10::cuda::CUDAGuard guard(x.device());
  x = x.contiguous();
  y = y.contiguous();
  torch::Tensor out = torch::empty_like(x);
  const int64_t n = out.numel();
  vec_add_kernel<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      out.data_ptr<float>(), x.data_ptr<float>(), y.data_ptr<float>(), n);
  return out;
}
"""


def load_inline(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Through `torch.utils.cpp_extension.load_inline` with its default headers."""
    from torch.utils import cpp_extension

    if x.is_cuda:
        kernel = _KERNEL % "long long"
        declaration = "torch::Tensor vec_add(torch::Tensor x, torch::Tensor y);"
        module = cpp_extension.load_inline(
            "first_call_vec_add", declaration, _CUDA % kernel, functions=["vec_add"]
        )
    else:
        module = cpp_extension.load_inline("first_call_vec_add", _CPP, functions=["vec_add"])
    out: torch.Tensor = module.vec_add(x, y)
    return out


def triton(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Through a plain `triton.jit` function."""
    from benches.vec_add_triton import vec_add

    return vec_add(x, y)


def cupy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Through CuPy's RawKernel; it takes Python integers as 64-bit values, pointers too."""
    import cupy

    kernel = cupy.RawKernel(_KERNEL % "long long", "vec_add_kernel")
    out = torch.empty_like(x)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel(
            ((x.numel() + 255) // 256,),
            (256,),
            (out.data_ptr(), x.data_ptr(), y.data_ptr(), x.numel()),
        )
    return out


def compile_kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Through `torch.cuda._compile_kernel`; it passes Python integers as `int`."""
    kernel = torch.cuda._compile_kernel(_KERNEL % "int", "vec_add_kernel")
    out = torch.empty_like(x)
    kernel(grid=((x.numel() + 255) // 256, 1, 1), block=(256, 1, 1), args=[out, x, y, x.numel()])
    return out


RIVALS = {
    "load_inline": load_inline,
    "triton": triton,
    "cupy": cupy,
    "compile_kernel": compile_kernel,
}
