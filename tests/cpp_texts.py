"""C++ texts of a Python module and of a library of ops, which tests of several rooms compile."""

# The text before it may define ANSWER. It needs no header of Torch.
MODULE = """
#include <Python.h>
%s
#ifndef ANSWER
#define ANSWER 42
#endif
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define CONCAT(a, b) a##b
#define INIT(name) CONCAT(PyInit_, name)
extern "C" __attribute__((visibility("default"))) PyObject* INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
_LIBRARY = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#ifndef ANSWER
#define ANSWER 42
#endif
static int64_t answer(torch::stable::Tensor x) { return x.numel() + ANSWER; }
STABLE_TORCH_LIBRARY(%s, m) { m.def("answer(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(%s, CPU, m) { m.impl("answer", TORCH_BOX(&answer)); }
"""


def library(namespace):
    """A library with the op `answer(Tensor x) -> int`."""
    return _LIBRARY.replace("%s", namespace)
