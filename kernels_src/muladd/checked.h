// The checks of both extensions: tensors of one shape, one dtype and one device.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <string>

static std::string text_of_shape(const torch::stable::Tensor& x) {
  std::string text = "(";
  for (int64_t i = 0; i < x.dim(); i++) text += (i ? ", " : "") + std::to_string(x.size(i));
  return text + (x.dim() == 1 ? ",)" : ")");
}

static void check_alike(const torch::stable::Tensor& a, const torch::stable::Tensor& b, const torch::stable::Tensor& c) {
  const std::string shape = text_of_shape(a);
  STD_TORCH_CHECK(shape == text_of_shape(b) && shape == text_of_shape(c), "muladd: shapes differ, ", shape, ", ",
                  text_of_shape(b), " and ", text_of_shape(c));
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.scalar_type() == c.scalar_type(), "muladd: dtypes differ");
  for (const auto* other : {&b, &c})
    STD_TORCH_CHECK(a.is_cuda() == other->is_cuda() && a.get_device() == other->get_device(),
                    "muladd: the tensors are on different devices");
}
