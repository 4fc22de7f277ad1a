// out = a * b + c on CUDA, on LibTorch's stable ABI, with the kernel of muladd.cu.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checked.h"
#include "muladd.cu"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
static void run(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& c, cudaStream_t stream) {
  const int64_t n = out.numel();
  if (n == 0) return;
  muladd<T><<<(n + 255) / 256, 256, 0, stream>>>(
      static_cast<T*>(out.data_ptr()), static_cast<const T*>(a.data_ptr()), static_cast<const T*>(b.data_ptr()),
      static_cast<const T*>(c.data_ptr()), n);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "muladd: ", cudaGetErrorString(error));
}

static Tensor muladd_cuda(Tensor a, Tensor b, Tensor c) {
  check_alike(a, b, c);
  const torch::stable::accelerator::DeviceGuard guard(a.get_device());
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(a.get_device(), &stream) == 0, "muladd: no current stream");
  a = torch::stable::contiguous(a);
  b = torch::stable::contiguous(b);
  c = torch::stable::contiguous(c);
  Tensor out = torch::stable::empty_like(a);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  switch (a.scalar_type()) {
    case ScalarType::Float: run<float>(out, a, b, c, on); break;
    case ScalarType::Double: run<double>(out, a, b, c, on); break;
    case ScalarType::Half: run<__half>(out, a, b, c, on); break;
    case ScalarType::BFloat16: run<__nv_bfloat16>(out, a, b, c, on); break;
    default: STD_TORCH_CHECK(false, "muladd: unsupported dtype");
  }
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(jitkern_extension, m) {
  m.def("muladd_cuda(Tensor a, Tensor b, Tensor c) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(jitkern_extension, CUDA, m) {
  m.impl("muladd_cuda", TORCH_BOX(&muladd_cuda));
}
