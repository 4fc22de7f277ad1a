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


@pytest.mark.long
def test_several_sources_and_no_functions():
    first = "torch::Tensor sin_add(torch::Tensor x, torch::Tensor y) { return x.sin() + y.sin(); }"
    second = """
    #include <torch/extension.h>
    torch::Tensor sin_add(torch::Tensor x, torch::Tensor y);
    PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sin_add", &sin_add, "sin(x) + sin(y)"); }
    """
    m = jitkern.load_inline("drop_in_sources", [first, second])
    x, y = torch.randn(2, 4, 4)
    assert torch.equal(m.sin_add(x, y), x.sin() + y.sin())


@pytest.mark.long
def test_reload():
    for number in (123, 456, 456, 789):
        m = jitkern.load_inline(
            "drop_in_reloaded", f"int f() {{ return {number}; }}", functions="f"
        )
        assert m.f() == number


@pytest.mark.long
def test_register_operators():
    source = """
    #include <torch/script.h>
    torch::Tensor func(torch::Tensor x) { return x; }
    static torch::RegisterOperators r("drop_in_test::func", &func);
    """
    path = jitkern.load_inline("is_python_module", source, functions="func", is_python_module=False)
    assert path.endswith(".so")
    assert torch.equal(torch.ops.drop_in_test.func(torch.eye(5)), torch.eye(5))


@pytest.mark.long
def test_a_compound_op_has_gradients():
    source = """
    #include <torch/library.h>
    torch::Tensor my_add(torch::Tensor x, torch::Tensor y) { return x + y; }
    TORCH_LIBRARY(drop_in_my, m) { m.def("add", &my_add); }
    """
    jitkern.load_inline("is_python_module", source, is_python_module=False)
    inputs = [torch.randn(5, 5, requires_grad=True, dtype=torch.float64) for _ in range(2)]
    assert torch.autograd.gradcheck(torch.ops.drop_in_my.add, inputs)


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
    errors = [
        (1, TypeError, t.type()),
        (2, SystemError, "bad argument to internal"),
        (3, KeyError, "CPUDoubleType"),
    ]
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


FRONTEND = """
#include <torch/extension.h>
struct Net : torch::nn::Cloneable<Net> {
  Net(int64_t in, int64_t out) : in_(in), out_(out) { reset(); }
  void reset() override {
    fc = register_module("fc", torch::nn::Linear(in_, out_));
    buffer = register_buffer("buf", torch::eye(5));
  }
  torch::Tensor forward(torch::Tensor x) { return fc->forward(x); }
  void set_bias(torch::Tensor bias) { torch::NoGradGuard guard; fc->bias.set_(bias); }
  torch::Tensor get_bias() const { return fc->bias; }
  void add_new_parameter(const std::string& name, torch::Tensor tensor) { register_parameter(name, tensor); }
  void add_new_buffer(const std::string& name, torch::Tensor tensor) { register_buffer(name, tensor); }
  void add_new_submodule(const std::string& name) { register_module(name, torch::nn::Linear(fc->options)); }
  int64_t in_, out_;
  torch::nn::Linear fc{nullptr};
  torch::Tensor buffer;
};
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  torch::python::bind_module<Net>(m, "Net")
      .def(py::init<int64_t, int64_t>())
      .def("set_bias", &Net::set_bias)
      .def("get_bias", &Net::get_bias)
      .def("add_new_parameter", &Net::add_new_parameter)
      .def("add_new_buffer", &Net::add_new_buffer)
      .def("add_new_submodule", &Net::add_new_submodule);
}
"""


@pytest.mark.long
def test_a_module_of_the_cpp_frontend(files):
    files(frontend_dot_cpp=FRONTEND)
    m = jitkern.load("drop_in_frontend", "frontend.cpp")
    check_same_output_as_python(m)
    check_between_python_modules(m)
    net = m.Net(5, 2)
    for kind, add in (("_parameters", net.add_new_parameter), ("_buffers", net.add_new_buffer)):
        before = len(getattr(net, kind))
        add("new", torch.eye(5))
        assert len(getattr(net, kind)) == before + 1
    assert len(net._modules) == 1
    net.add_new_submodule("fc2")
    assert len(net._modules) == 2


def check_same_output_as_python(m):
    x = torch.randn(2, 5, dtype=torch.double)
    net, python = m.Net(5, 2), torch.nn.Linear(5, 2).double()
    net.to(torch.double)
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        python.weight.copy_(parameters["fc.weight"])
        python.bias.copy_(parameters["fc.bias"])
    out, expected = net.forward(x), python(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(parameters["fc.weight"].grad, python.weight.grad)


def check_between_python_modules(m):
    class Python(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.tensor(1.0))
            self.net = m.Net(3, 5)

        def forward(self, x):
            return self.net.forward(x) + self.x

    net = m.Net(5, 2)
    assert str(net) == "Net"
    sequential = torch.nn.Sequential(Python(), torch.nn.Tanh(), net, torch.nn.Sigmoid())
    x = torch.randn(2, 3)
    out = sequential(x)
    assert list(out.shape) == [2, 2]
    sequential.to(torch.float64)
    sequential.to(torch.float32)
    assert sequential[2].parameters()[0].dtype == torch.float32
    assert len(list(sequential.parameters())) == len(net.parameters()) * 2 + 1
    assert len(list(sequential.modules())) == 8
    assert len(net.clone().parameters()) == len(net.parameters())
    out.sum().backward()
    assert all(parameter.grad.sum() != 0 for parameter in net.parameters())
    net.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    net.eval()
    assert not net.training
    biased, bias = torch.randn(4, 5), net.get_bias().clone()
    before = net.forward(biased)
    net.set_bias(bias + 1)
    assert torch.equal(net.get_bias(), bias + 1) and not torch.equal(before, net.forward(biased))
    assert torch.equal(dict(net.named_buffers())["buf"], torch.eye(5))


@pytest.mark.gpu
@pytest.mark.long
def test_a_module_of_the_cpp_frontend_on_a_gpu(files):
    files(frontend_dot_cpp=FRONTEND)
    net = jitkern.load("drop_in_frontend", "frontend.cpp").Net(5, 2)
    before = [parameter.clone() for parameter in net.parameters()]
    net.to(torch.device("cuda", 0))
    for parameter, was in zip(net.parameters(), before):
        assert parameter.device == torch.device("cuda", 0) and torch.equal(parameter.cpu(), was)
    net.cpu()
    net.add_new_parameter("a", torch.eye(5))
    net.add_new_submodule("fc2")
    net.cuda()
    assert all(parameter.is_cuda for parameter in net.parameters())
