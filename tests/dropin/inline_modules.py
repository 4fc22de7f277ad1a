"""Texts of modules, and what became of them."""

from __future__ import annotations

import jitkern
from jitkern.dropin import memo
from jitkern.loading import LOADED

MODULE = """
#include <Python.h>
%s
#ifndef VALUE
#define VALUE 42
#endif
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(VALUE); }
static PyMethodDef methods[] = {{"answer", answer, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define CONCAT(a, b) a##b
#define INIT(name) CONCAT(PyInit_, name)
extern "C" __attribute__((visibility("default"))) PyObject* INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
static int64_t answer(torch::stable::Tensor x) { return x.numel() + 42; }
STABLE_TORCH_LIBRARY(%s, m) { m.def("answer(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(%s, CPU, m) { m.impl("answer", TORCH_BOX(&answer)); }
"""


def answers():
    """The calls that this process answers without asking the cache."""
    return [key for key in LOADED if key.startswith(memo.CALL)]


def forget_answers():
    """Have calls ask the cache again, as in a new process."""
    for key in answers():
        del LOADED[key]


def module(name, defines="", **arguments):
    return jitkern.load_inline(name, MODULE % defines, no_implicit_headers=True, **arguments)


def value(number):
    return f"#define VALUE {number}"


def entries(cache_dir):
    """All but the objects of units."""
    paths = (path.parent for path in cache_dir.glob("v1/*/*/manifest.json"))
    return sorted(path for path in paths if not path.name.startswith("object."))


def compiles():
    return jitkern.stats()["compiles"]
