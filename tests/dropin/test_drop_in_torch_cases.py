"""The rest of PyTorch's cases of `load_inline` and `load`, each a build against torch/extension.h or more."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

import jitkern

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


# The rest of PyTorch's cases, each a build against torch/extension.h or more.


@pytest.mark.long
def test_two_files_a_class_and_odd_include_paths(files):
    files(
        **{
            "path / with spaces in it__tanh_dot_h": "torch::Tensor tanh_add(torch::Tensor x, torch::Tensor y);",
            "path with quote'__x_dot_h": "",
        },
        doubler_dot_h="""
#include <torch/extension.h>
struct Doubler {
  Doubler(int a, int b) : x(torch::ones({a, b}, torch::requires_grad())) {}
  torch::Tensor forward() { return x * 2; }
  torch::Tensor get() const { return x; }
  torch::Tensor x;
};
""",
        main_dot_cpp="""
#include "doubler.h"
#include <tanh.h>
#include <x.h>
torch::Tensor exp_add(torch::Tensor x, torch::Tensor y);
torch::Tensor tanh_add(torch::Tensor x, torch::Tensor y) { return x.tanh() + y.tanh(); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("tanh_add", &tanh_add);
  m.def("exp_add", &exp_add);
  py::class_<Doubler>(m, "Doubler").def(py::init<int, int>()).def("forward", &Doubler::forward).def("get", &Doubler::get);
}
""",
        other_dot_cpp="#include <torch/extension.h>\ntorch::Tensor exp_add(torch::Tensor x, torch::Tensor y) { return x.exp() + y.exp(); }",
    )
    m = jitkern.load(
        "drop_in_files_of_torch", ["main.cpp", "other.cpp"], extra_cflags=["-g"], verbose=True,
        extra_include_paths=["path / with spaces in it", "path with quote'"],
    )  # fmt: skip
    x, y = torch.randn(2, 4, 4)
    assert torch.equal(m.tanh_add(x, y), x.tanh() + y.tanh())
    assert torch.equal(m.exp_add(x, y), x.exp() + y.exp())
    doubler = m.Doubler(2, 2)
    assert doubler.get().grad is None
    assert (doubler.get().sum(), doubler.forward().sum()) == (4, 8)


WARNING = """
at::Tensor foo(at::Tensor x, int error_type) {
  std::ostringstream text;
  text << "Error with " << x.type();
  TORCH_WARN(text.str());
  if (error_type == 1) throw torch::TypeError(text.str().c_str());
  if (error_type == 2) {
    PyObject* obj = PyTuple_New(-1);
    TORCH_CHECK(!obj);
    auto e = python_error();
    e.persist();
    e.restore();
    throw e;
  }
  if (error_type == 3) throw py::key_error(text.str());
  return x.cos();
}
"""


@pytest.mark.long
@pytest.mark.parametrize("safe", [False, True])
def test_warnings_and_errors_are_translated(safe):
    m = jitkern.load_inline(
        "drop_in_warn", WARNING, functions=["foo"], with_pytorch_error_handling=safe
    )
    t = torch.rand(2).double()
    internal = SystemError, "bad argument to internal"
    errors = [(1, TypeError, t.type()), (2, *internal), (3, KeyError, "CPUDoubleType")]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        m.foo(t, 0)
        assert len(seen) == safe
        for number, kind, text in errors:
            with pytest.raises(kind, match=text):
                m.foo(t, number)
            assert len(seen) == (number + 1 if safe else 0)
    if safe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=t.type()):
                m.foo(t, 0)
            with pytest.raises(TypeError, match=t.type()):
                m.foo(t, 1)
