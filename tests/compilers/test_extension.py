"""load_inline in its child process."""

import json
import sys

import pytest
import torch

from jitkern import config, jit
from jitkern.errors import CompileError, CompilerNotFound, TargetError
from jitkern.kernel import Extension, Variant
from jitkern.target import Target

STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
static int64_t answer(torch::stable::Tensor x) { return x.numel() + VALUE; }
STABLE_TORCH_LIBRARY(jitkern_test_extension, m) { m.def("answer(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(jitkern_test_extension, CPU, m) { m.impl("answer", TORCH_BOX(&answer)); }
"""
MODULE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define CONCAT(a, b) a##b
#define INIT(name) CONCAT(PyInit_, name)
extern "C" __attribute__((visibility("default"))) PyObject* INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@pytest.fixture
def variant(tmp_path):
    folder = tmp_path / "k"
    folder.mkdir()

    def make(text, function, **options):
        (folder / "k.cpp").write_text(text)
        return Variant(
            "test::k", Extension("k.cpp", folder=str(folder), function=function, **options)
        )

    return make


@pytest.mark.slow
def test_a_library_that_registers_itself(variant):
    v = variant(STABLE, "jitkern_test_extension::answer", flags=["-DVALUE=7"])
    function = jit.loaded(v, Target.current("cpu"))
    assert function(torch.zeros(3)) == 10
    entry = jit.ensure(v, Target.current("cpu"))
    assert [p.suffix for p in sorted(entry.path.iterdir())] == [".log", ".so", ".json"] or len(
        list(entry.path.iterdir())
    ) == 3


def test_a_python_module_carries_the_python_tag(variant):
    v = variant(MODULE, "answer")
    assert jit.loaded(v, Target.current("cpu"))() == 42
    assert f"_cp3{sys.version_info.minor}" in jit.ensure(v, Target.current("cpu")).path.parent.name


def test_a_warm_start_runs_no_tool(variant, run_python):
    v = variant(MODULE, "answer")
    jit.ensure(v, Target.current("cpu"))
    code = f"""
import os, json, subprocess, sys
def refuse(*a, **k): raise AssertionError("a subprocess")
subprocess.Popen.__init__ = refuse
from jitkern import jit, stats
from jitkern.kernel import Extension, Variant
from jitkern.target import Target
v = Variant("test::k", Extension("k.cpp", folder={v.source.folder!r}, function="answer"))
print(json.dumps([jit.loaded(v, Target.current("cpu"))(), "torch.utils.cpp_extension" in sys.modules, stats()["compiles"]]))
"""
    done = run_python(code, PATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [42, False, 0]


def test_a_syntax_error_names_file_and_line(variant):
    with pytest.raises(
        CompileError, match=r"its Extension of test::k for cpu-.*k/k\.cpp:2:.*error: "
    ):
        jit.ensure(variant("\nint x = ;\n", "answer"), Target.current("cpu"))


def test_another_torch_is_refused(variant):
    with pytest.raises(
        TargetError,
        match=r"built with the Torch it runs on: this is Torch .* cpu-x86_64-torch2.11.0",
    ):
        jit.ensure(
            variant(MODULE, "answer"),
            Target.parse("cpu-x86_64-torch2.10.0")
            if torch.__version__.startswith("2.11")
            else Target.parse("cpu-x86_64-torch2.11.0"),
        )


def test_no_compiler_says_what_to_install(variant):
    with (
        config.using(cxx="no-such-compiler"),
        pytest.raises(CompilerNotFound, match="apt-get install g"),
    ):
        jit.ensure(variant(MODULE, "answer"), Target.current("cpu"))
