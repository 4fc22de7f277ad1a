// softmax the classic way: a CUDA extension in C++ against ATen, with the kernels of softmax.cu.
#include <ATen/core/Tensor.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "softmax.cu"

template <typename T> struct kernel_type { using type = T; };
template <> struct kernel_type<at::Half> { using type = __half; };
template <> struct kernel_type<at::BFloat16> { using type = __nv_bfloat16; };

static at::Tensor softmax_cuda(const at::Tensor& input, int64_t dim, double scale) {
  TORCH_CHECK(input.dim() >= 1, "softmax: x needs at least one dimension, got ", input.dim());
  const c10::cuda::CUDAGuard guard(input.device());
  const at::Tensor x = input.contiguous();
  at::Tensor out = at::empty_like(x);
  if (x.numel() == 0) return out;
  dim = c10::maybe_wrap_dim(dim, x.dim());
  int64_t rows = 1, inner = 1;
  for (int64_t d = 0; d < dim; d++) rows *= x.size(d);
  for (int64_t d = dim + 1; d < x.dim(); d++) inner *= x.size(d);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softmax", [&] {
    using T = typename kernel_type<scalar_t>::type;
    T* to = reinterpret_cast<T*>(out.data_ptr());
    const T* from = reinterpret_cast<const T*>(x.const_data_ptr());
    const auto dense = scale < 0 ? softmax_long<T, false, -1, 256, true> : softmax_long<T, false, 1, 256, true>;
    const auto strided = scale == 0  ? softmax_strided<T, false, 0, 8>
                         : scale < 0 ? softmax_strided<T, false, -1, 8>
                                     : softmax_strided<T, false, 1, 8>;
    if (inner == 1 && scale != 0)
      dense<<<rows, 256, 0, stream>>>(to, from, scale, x.size(dim));
    else
      strided<<<rows * ((inner + 31) / 32), 256, 0, stream>>>(to, from, scale, x.size(dim), inner);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(jitkern_extension, m) {
  m.def("softmax(Tensor x, int dim, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(jitkern_extension, CUDA, m) {
  m.impl("softmax", &softmax_cuda);
}
