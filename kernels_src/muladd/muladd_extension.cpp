// out = a * b + c on the CPU, on LibTorch's stable ABI: the same library runs on every Torch from 2.10 up.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

#include "checked.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
static void run(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& c) {
  T* o = static_cast<T*>(out.data_ptr());
  const T *x = static_cast<const T*>(a.data_ptr()), *y = static_cast<const T*>(b.data_ptr()),
          *z = static_cast<const T*>(c.data_ptr());
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const int64_t n = out.numel();  // a call into Torch
  for (int64_t i = 0; i < n; i++) o[i] = static_cast<T>(A(x[i]) * A(y[i]) + A(z[i]));
}

static Tensor muladd(Tensor a, Tensor b, Tensor c) {
  check_alike(a, b, c);
  for (Tensor* x : {&a, &b, &c})
    if (!x->is_contiguous()) *x = torch::stable::contiguous(*x);
  Tensor out = torch::stable::empty_like(a);
  switch (a.scalar_type()) {
    case ScalarType::Float: run<float>(out, a, b, c); break;
    case ScalarType::Double: run<double>(out, a, b, c); break;
    case ScalarType::Half: run<torch::headeronly::Half>(out, a, b, c); break;
    case ScalarType::BFloat16: run<torch::headeronly::BFloat16>(out, a, b, c); break;
    default: STD_TORCH_CHECK(false, "muladd: unsupported dtype");
  }
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(jitkern_extension, m) {
  m.def("muladd_cpu(Tensor a, Tensor b, Tensor c) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(jitkern_extension, CPU, m) {
  m.impl("muladd_cpu", TORCH_BOX(&muladd));
}
