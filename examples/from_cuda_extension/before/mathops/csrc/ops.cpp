#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "launch.h"

extern "C" double vendor_half(void);  // of libvendor

static at::Tensor checked(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "mathops: takes float32, got ", x.scalar_type());
  return x.contiguous();
}

static at::Tensor axpy_cpu(const at::Tensor& x_, const at::Tensor& y_, double a) {
  const at::Tensor x = checked(x_), y = checked(y_);
  TORCH_CHECK(x.sizes() == y.sizes(), "axpy: shapes differ, ", x.sizes(), " and ", y.sizes());
  at::Tensor out = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++)
    out.data_ptr<float>()[i] = float(a) * x.data_ptr<float>()[i] + y.data_ptr<float>()[i];
  return out;
}

static at::Tensor half_squares_cpu(const at::Tensor& x_) {
  const at::Tensor x = checked(x_);
  at::Tensor out = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++)
    out.data_ptr<float>()[i] = float(vendor_half()) * x.data_ptr<float>()[i] * x.data_ptr<float>()[i];
  return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("axpy(Tensor x, Tensor y, float a) -> Tensor");
  m.def("half_squares(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) {
  m.impl("axpy", &axpy_cpu);
  m.impl("half_squares", &half_squares_cpu);
}

#ifdef WITH_CUDA
static at::Tensor axpy_cuda(const at::Tensor& x_, const at::Tensor& y_, double a) {
  const at::Tensor x = checked(x_), y = checked(y_);
  TORCH_CHECK(x.sizes() == y.sizes(), "axpy: shapes differ, ", x.sizes(), " and ", y.sizes());
  at::Tensor out = at::empty_like(x);
  launch_axpy(out.data_ptr<float>(), x.data_ptr<float>(), y.data_ptr<float>(), float(a), x.numel(),
              c10::cuda::getCurrentCUDAStream());
  return out;
}

static at::Tensor half_squares_cuda(const at::Tensor& x_) {
  const at::Tensor x = checked(x_);
  at::Tensor out = at::empty_like(x);
  launch_half_squares(out.data_ptr<float>(), x.data_ptr<float>(), float(vendor_half()), x.numel(),
                      c10::cuda::getCurrentCUDAStream());
  return out;
}

TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("axpy", &axpy_cuda);
  m.impl("half_squares", &half_squares_cuda);
}
#endif
