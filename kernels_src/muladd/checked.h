// The checks of both extensions: tensors of one shape, one dtype and one device.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <string>

static std::string text_of_shape(const torch::stable::Tensor& x) {
  std::string text = "(";
  for (int64_t i = 0; i < x.dim(); i++) text += (i ? ", " : "") + std::to_string(x.size(i));
  return text + (x.dim() == 1 ? ",)" : ")");
}

static bool are_of_one_shape(const torch::stable::Tensor& x, const torch::stable::Tensor& y) {
  bool alike = x.dim() == y.dim();
  for (int64_t i = 0; alike && i < x.dim(); i++) alike = x.size(i) == y.size(i);
  return alike;
}

static void check_alike(const torch::stable::Tensor& a, const torch::stable::Tensor& b, const torch::stable::Tensor& c) {
  STD_TORCH_CHECK(are_of_one_shape(a, b) && are_of_one_shape(a, c), "muladd: shapes differ, ", text_of_shape(a), ", ",
                  text_of_shape(b), " and ", text_of_shape(c));
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.scalar_type() == c.scalar_type(), "muladd: dtypes differ");
  for (const auto* other : {&b, &c})
    STD_TORCH_CHECK(a.is_cuda() == other->is_cuda() && a.get_device() == other->get_device(),
                    "muladd: the tensors are on different devices");
}
