// softmax the classic way: a CUDA extension in C++ against ATen, with the kernel of softmax.cu.
#include <ATen/core/Tensor.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "softmax.cu"

static at::Tensor softmax_cuda(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 1, "softmax: x needs at least one dimension, got ", input.dim());
  const c10::cuda::CUDAGuard guard(input.device());
  const at::Tensor x = input.contiguous();
  at::Tensor out = at::empty_like(x);
  const int64_t cols = x.size(-1);
  if (x.numel() == 0) return out;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softmax", [&] {
    softmax<scalar_t><<<x.numel() / cols, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        out.data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), cols);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(jitkern_extension, m) {
  m.def("softmax(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(jitkern_extension, CUDA, m) {
  m.impl("softmax", &softmax_cuda);
}
