"""A `load_inline`: of CUDA on a GPU, else of C++."""

import sys

import torch
from torch.utils.cpp_extension import load_inline

CUDA = """
__global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
torch::Tensor doubled(torch::Tensor x) {
  auto y = torch::empty_like(x);
  twice<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}
"""
CPP = "torch::Tensor doubled(torch::Tensor x) { return x * 2; }"

device = sys.argv[1]
on_gpu = device == "cuda"
module = load_inline(
    "doubled",
    cpp_sources="torch::Tensor doubled(torch::Tensor x);" if on_gpu else CPP,
    cuda_sources=CUDA if on_gpu else None,
    functions=["doubled"],
)
x = torch.arange(1000.0, device=device)
assert torch.equal(module.doubled(x), x * 2)
