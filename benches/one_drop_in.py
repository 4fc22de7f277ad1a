"""One first call through `load_inline`, Torch's or jitkern's, in this process: prints its seconds.

`drop_in` starts it as `python -m benches.one_drop_in CONTENDER KIND DEVICE`, with the caches in the
environment. The clock covers the imports that the contender needs over Torch and, on a GPU, over
the CUDA context; nothing of either is imported before.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from typing import Any

import torch

MODULES = {"torch": "torch.utils.cpp_extension", "jitkern": "jitkern"}
_HOST = """
  float* o = static_cast<float*>(out.mutable_data_ptr());
  const float *a = static_cast<const float*>(x.const_data_ptr()),
              *b = static_cast<const float*>(y.const_data_ptr());
  for (int64_t i = 0; i < out.numel(); i++) o[i] = a[i] + b[i];
"""
_DEVICE = """
  launch(static_cast<float*>(out.mutable_data_ptr()), static_cast<const float*>(x.const_data_ptr()),
         static_cast<const float*>(y.const_data_ptr()), out.numel(), %s);
"""
_DECLARED = "#include <cstdint>\nvoid launch(float*, const float*, const float*, int64_t, void*);\n"
_KERNEL = """
#include <cstdint>
__global__ void vec_add_kernel(float* out, const float* x, const float* y, int64_t n) {
  const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
void launch(float* out, const float* x, const float* y, int64_t n, void* stream) {
  vec_add_kernel<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>(out, x, y, n);
}
"""
_STREAM = "c10::cuda::getCurrentCUDAStream().stream()"
_DEFAULT = """
torch::Tensor vec_add(torch::Tensor x, torch::Tensor y) {
  torch::Tensor out = torch::empty_like(x);%s  return out;
}
"""
_HEADERS = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
at::Tensor vec_add(const at::Tensor& x, const at::Tensor& y) {
  at::Tensor out = at::empty_like(x);%s  return out;
}
TORCH_LIBRARY(drop_in_headers, m) { m.def("vec_add(Tensor x, Tensor y) -> Tensor"); }
TORCH_LIBRARY_IMPL(drop_in_headers, %s, m) { m.impl("vec_add", vec_add); }
"""
_STABLE = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
using torch::stable::Tensor;
static Tensor vec_add(Tensor x, Tensor y) {
  Tensor out = torch::stable::empty_like(x);%s  return out;
}
STABLE_TORCH_LIBRARY(drop_in_stable, m) { m.def("vec_add(Tensor x, Tensor y) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(drop_in_stable, %s, m) { m.impl("vec_add", TORCH_BOX(&vec_add)); }
"""
_STABLE_STREAM = """
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(x.get_device(), &stream) == 0, "no stream");
"""


def main() -> None:
    """Run the kind that the command line names."""
    contender, kind, device = sys.argv[1:]
    x, y = (torch.rand(1024, device=device) for _ in range(2))  # on a GPU: creates the context
    arguments = _arguments(kind, device)
    _synchronize(device)
    gc.collect()  # else when the next collection comes is an accident of importing Torch
    started = time.perf_counter()
    built = importlib.import_module(MODULES[contender]).load_inline(**arguments)
    op = built.vec_add if kind == "default" else _op(arguments["name"])
    out = op(x, y)
    _synchronize(device)
    seconds = time.perf_counter() - started
    torch.testing.assert_close(out, x + y)
    print(json.dumps({"seconds": seconds}))


def _op(namespace: str) -> Any:
    return getattr(torch.ops, namespace).vec_add.default


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _arguments(kind: str, device: str) -> dict[str, Any]:
    """Those of load_inline."""
    cuda = device == "cuda"
    body = _DEVICE if cuda else _HOST
    if kind == "default":
        written = _DECLARED + _DEFAULT % (body % _STREAM if cuda else body)
        common = {"name": "drop_in_default", "functions": ["vec_add"]}
        if not cuda:
            return {**common, "cpp_sources": written}
        # As its documentation has it: the host side stands with the kernel, before Torch's headers.
        text = "#include <c10/cuda/CUDAStream.h>\n" + _KERNEL + written
        declaration = "torch::Tensor vec_add(torch::Tensor x, torch::Tensor y);"
        return {**common, "cpp_sources": declaration, "cuda_sources": text}
    if kind == "stable":
        host = _STABLE_STREAM + _DEVICE % "stream" if cuda else body
        text = (_DECLARED if cuda else "") + _STABLE % (host, device.upper())
    else:
        stream = "#include <c10/cuda/CUDAStream.h>\n" + _DECLARED if cuda else ""
        text = stream + _HEADERS % (body % _STREAM if cuda else body, device.upper())
    return {
        "name": f"drop_in_{'stable' if kind == 'stable' else 'headers'}",
        "cpp_sources": text,
        "cuda_sources": _KERNEL if cuda else None,
        "no_implicit_headers": True,
        "is_python_module": False,
    }


if __name__ == "__main__":
    main()
