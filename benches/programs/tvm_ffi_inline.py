"""A `load_inline` of tvm-ffi."""

import torch
import tvm_ffi.cpp

SOURCE = """
void add_one(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
  for (int i = 0; i < x.size(0); ++i)
    static_cast<float*>(y.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + 1;
}
"""
x = torch.arange(4.0)
y = torch.empty_like(x)
tvm_ffi.cpp.load_inline("add_one", cpp_sources=SOURCE, functions="add_one").add_one(x, y)
assert torch.equal(y, x + 1)
