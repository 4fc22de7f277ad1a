"""`jitkern.load_inline` and `jitkern.load` against the promises of `torch.utils.cpp_extension`.

The cases of PyTorch's test/test_cpp_extensions_jit.py (2.13, and what 2.14 added), written anew.
Those marked `stress` build against torch/extension.h again and again: run them with `-m stress`.

| case of PyTorch's                                          | here   | where, or why not |
|---|---|---|
| jit_compile_extension                                      | passes | test_two_files_a_class_and_odd_include_paths (stress) |
| inline_..._functions_as_list                               | passes | test_the_default_prelude (stress) |
| inline_..._functions_as_dict                               | passes | test_functions_of_a_dict_have_its_docstrings |
| inline_..._multiple_sources_and_no_functions               | passes | test_several_sources_and_no_functions (stress) |
| inline_..._throws_when_functions_is_bad                    | passes | test_functions_of_another_type_are_a_value_error |
| lenient_flag_handling                                      | passes | test_the_default_prelude (stress) |
| reload_jit_extension                                       | passes | test_a_changed_source_under_the_same_name, and test_reload (stress) |
| set_default_type_also_changes_aten_default_type            | passes | test_the_default_prelude (stress) |
| autograd_from_cpp                                          | passes | test_the_default_prelude (stress) |
| custom_functorch_error                                     | passes | test_the_default_prelude (stress) |
| custom_compound_op_autograd                                | passes | test_a_compound_op_has_gradients (stress) |
| compilation_error_formatting                               | passes | test_a_syntax_error_has_lines_file_and_log |
| warning                                                    | passes | test_warnings_and_errors_are_translated (stress) |
| cpp_frontend_module_has_same_output_as_python              | passes | test_a_module_of_the_cpp_frontend (stress) |
| cpp_frontend_module_python_inter_op                        | passes | test_a_module_of_the_cpp_frontend (stress) |
| cpp_frontend_module_has_up_to_date_attributes              | passes | test_a_module_of_the_cpp_frontend (stress) |
| cpp_frontend_module_python_inter_op_with_cuda              | passes | test_a_module_of_the_cpp_frontend_on_a_gpu (gpu, stress) |
| returns_shared_library_path_when_is_python_module_is_true  | passes | test_a_library_is_loaded_and_its_path_returned, test_register_operators (stress) |
| load_with_non_platform_default_encoding                    | passes | test_a_file_in_another_encoding |
| gen_extension_h_pch                                        | n/a    | no header is precompiled into Torch's folder: test_use_pch_writes_nothing_into_torch |
| pch_command_injection (2.14)                               | passes | test_no_shell_reads_the_flags |
| stale_lock (2.14)                                          | passes | test_a_lock_file_of_torch_is_nothing_to_us |
| jit_cuda_extension                                         | passes | test_cuda_files (gpu) |
| jit_cuda_archflags                                         | passes | test_archs_of_the_list_are_in_the_library (gpu), test_the_arch_list_is_read_as_torch_reads_it |
| jit_cudnn_extension                                        | n/a    | the headers of cuDNN are not installed; CUDNN_HOME: test_cudnn_home_is_searched |
| inline_jit_compile_extension_cuda, half_support            | passes | test_cuda_texts (gpu; PyTorch skips them) |
| inline_jit_compile_custom_op_cuda                          | passes | test_cuda_texts (gpu; PyTorch skips it) |
| aoti_torch_call_dispatcher                                 | n/a    | tests the dispatcher, not how it is built |
| jit_xpu_extension                                          | n/a    | SYCL: test_sycl_is_not_compiled |
| mps_extension                                              | n/a    | macOS |
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import jitkern
from jitkern import config
from jitkern.cache import usage
from jitkern.compilers.cuda import arch_flags, toolkit
from jitkern.compilers.opened import read_list
from jitkern.compilers.torch_extension import (
    commands,
    compile_and_link,
    hints,
    inline as inline_compiler,
)
from jitkern.compilers.torch_extension.inline import build_of
from jitkern.compilers.torch_extension.inline_files import closure
from jitkern.compilers.torch_extension.inline_source import Inline
from jitkern.dropin import api, extension, memo
from jitkern.errors import CompileError, CompilerNotFound, LoadError, NotCached, TargetError
from jitkern.source.flags import expanded, words

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
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
FRAGMENT = """
#include <torch/csrc/stable/library.h>
STABLE_TORCH_LIBRARY_FRAGMENT(drop_in_fragment, m) { m.def("%s(Tensor x) -> int"); /* { */ }
"""


def module(name, defines="", **arguments):
    return jitkern.load_inline(name, MODULE % defines, no_implicit_headers=True, **arguments)


def value(number):
    return f"#define VALUE {number}"


def entries(cache_dir):
    return sorted(path.parent for path in cache_dir.glob("v1/*/*/manifest.json"))


def compiles():
    return jitkern.stats()["compiles"]


@pytest.fixture(autouse=True)
def _no_answers(monkeypatch):
    """Each test asks its own cache."""
    monkeypatch.setattr(memo, "_answers", {})


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write files below a folder of their own, which is the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(**texts):
        for name, text in texts.items():
            path = folder / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return write


# What comes back.


@pytest.mark.stress
def test_the_default_prelude(tmp_path):
    """One build for the cases of PyTorch's that differ in a function alone."""
    source = """
    torch::Tensor tanh_add(torch::Tensor x, torch::Tensor y) { return x.tanh() + y.tanh(); }
    torch::Tensor get() { return torch::empty({}); }
    void run_back(at::Tensor x) { x.backward({}); }
    void run_back_no_gil(at::Tensor x) { pybind11::gil_scoped_release no_gil; x.backward({}); }
    struct Identity : torch::autograd::Function<Identity> {
      static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor x) { return x; }
      static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list g) { return {g[0]}; }
    };
    torch::Tensor identity(torch::Tensor x) { return Identity::apply(x); }
    """
    sources = [source]
    functions = ["tanh_add", "get", "run_back", "run_back_no_gil", "identity"]
    m = jitkern.load_inline(
        name="drop_in_prelude", cpp_sources=sources, functions=functions,
        extra_cflags=["-g0\n\n", "-O0 -Wall"], extra_include_paths=["       cpp_extensions\n"], verbose=True,
    )  # fmt: skip
    assert sources == [source] and len(functions) == 5, "the caller's lists stay as they are"
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(m.tanh_add(x, y), x.tanh() + y.tanh())
    assert m.tanh_add.__doc__.split("\n")[2] == "tanh_add"
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            assert m.get().dtype == dtype
    finally:
        torch.set_default_dtype(before)

    class Clone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    x = torch.rand(20, requires_grad=True)
    with pytest.raises(RuntimeError, match="called while holding the GIL"):
        m.run_back(Clone.apply(x).sum())
    m.run_back_no_gil(Clone.apply(x).sum())
    assert torch.equal(x.grad, torch.ones(20))
    for transform in (torch.func.vmap, torch.func.grad):
        with pytest.raises(RuntimeError, match=r"cannot use C\+\+ torch::autograd::Function"):
            transform(m.identity)(torch.randn(3, requires_grad=True))


@pytest.mark.slow
def test_functions_of_a_dict_have_its_docstrings():
    doc = 'says "two"\nlines \\t and 100%'

    def build(number):
        return jitkern.load_inline(
            "drop_in_dict",
            ["#include <pybind11/pybind11.h>", f"int two() {{ return {number}; }}"],
            functions={"two": doc},
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
        )

    m, changed = build(2), build(3)
    assert (m.two(), changed.two()) == (2, 3), "pybind11 knows modules by name"
    assert m.__spec__.origin == m.__file__ != changed.__file__
    assert m.two.__doc__.split("\n")[2:4] == ['says "two"', "lines \t and 100%"]


def test_a_library_is_loaded_and_its_path_returned(tmp_path):
    source = STABLE.replace("%s", "drop_in_stable")
    arguments = {"is_python_module": False, "no_implicit_headers": True}
    path = jitkern.load_inline("drop_in_stable", source, **arguments)
    assert torch.ops.drop_in_stable.answer(torch.zeros(3)) == 45
    assert Path(path).suffix == ".so" and Path(path).is_file()
    assert jitkern.load_inline("drop_in_stable", source, **arguments) == path
    assert "_cp3" not in path, "the stable ABI needs no Python"


def test_a_program_is_built_and_its_path_returned(files):
    files(main_dot_cpp='#include <cstdio>\nint main(int n, char**) { std::printf("%d", n); }\n')
    arguments = {"is_python_module": False, "is_standalone": True}
    path = jitkern.load("drop_in_program", "main.cpp", **arguments)
    assert subprocess.check_output([path, "a"], text=True) == "2"
    copy = jitkern.load("drop_in_program", "main.cpp", build_directory="out", **arguments)
    assert copy == str(Path("out/drop_in_program")) and subprocess.check_output([copy]) == b"1"


def test_a_module_and_a_program_exclude_each_other(files):
    with pytest.raises(ValueError, match="mutually exclusive"):
        jitkern.load("x", "x.cpp", is_standalone=True)


def test_functions_of_another_type_are_a_value_error():
    for functions in (5, ("f",)):
        with pytest.raises(ValueError, match="Expected 'functions' to be a list or dict"):
            jitkern.load_inline(name="x", cpp_sources="", functions=functions)


def test_sycl_is_not_compiled(files):
    for arguments in ({"sycl_sources": "x"}, {"with_sycl": True}):
        with pytest.raises(NotImplementedError, match="SYCL"):
            jitkern.load_inline("x", "", **arguments)
    with pytest.raises(NotImplementedError, match="SYCL"):
        jitkern.load("x", ["a.sycl"])


def test_the_signatures_are_those_of_torch():
    import inspect

    from torch.utils import cpp_extension

    for name in ("load", "load_inline"):
        theirs = inspect.signature(getattr(cpp_extension, name)).parameters.values()
        ours = inspect.signature(getattr(jitkern, name)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


# Files.


def test_several_files_with_headers_beside_them(files):
    files(
        a__main_dot_cpp='#include "n.h"\n'
        + MODULE % "extern int other();\n#define VALUE N + other()",
        a__n_dot_h="#define N 1\n",
        b__other_dot_cpp='#include "n.h"\nint other() { return N; }\n',
        b__n_dot_h="#define N 20\n",
    )
    sources = ["a/main.cpp", Path("b/other.cpp")]
    assert jitkern.load("drop_in_files", sources).answer() == 21
    files(b__n_dot_h="#define N 30\n")
    assert jitkern.load("drop_in_files", sources).answer() == 31, "a header is a part of the key"


def test_an_older_mtime_is_not_stale(files):
    folder = files(m_dot_cpp=MODULE % value(1))
    assert jitkern.load("drop_in_mtime", "m.cpp").answer() == 1
    files(m_dot_cpp=MODULE % value(2))
    os.utime(folder / "m.cpp", (0, 0))
    assert jitkern.load("drop_in_mtime", "m.cpp").answer() == 2


def test_include_roots_enter_the_key_by_content_alone(files, cache_dir):
    for name in ("one", "with space's"):
        files(**{f"{name}__n_dot_h": "#define VALUE 7\n"})
    for name in ("one", "with space's"):
        assert module("drop_in_roots", "#include <n.h>", extra_include_paths=[name]).answer() == 7
        flag = f"-I{Path(name).absolute()}"
        assert module("drop_in_roots", "#include <n.h>", extra_cflags=[flag]).answer() == 7
    assert len(entries(cache_dir)) == 2, "one for the argument, one for the flag"


def test_a_file_in_another_encoding(files):
    folder = files()
    (folder / "m.cpp").write_bytes("// 你好\n".encode("gbk") + (MODULE % "").encode())
    assert jitkern.load("drop_in_encoding", "m.cpp").answer() == 42


def test_a_missing_file_is_named(files):
    with pytest.raises(FileNotFoundError, match=r"nothing\.cpp"):
        jitkern.load("x", ["nothing.cpp"])


def test_a_header_that_only_a_macro_names_is_watched(files):
    folder = files(hidden_dot_h="#define VALUE 1\n")
    define = f'#define HIDDEN "{folder / "hidden.h"}"\n#include HIDDEN'
    assert module("drop_in_hidden", define).answer() == 1
    files(hidden_dot_h="#define VALUE 2\n")
    assert module("drop_in_hidden", define).answer() == 2


# The key.


def test_the_same_call_returns_the_same_module():
    before = compiles()
    m = module("drop_in_again")
    assert module("drop_in_again") is m and compiles() == before + 1


def test_a_changed_source_under_the_same_name(cache_dir):
    """PyTorch's reload_jit_extension, less its headers."""
    modules = [module("drop_in_reload", value(number)) for number in (123, 456, 456, 789)]
    assert [m.answer() for m in modules] == [123, 456, 456, 789]
    assert modules[1] is modules[2] and len(entries(cache_dir)) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"extra_cflags": ["-DX"]},
        {"extra_ldflags": ["-Wl,-O1"]},
        {"extra_cuda_cflags": ["-DX"]},
        {"with_pytorch_error_handling": False, "functions": []},
        {"is_python_module": False},
        {"no_implicit_headers": False},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_argument_that_matters_is_in_the_key(changed, monkeypatch):
    keys = []

    def keep(call, *rest, **options):
        source = extension._source(call)
        target = source.exact(extension._target(source))
        keys.append((source.all_flags(), closure(source).files, target, memo.digest_of(call)))

    monkeypatch.setattr(api, "_answer", keep)
    common = {"no_implicit_headers": True}
    jitkern.load_inline("x", "int x;", **common)
    jitkern.load_inline("x", "int x;", **{**common, **changed})
    jitkern.load_inline("y", "int x;", **common)
    for other in keys[1:]:
        assert keys[0][:3] != other[:3] and keys[0][3] != other[3]


def test_moving_a_flag_from_one_compiler_to_another_changes_the_key():
    flags = [
        Inline(("a.cpp",), name="x", texts=("",), **{which: ("-DX",)}).all_flags()
        for which in ("cflags", "cuda_cflags", "ldflags")
    ]
    assert len(set(flags)) == 3


def test_an_archive_enters_the_key_by_content(files):
    folder = files(other_dot_cpp="int other() { return 1; }")
    sources = MODULE % "int other();\n#define VALUE other()"

    def build(number):
        files(other_dot_cpp=f"int other() {{ return {number}; }}")
        subprocess.run(["c++", "-fPIC", "-c", "other.cpp"], check=True)
        subprocess.run(["ar", "rc", "libother.a", "other.o"], check=True)
        return jitkern.load_inline(
            "drop_in_archive",
            sources,
            no_implicit_headers=True,
            extra_ldflags=[f"-L{folder} -lother"],
        )

    assert [build(1).answer(), build(2).answer()] == [1, 2]


def test_flags_are_read_as_a_shell_reads_them(files):
    folder = files(**{"a b__x": ""})
    spaced = folder / "a b"
    assert list(words(["-g\n\n", "-O0 -Wall", f"-I{spaced}", f"-L '{spaced}'", "-DX=a b", '-DS=\\"s\\"'])) == [
        "-g", "-O0", "-Wall", f"-I{spaced}", "-L", str(spaced), "-DX=a b", '-DS="s"',
    ]  # fmt: skip
    assert list(words(["-Wl,-rpath,$ORIGIN", "-Wl,-rpath,\\$$ORIGIN", "it's"])) == [
        "-Wl,-rpath,$ORIGIN"
    ] * 2 + ["it's"]
    assert list(words(["-L/a libx.a", "-I a"])) == ["-L/a", "libx.a", "-I", "a"]


def test_no_shell_reads_the_flags(files):
    folder = files()
    module(
        "drop_in_shell",
        extra_cflags=[
            f"-DX=$(touch {folder}/touched)",
            "-DY=`touch touched`",
            "-DZ=1;touch touched",
        ],
    )
    assert not list(folder.rglob("touched"))


# Processes, locks, failures.


def test_a_failed_build_can_be_retried(monkeypatch):
    with pytest.raises(CompileError):
        module("drop_in_retry", "#error no")
    with pytest.raises(CompileError):
        module("drop_in_retry", "#error no")
    assert module("drop_in_retry").answer() == 42


def test_processes_of_one_name_get_their_own(tmp_path):
    code = f"""
import sys, jitkern
source = {MODULE!r} % ("#define VALUE " + sys.argv[1])
print(jitkern.load_inline("drop_in_race", source, no_implicit_headers=True).answer())
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(n % 3)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(6)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == [
        str(n % 3) for n in range(6)
    ]


def test_a_warm_start_needs_no_compiler_no_ninja_and_no_subprocess(run_python, cache_dir):
    module("drop_in_warm")
    code = f"""
import json, subprocess, sys
def refuse(*a, **k): raise AssertionError("a subprocess")
subprocess.Popen.__init__ = refuse
import torch, jitkern
m = jitkern.load_inline("drop_in_warm", {MODULE % ""!r}, no_implicit_headers=True)
unwanted = {{"torch.utils.cpp_extension", "jitkern.%s", "jitkern.compilers.child_process", "setuptools"}}
print(json.dumps([m.answer(), sorted(unwanted & set(sys.modules)), jitkern.stats()]))
"""
    by_receipt = run_python(code % "cache.entry", PATH="/nonexistent", JITKERN_COMPILE="never")
    shutil.rmtree(cache_dir / "inline")
    by_lookup = run_python(code % "jit.build", PATH="/nonexistent", JITKERN_COMPILE="never")
    for done in (by_receipt, by_lookup):
        assert done.returncode == 0, done.stderr
        answer, loaded, stats = json.loads(done.stdout)
        assert (answer, loaded, stats["hits"], stats["compiles"]) == (42, [], 1, 0)
    assert len(list((cache_dir / "inline").iterdir())) == 1, "the lookup leaves one, too"
    assert usage.total(cache_dir)["hits"] == {"user": 2}


@pytest.mark.parametrize("broken", ["receipt", "artifact", "mode", "link", "entry", "other root"])
def test_a_receipt_that_is_odd_in_any_way_leads_to_the_lookup(
    broken, cache_dir, tmp_path, monkeypatch
):
    path = Path(module("drop_in_odd").__file__)
    (receipt,) = (cache_dir / "inline").iterdir()
    memo._answers.clear()
    monkeypatch.delitem(sys.modules, "jitkern.cache.events")
    with memo._read(config.current(), receipt.name) as (found, _):
        assert found["opens"]["path"] == str(path)
    if broken == "receipt":
        receipt.write_bytes(receipt.read_bytes()[:-1])
    elif broken == "artifact":
        binary = path.read_bytes()
        path.unlink()  # what is loaded keeps its file
        path.write_bytes(binary[:-1] + b"x")
    elif broken == "mode":
        path.chmod(0o666)
    elif broken == "link":
        moved = path.rename(tmp_path / path.name)
        path.symlink_to(moved)
    elif broken == "entry":
        (path.parent / "manifest.json").unlink()
    else:
        shutil.copytree(cache_dir, tmp_path / "copy")
        monkeypatch.setattr(
            "jitkern.config.settings._current",
            config.Config.from_env({"JITKERN_CACHE_DIR": str(tmp_path / "copy")}),
        )
    with pytest.raises((OSError, ValueError)), memo._read(config.current(), receipt.name):
        pass
    assert memo.recall(receipt.name) is None


@pytest.mark.parametrize(
    "text",
    [
        '#inc\\\nlude "\\\n{d}/x.h"',
        '#if __has_include("{d}/y.h")\n#endif',
        "#define S(x) #x\n#define P(x) S({d}/x)\n#if __has_include(P(y.h))\n#endif",
        'asm(".inc" "bin \\"{d}/x.h\\"");',
    ],
)
def test_a_text_that_asks_for_files_leaves_no_receipt(cache_dir, files, text):
    folder = files(x_dot_h="")
    module("drop_in_asks", text.replace("{d}", str(folder)))
    assert not (cache_dir / "inline").exists()


def test_a_receipt_serves_until_a_header_that_was_not_there_comes(cache_dir, files, monkeypatch):
    folder = files(keep="")
    monkeypatch.setattr("jitkern.compilers.torch_extension.inline_files.SITE", str(folder))
    module("drop_in_receipt", "#if __has_include(<x.h>)\n#endif")
    (receipt,) = (cache_dir / "inline").iterdir()
    memo._answers.clear()
    monkeypatch.delitem(sys.modules, "jitkern.cache.events")
    assert memo.recall(receipt.name).answer() == 42
    memo._answers.clear()
    files(x_dot_h="")
    assert memo.recall(receipt.name) is None


def test_calls_that_name_files_leave_no_receipt(cache_dir, files):
    files(n_dot_h="")
    module("drop_in_files_named", extra_include_paths=["."])
    module("drop_in_flag_named", extra_cflags=["-I."])
    module("drop_in_text_named", '#if 0\n#include "/x.h"\n#endif')
    assert not (cache_dir / "inline").exists()


def test_compiling_may_be_off():
    with (
        config.using(compile="never"),
        pytest.raises(NotCached, match="Call it once, with the same") as e,
    ):
        module("drop_in_never")
    assert "jitkern prewarm" not in str(e.value)


def test_a_lock_file_of_torch_is_nothing_to_us(tmp_path):
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "lock").touch()
    assert module("drop_in_lock", build_directory=folder).answer() == 42


def test_the_build_directory_gets_copies_that_stay(tmp_path):
    folder = tmp_path / "new" / "build"
    m = module("drop_in_copies", build_directory=folder)
    assert {path.name for path in folder.iterdir()} == {"main.cpp", "drop_in_copies.so"}
    assert (folder / "drop_in_copies.so").read_bytes() == Path(m.__file__).read_bytes()
    before = (folder / "drop_in_copies.so").stat()
    module("drop_in_copies", build_directory=str(folder))
    assert (folder / "drop_in_copies.so").stat() == before
    module("drop_in_copies", value(1), build_directory=folder)
    assert (folder / "drop_in_copies.so").stat().st_ino != before.st_ino


def test_use_pch_writes_nothing_into_torch():
    assert module("drop_in_pch", use_pch=True, keep_intermediates=False).answer() == 42
    assert not list((Path(torch.__file__).parent / "include" / "torch").glob("extension.h.*"))


def test_a_library_that_no_longer_links_is_built_again(files, caplog):
    folder = files(
        other_dot_cpp="int other() { return 1; }", renamed_dot_cpp="int renamed() { return 2; }"
    )
    source = MODULE % "int other();\n#define VALUE other()"
    link = f"-L{folder} -lmoved -Wl,-rpath,{folder}"
    subprocess.run(["c++", "-shared", "-fPIC", "other.cpp", "-o", "libmoved.so"], check=True)
    code = f"""
import jitkern
print(jitkern.load_inline("drop_in_moved", {source!r}, no_implicit_headers=True, extra_ldflags=[{link!r}]).answer())
"""
    run = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.check_output(run, text=True).strip() == "1"
    subprocess.run(["c++", "-shared", "-fPIC", "renamed.cpp", "-o", "libmoved.so"], check=True)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "compiling it again" in done.stderr and "LoadError" not in done.stderr.splitlines()[0]
    assert "undefined symbol" in done.stderr.splitlines()[-1]


def test_verbose_tells_what_was_compiled(capsys):
    module("drop_in_verbose", verbose=True)
    assert "-DTORCH_EXTENSION_NAME=drop_in_verbose" in capsys.readouterr().err


def test_a_header_that_the_call_does_not_name_is_looked_at_in_every_call(tmp_path, monkeypatch):
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setattr("jitkern.config.settings._current", config.Config.from_env())
    for number in (1, 2):
        (tmp_path / "drop_in_watched.h").write_text(value(number))
        assert module("drop_in_watched", '#include "drop_in_watched.h"').answer() == number


def test_the_environment_is_that_of_the_call(tmp_path, monkeypatch):
    for number in (1, 2):
        header = tmp_path / str(number) / "drop_in_environment.h"
        header.parent.mkdir()
        header.write_text(value(number))
        monkeypatch.setenv("CPATH", str(header.parent))
        m = module("drop_in_environment", "#include <drop_in_environment.h>")
        assert m.answer() == number
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerNotFound, match="no-such-compiler"):
        module("drop_in_environment", "#define X")


def test_relative_flags_and_quoted_includes_start_at_the_build_directory(files):
    files(
        out__n_dot_h="#define N 1",
        inc__i_dot_h="#define I 20",
        lib__o_dot_cpp="int o() { return 300; }",
    )
    subprocess.run(["c++", "-shared", "-fPIC", "lib/o.cpp", "-o", "out/libo.so"], check=True)
    define = '#include "n.h"\n#include <i.h>\nint o();\n#define VALUE N + I + o()'
    flags = {
        "extra_cflags": ["-I ../inc"],
        "extra_ldflags": ["-L.", "-lo", "-Wl,-rpath,'$$ORIGIN'"],
    }
    m = module("drop_in_relative", define, build_directory="out", **flags)
    assert m.answer() == 321
    files(out__n_dot_h="#define N 2")
    m = module("drop_in_relative", define, build_directory="out", **flags)
    assert m.answer() == 322
    with pytest.raises(CompileError):
        module("drop_in_relative", define)


def test_a_path_is_that_of_a_file(cache_dir):
    paths = []
    for _ in range(2):
        paths.append(module("drop_in_deleted", is_python_module=False))
        assert Path(paths[-1]).is_file()
        shutil.rmtree(cache_dir)


# Staleness: what is compiled and linked from files that the call does not name outright.

HEADER = "#define STR(x) #x\n#define H(x) STR(N/x)\n#include H(x.h)"
HAS = "#if __has_include(%s)\n#endif"


@pytest.fixture
def searched(files, monkeypatch):
    """The closure of a unit `k.cpp` of this text, `{d}` in flags being its folder."""

    def closure_of(text, variables=(), **flags):
        folder = files(k_dot_cpp=text)
        for name, found in dict(variables).items():
            monkeypatch.setenv(name, found.format(d=folder))
        monkeypatch.setattr("jitkern.config.settings._current", config.Config.from_env())
        given = {name: tuple(words([flag.format(d=folder)])) for name, flag in flags.items()}
        places = (str(folder / "k.cpp"),)
        return closure(Inline(("k.cpp",), name="k", places=places, **given))

    return closure_of


@pytest.mark.parametrize(
    ("text", "told", "changed"),
    [
        ("#include <x.h>", {"variables": {"CPATH": "{d}/a:{d}/b"}}, "a/x.h"),
        ("#include <x.h>", {"variables": {"CPLUS_INCLUDE_PATH": "{d}/b"}}, "b/x.h"),
        ("#include <x.h>", {"variables": {"NVCC_APPEND_FLAGS": "-I{d}/a -I{d}/b"}}, "a/x.h"),
        (HAS % "<y.h>", {"variables": {"CPATH": "{d}/a"}}, "a/y.h"),
        (HAS % "<y.h>", {"cflags": "--include-directory={d}/a"}, "a/y.h"),
        (HAS % "<y.h>", {"cflags": "-Wp,-I{d}/a"}, "a/y.h"),
        (HAS % "<y.h>", {"cuda_cflags": "-Xcompiler=-isystem,{d}/a"}, "a/y.h"),
        (HAS % "<y.h>", {"cflags": "@{d}/flags"}, "a/y.h"),
        ("#define H <y.h>\n" + HAS % "H", {"cflags": "-I{d}/a"}, "a/y.h"),
        (HAS % "H", {"cflags": "-I{d}/a '-DH=<y.h>'"}, "a/y.h"),
        ("#include <x.h>", {"cflags": "-isystem {d}/b -I{d}/a"}, "a/x.h"),
        ('#include "x.h"', {"cflags": "-I{d}/b -iquote {d}/a"}, "a/x.h"),
        ("#define H <x.h>\n#include H", {"cflags": "-I{d}/a -I{d}/b"}, "a/x.h"),
        ("#include_next <x.h>", {"cflags": "-I{d}/b -I{d}/a"}, "a/x.h"),
        ("", {"cflags": "@{d}/flags"}, "flags"),
        ("", {"cflags": "-fprofile-use={d}/profile"}, "profile"),
        ('#include "D.h"\n', {}, "D.h"),
        ("", {"ldflags": "-L{d}/b -l:libq.a"}, "b/libq.a"),
        ("", {"ldflags": "-L{d}/a -L{d}/b -Wl,-Bstatic,-lq"}, "a/libq.a"),
        ("", {"ldflags": "-L{d}/b -lq"}, "b/libq.so"),
        ("", {"ldflags": "-L{d}/c -lscript"}, "b/libq.a"),
        ("", {"ldflags": "-Wl,--whole-archive,{d}/b/libq.a,--no-whole-archive"}, "b/libq.a"),
        ("", {"ldflags": "-Wl,--version-script={d}/a/map"}, "a/map"),
        ("", {"ldflags": "@{d}/linked"}, "b/libq.a"),
        ("", {"ldflags": "-lq", "variables": {"LIBRARY_PATH": "{d}/b"}}, "b/libq.a"),
    ],
)
def test_what_a_compiler_or_linker_would_find_is_in_the_key(text, told, changed, searched, files):
    folder = files(b__x_dot_h="", a__keep="", b__libq_dot_a="1")
    files(flags=f"-I{folder}/a", linked=f"-L{folder}/b -lq", c__libscript_dot_so="INPUT(-lq)")
    told = {**told, "variables": {**told.get("variables", {})}}
    if "script" in str(told):
        told["variables"]["LIBRARY_PATH"] = f"{folder}/b"
    before = searched(text, **told)
    assert searched(text, **told).files == before.files
    path = folder / changed
    path.write_text(f"{path.read_text()} " if path.exists() else "")
    assert searched(text, **told).files != before.files


def test_response_files_are_read_in_their_order(files):
    folder = files(**{name: f"-D{name}" for name in "dcba"}, e="@e @a -De")
    told = list(expanded([f"@{folder}/{name}" for name in "bdac"] + ["@e"]))
    assert [word for word in told if word.startswith("-D")] == [
        "-Db",
        "-Dd",
        "-Da",
        "-Dc",
        "-De",
        "-Da",
    ]


def test_a_shared_library_is_there_or_not(searched, files):
    folder = files(libs__liba_dot_so="")
    found = []
    for body in (b"1", b"2"):
        (folder / "libs" / "liba.so").write_bytes(b"\x7fELF" + bytes(12) + b"\3\0" + body)
        found.append(searched("", ldflags="-L{d}/libs -la").files)
    (folder / "libs" / "liba.so").unlink()
    assert found[0] == found[1] != searched("", ldflags="-L{d}/libs -la").files


def test_headers_of_torch_that_are_named_count_by_their_version(searched):
    include = Path(torch.__file__).parent / "include"
    found = searched("#include <torch/extension.h>\n", cflags=f"-isystem {include}")
    assert list(found.files) == ["k.cpp"]
    assert list(found.versions.values()) == [torch.__version__]


def test_only_headers_of_the_toolkit_count_by_its_version(searched, files, monkeypatch):
    folder = files(src__x_dot_h="", include__cuda_dot_h="")
    found = []
    for number in (1, 2):
        (folder / "src" / "x.h").write_text(f"#define H {number}")
        told = {"cflags": "-I{d}/src -I{d}/include", "variables": {"CUDA_HOME": "{d}"}}
        found.append(searched("#include <x.h>\n#include <cuda.h>", **told))
    assert found[0].files != found[1].files
    assert not found[0].versions
    home = files(cuda__include__cuda_dot_h="") / "cuda"
    told = {"cflags": "-I{d}/cuda/include", "variables": {"CUDA_HOME": str(home)}}
    assert searched("#include <cuda.h>", **told).versions == {"<0>": f"cuda {torch.version.cuda}"}


def test_a_folder_around_the_toolchain_makes_none_of_it_ours(cache_dir):
    text = MODULE % "#include <vector>\n#include <c10/macros/Macros.h>"
    around = [str(Path(torch.__file__).parents[2]), "/usr/include"]
    flags = {"extra_cflags": ["-DPREFIX=/usr"], "extra_include_paths": around}
    jitkern.load_inline("drop_in_around", text, no_implicit_headers=True, **flags)
    (entry,) = entries(cache_dir)
    assert json.loads((entry / "manifest.json").read_text())["meta"]["opened"] == {}


def test_an_entry_that_watches_headers_of_another_place_stays_as_it_is(
    files, cache_dir, monkeypatch
):
    folder = files(b__N__x_dot_h=value(1), c__outer_dot_h=HEADER)
    flags = {"extra_include_paths": [f"{folder}/b", f"{folder}/c"]}
    source = MODULE % "#include <outer.h>\n"
    made = []
    for place in ("elsewhere", "", ""):
        before = compiles()
        with monkeypatch.context() as patch:
            if place:
                patch.setattr(inline_compiler, "place_of", lambda source, place=place: place)
            jitkern.load_inline("drop_in_place", source, no_implicit_headers=True, **flags)
        made.append((compiles() - before, len(entries(cache_dir))))
    assert made == [(1, 1), (1, 2), (0, 2)]


def test_another_checkout_has_its_own_computed_header(files, cache_dir):
    for name in ("v1", "v2"):
        files(
            **{f"{name}__k_dot_cpp": MODULE % "#include CONFIG", f"{name}__c_dot_h": value(name[1])}
        )
    arguments = {"extra_cflags": ['-DCONFIG=\\"c.h\\"']}
    for name in ("v1", "v2", "v1"):
        assert jitkern.load("drop_in_checkout", f"{name}/k.cpp", **arguments).answer() == int(
            name[1]
        )
    assert len(entries(cache_dir)) == 2


@pytest.mark.parametrize("text", [HEADER, "#pragma GCC system_header\n" + HEADER])
def test_a_computed_header_that_appears_earlier_or_changes(text, files):
    folder = files(b__N__x_dot_h=value(1), a__keep="", c__outer_dot_h=text)
    flags = {"extra_cflags": [f"-isystem {folder}/{name}" for name in "abc"]}

    def build():
        before = compiles()
        source = MODULE % "#include <outer.h>\n"
        m = jitkern.load_inline("drop_in_computed", source, no_implicit_headers=True, **flags)
        return m.answer(), compiles() - before

    assert [build(), build()] == [(1, 1), (1, 0)]
    files(b__N__x_dot_h=value(2))
    assert [build(), build()] == [(2, 1), (2, 0)]
    files(a__N__x_dot_h=value(3))
    assert [build(), build()] == [(3, 1), (3, 0)]


def test_a_header_that_was_edited_while_it_compiled_is_compiled_again(files, monkeypatch):
    folder = files(N__x_dot_h=value(1))
    make = compile_and_link.make

    def edited(*arguments):
        built = make(*arguments)
        files(N__x_dot_h=value(2))
        return built

    monkeypatch.setattr(compile_and_link, "make", edited)
    source = HEADER
    flags = {"extra_cflags": [f"-I{folder}"]}
    assert module("drop_in_edited", source, **flags).answer() == 1
    monkeypatch.undo()
    assert module("drop_in_edited", source, **flags).answer() == 2


def test_a_header_that_only_one_of_the_toolchain_names_is_that_of_the_place(files, monkeypatch):
    folder = files(known__outer_dot_h="#include <x.h>\n")
    monkeypatch.setattr(toolkit, "include_directories", lambda: [folder / "known"])
    for name in ("v1", "v2"):
        files(**{f"{name}__x_dot_h": value(name[1])})
        roots = [str(folder / "known"), str(folder / name)]
        source = "#include <outer.h>"
        assert module("drop_in_place", source, extra_include_paths=roots).answer() == int(name[1])


@pytest.mark.parametrize("listed", [True, False])
def test_a_file_that_incbin_reads_through_a_macro_is_watched(files, listed, monkeypatch, caplog):
    folder = files(data_dot_bin="1")
    assembly = '.section .rodata\\nblob:\\n.incbin \\"" DIR "/data.bin\\"\\n.byte 0\\n.previous'
    source = f'#define DIR "{folder}"\nasm("{assembly}");\n'
    source += 'extern "C" const char blob[] __attribute__((visibility("hidden")));\n#define VALUE *blob - 48'
    if not listed:
        monkeypatch.setattr(compile_and_link, "lists_binaries", lambda *_: False)
    found = []
    for number in (1, 1, 2):
        files(data_dot_bin=str(number)) if number == 2 else None
        before = compiles()
        found.append((module("drop_in_incbin", source).answer(), compiles() - before))
    assert found == [(1, 1), (1, 0 if listed else 1), (2, 1)]
    assert listed != ("compiled again at each start" in caplog.text)


def test_a_path_is_read_from_a_list_as_gcc_writes_it(tmp_path):
    folder = tmp_path / "a b#c$d$$e: f"
    folder.mkdir()
    (folder / "x.h").touch()
    (tmp_path / "k.cpp").write_text(f'#include "{folder}/x.h"\n')
    subprocess.run(
        ["c++", "-E", "-MD", "-MF", "k.d", "-o", "k.i", "k.cpp"], cwd=tmp_path, check=True
    )
    assert str(folder / "x.h") in read_list(tmp_path / "k.d")


@pytest.mark.parametrize(
    "flag", ["-Wl,--whole-archive,/x/libq.a", "-Wp,-I/x", '-DX="/x"', "-Wl,-lq"]
)
def test_a_flag_that_may_name_a_file_leaves_no_receipt(flag):
    call = {"texts": [""], "files": ["main.cpp"], "places": [], "include": [], "cuda_cflags": []}
    assert memo.digest_of({**call, "cflags": ["-O2"], "ldflags": []})
    assert not memo.digest_of({**call, "cflags": [], "ldflags": [flag]})


# Traps.


def test_a_syntax_error_has_lines_file_and_log():
    with pytest.raises(RuntimeError) as e:
        jitkern.load_inline("drop_in_syntax", "int main() { return 0 }", no_implicit_headers=True)
    assert isinstance(e.value, CompileError)
    lines = str(e.value).splitlines()
    assert lines[0].startswith(
        "could not compile `drop_in_syntax` of inline::drop_in_syntax for cpu-"
    )
    assert "main.cpp:1:22: error: expected" in lines[0]
    log = Path(lines[-1].removeprefix("full log: "))
    assert "main.cpp:1:22" in log.read_text() and "-std=c++" in e.value.command


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"cpp_sources": "int f() { return 1; }"}, "no Python module `drop_in_trap`: it has no PYBIND11_MODULE. "),
        ({"cpp_sources": MODULE.replace("TORCH_EXTENSION_NAME", "other") % ""}, "it has PyInit_other"),
        ({"cpp_sources": "#include <nothing.h>"}, "`nothing.h` lies in none of the include directories"),
        ({"cpp_sources": "torch::Tensor f(torch::Tensor x) { return x; }"}, "with no_implicit_headers, write"),
        ({"cpp_sources": MODULE % "", "extra_ldflags": ["-lnothing"]}, "the linker finds no -lnothing"),
        (
            {"cpp_sources": "#include <pybind11/pybind11.h>", "functions": ["f"], "with_pytorch_error_handling": False},
            "`functions` names f, which cpp_sources neither defines nor declares",
        ),
        (
            {"cpp_sources": STABLE.replace("%s", "twice") + "STABLE_TORCH_LIBRARY(twice, m) {}", "is_python_module": False},
            "the namespace `twice` is registered twice",
        ),
    ],
    ids=["no macro", "another name", "no header", "no prelude", "no library", "no function", "namespace"],
)  # fmt: skip
def test_a_trap_has_a_hint(arguments, hint):
    with pytest.raises(CompileError) as e:
        jitkern.load_inline("drop_in_trap", no_implicit_headers=True, **arguments)
    assert hint in str(e.value)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ('k.cu(3): error: no operator "+" matches these operands\n  operand types are: __half + __half', "-U__CUDA_NO_HALF_OPERATORS__"),
        ('error: no suitable conversion function from "__nv_bfloat16" to "float" exists', "-D__CUDA_NO_BFLOAT16"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_130'", "does not know compute_130: name another arch in TORCH_CUDA_ARCH_LIST"),
        ("#error -- unsupported GNU version! gcc versions later than 15", "name an older one, e.g. CC=g++-13"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "set JITKERN_JOBS=1"),
        ("ld: 1.o: multiple definition of `PyInit_x'; 0.o: first defined here", "stands in two units"),
    ],
)  # fmt: skip
def test_what_nvcc_says_has_a_hint(said, hint):
    assert hint in hints.hint(build_of(Inline(("cuda.cu",), name="x", texts=("",))), said)


@pytest.mark.parametrize("flag", ["`echo -I/x`", "$(echo -I/x)", "-I$${X}", "/x/*.o"])
def test_flags_for_a_shell_are_named(flag):
    with pytest.raises(CompileError, match="no shell reads the flags"):
        module("drop_in_shells", "#include <nothing.h>", extra_cflags=[flag])


def test_an_undefined_function_is_named():
    with pytest.raises(LoadError, match="undefined symbol.* is declared but not defined"):
        module("drop_in_undefined", "int nowhere();\n#define VALUE nowhere()")


@pytest.mark.parametrize("is_python_module", [True, False])
def test_a_library_that_is_missing_is_named(files, is_python_module):
    folder = files(other_dot_cpp="int other() { return 1; }")
    subprocess.run(["c++", "-shared", "-fPIC", "other.cpp", "-o", "libaway.so"], check=True)
    define = f"int other();\n#define VALUE other() + {int(is_python_module)}"
    with pytest.raises(LoadError, match=r"Say where libaway\.so is: extra_ldflags"):
        module(
            "drop_in_away", define, is_python_module=is_python_module,
            extra_ldflags=[f"-L{folder}", "-laway"],
        )  # fmt: skip


def test_a_fork_waits_for_no_thread_of_its_parent(run_python):
    code = """
import os, threading
from jitkern.loading import library
held, over = threading.Event(), threading.Event()
def hold():
    with library._opening:
        held.set()
        over.wait()
threading.Thread(target=hold).start()
held.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if library._opening.acquire(blocking=False) else 7)
over.set()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run_python(code)
    assert done.stdout == "0\n", done.stderr


def test_a_namespace_registered_twice_is_an_error_and_no_abort(run_python):
    code = f"""
import jitkern
arguments = dict(is_python_module=False, no_implicit_headers=True)
source = {STABLE.replace("%s", "drop_in_ns")!r}
jitkern.load_inline("drop_in_ns", source, **arguments)
for text in (source + "// changed", source + "// again"):
    try:
        jitkern.load_inline("drop_in_ns", text, **arguments)
    except jitkern.LoadError as e:
        print(e)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count(
            "registers the namespace `drop_in_ns` with TORCH_LIBRARY, and this process has that "
            "namespace already (main.cpp:"
        )
        == 2
    )


def test_an_op_of_a_fragment_defined_twice_is_an_error_and_no_abort(run_python):
    code = f"""
import jitkern
arguments = dict(is_python_module=False, no_implicit_headers=True)
for text in ({FRAGMENT % "one"!r}, {FRAGMENT % "two"!r}, {FRAGMENT % "one"!r} + "// changed"):
    try:
        jitkern.load_inline("drop_in_fragment", text, **arguments)
    except jitkern.LoadError as e:
        print(e)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("`drop_in_fragment` defines the op `drop_in_fragment::one`")
    assert done.stdout.count("\n") == 1


BRANCHES = """
#include <torch/csrc/stable/library.h>
#define OPS drop_in_branch
#ifdef FIRST
STABLE_TORCH_LIBRARY_FRAGMENT(OPS, m) { m.def(R"(first(Tensor x) -> int)"); }
#else
STABLE_TORCH_LIBRARY_FRAGMENT(OPS, m) { m.def("drop_in_branch::" "second(Tensor x) -> int"); }
#endif
"""


def test_what_is_registered_is_what_the_preprocessor_leaves(run_python):
    code = f"""
import jitkern
arguments = dict(is_python_module=False, no_implicit_headers=True)
named, branches = {STABLE.replace("%s", "TORCH_EXTENSION_NAME")!r}, {BRANCHES!r}
for name, text, *flags in (
    ("drop_in_named", named), ("drop_in_other", named), ("drop_in_named", named + "// changed"),
    ("drop_in_first", branches, "-DFIRST"), ("drop_in_second", branches),
    ("drop_in_third", branches, "-DFIRST"), ("drop_in_fourth", branches + "// changed"),
):
    try:
        jitkern.load_inline(name, text, extra_cflags=flags, **arguments)
    except jitkern.LoadError as e:
        print(e)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    named, third, fourth = done.stdout.splitlines()
    assert named.startswith("`drop_in_named` registers the namespace `drop_in_named` with")
    assert "Give the library another name, " in named
    assert third.startswith("`drop_in_third` defines the op `drop_in_branch::first` with")
    assert fourth.startswith("`drop_in_fourth` defines the op `drop_in_branch::second` with")


def test_no_compiler_says_what_to_install():
    with (
        config.using(cxx="no-such-compiler"),
        pytest.raises(CompilerNotFound, match="apt-get install g"),
    ):
        module("drop_in_no_compiler")


def test_no_ninja_is_needed(monkeypatch):
    found = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda tool, *a, **k: None if tool == "ninja" else found(tool, *a, **k)
    )
    assert module("drop_in_no_ninja").answer() == 42


# CUDA, as far as no GPU is needed.

KERNEL = "__global__ void fill(int* out) { *out = %s; }\n"


@pytest.fixture
def cuda_torch(monkeypatch, tmp_path):
    """A Torch that calls itself one of CUDA's, with libraries to link that hold nothing."""
    if torch.version.cuda is None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in ("c10_cuda", "torch_cuda"):
            subprocess.run(
                ["c++", "-shared", "-x", "c++", "/dev/null", "-o", tmp_path / f"lib{name}.so"],
                check=True,
            )
    return [f"-L{tmp_path}"]


def test_without_gpu_and_arch_a_cuda_source_is_refused(monkeypatch, cuda_torch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(arch_flags.Target, "visible", list)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(TargetError, match="TORCH_CUDA_ARCH_LIST=9.0, or in extra_cuda_cflags"):
        jitkern.load_inline("drop_in_no_gpu", "", KERNEL % 1)


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    with pytest.raises(
        TargetError, match=f"this Torch {torch.__version__.partition('+')[0]}.* is built without"
    ):
        jitkern.load_inline("drop_in_cpu_torch", "", KERNEL % 1, is_python_module=False)


def test_without_nvcc_the_error_says_what_to_install(monkeypatch, cuda_torch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompilerNotFound, match="needs nvcc: install the CUDA toolkit"):
        jitkern.load_inline("drop_in_no_nvcc", "", KERNEL % 1, is_python_module=False)


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("9.0", "90:90"),
        ("8.0;9.0a+PTX", "80:80 90a:90a 90a:c90a"),
        ("8.0 8.6", "80:80 86:86"),
        ("Volta", "70:70 70:c70"),
        ("Maxwell+Tegra;6.1", "53:53 61:61"),
        ("Ampere+Tegra Hopper", "87:87 90:90 90:c90"),
        ("10.0f", "100f:100f"),
    ],
)
def test_the_arch_list_is_read_as_torch_reads_it(listed, archs):
    expected = sorted(
        f"-gencode=arch=compute_{arch},code={'compute_' + code[1:] if code[0] == 'c' else 'sm_' + code}"
        for arch, _, code in (pair.partition(":") for pair in archs.split())
    )
    assert list(arch_flags.arch_flags(listed, ())) == expected
    if "f" not in listed and "90a+" not in listed:
        from torch.utils import cpp_extension

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_CUDA_ARCH_LIST", listed)
            assert cpp_extension._get_cuda_arch_flags() == expected


def test_flags_that_name_an_arch_take_the_place_of_the_list():
    assert arch_flags.arch_flags("8.0", ["-arch=sm_90"]) == ()
    assert arch_flags.arch_flags("8.0", ["-gencode", "arch=compute_90,code=sm_90"]) == ()
    for other in ("-Xcompiler=-march=native", "-Dsearch_depth=3", "-I/opt/archive"):  # unlike Torch
        assert arch_flags.arch_flags("8.0", [other])


def test_an_unknown_arch_is_a_value_error():
    with pytest.raises(ValueError, match=r"Unknown CUDA arch \(Hoper\)"):
        arch_flags.arch_flags("Hoper", ())


def test_cudnn_home_is_searched(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cudnn.h").touch()
    source = Inline(("main.cpp",), name="x", texts=("",), with_cuda=True)
    with config.using(environment={"CUDNN_HOME": str(tmp_path)}):
        command = commands.compile_step(build_of(source), 0, tmp_path).command
    assert str(tmp_path / "include") in command


@pytest.mark.slow
@pytest.mark.skipif(not toolkit.nvcc(), reason="needs nvcc")
def test_nvcc_compiles_for_the_archs_of_the_list(monkeypatch, cuda_torch, cache_dir, files):
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    files(n_dot_h="#define N 3\n")
    arguments = {
        "cuda_sources": '#include "n.h"\n' + KERNEL % "N", "is_python_module": False, "no_implicit_headers": True,
        "extra_ldflags": cuda_torch, "extra_include_paths": ["."],
    }  # fmt: skip
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    two = jitkern.load_inline("drop_in_nvcc", "", **arguments)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    one = jitkern.load_inline("drop_in_nvcc", "", **arguments)
    assert one != two and "cuda-sm_90-cu130" in two and "cuda-sm_80" in one
    if shutil.which("cuobjdump"):
        listed = subprocess.check_output(["cuobjdump", "--list-elf", two], text=True)
        assert "sm_80" in listed and "sm_90" in listed
    half = "#include <cuda_fp16.h>\n__global__ void add(__half* x) { x[0] = x[1] + x[2]; }"
    with pytest.raises(CompileError, match="-U__CUDA_NO_HALF_OPERATORS__"):
        jitkern.load_inline(
            "drop_in_half", "", half, is_python_module=False, no_implicit_headers=True
        )
    off = [f"-U__CUDA_NO_HALF{which}__" for which in ("_OPERATORS", "_CONVERSIONS", "2_OPERATORS")]
    jitkern.load_inline(
        "drop_in_half", "", half, is_python_module=False, no_implicit_headers=True,
        extra_cuda_cflags=off, extra_ldflags=cuda_torch,
    )  # fmt: skip
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "13.0")
    with pytest.raises(CompileError, match="this nvcc does not know .*TORCH_CUDA_ARCH_LIST"):
        jitkern.load_inline(
            "drop_in_arch", "", KERNEL % 1, is_python_module=False, no_implicit_headers=True
        )


# On a GPU, with nvcc.

COS_ADD = """
__global__ void cos_add_kernel(const float* x, const float* y, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = __cosf(x[i]) + __cosf(y[i]);
}
torch::Tensor cos_add(torch::Tensor x, torch::Tensor y) {
  auto out = torch::zeros_like(x);
  cos_add_kernel<<<1, 1024>>>(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), out.numel());
  return out;
}
"""
HALF = """
#include <ATen/Dispatch.h>
template <typename T> __global__ void half_test_kernel(const T* x, float* out) {
  if (x[0] < x[1] || x[0] >= x[1]) out[0] = 123;
}
torch::Tensor half_test(torch::Tensor x) {
  auto out = torch::empty(1, x.options().dtype(torch::kFloat));
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "half_test", [&] {
    half_test_kernel<scalar_t><<<1, 1>>>(x.data_ptr<scalar_t>(), out.data_ptr<float>());
  });
  return out;
}
"""
DECLARED = "torch::Tensor cos_add(torch::Tensor x, torch::Tensor y);"


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda_texts(monkeypatch):
    """Functions of a CUDA text bound as a module's, half, and as a custom op."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    m = jitkern.load_inline(
        "drop_in_cuda", [DECLARED, "torch::Tensor half_test(torch::Tensor x);"], [COS_ADD, HALF],
        functions=["cos_add", "half_test"],
    )  # fmt: skip
    x, y = torch.randn(2, 4, 4, device="cuda")
    torch.testing.assert_close(m.cos_add(x, y), x.cos() + y.cos(), rtol=1e-3, atol=1e-4)
    assert m.cos_add.__doc__.split("\n")[2] == "cos_add"
    assert m.half_test(torch.randn(3, device="cuda", dtype=torch.half))[0] == 123
    major, minor = torch.cuda.get_device_capability()
    assert f"/cuda-sm_{major}{minor}-" in m.__file__
    op = 'TORCH_LIBRARY(drop_in_cuda_op, m) { m.def("cos_add", cos_add); }'
    jitkern.load_inline(
        "drop_in_cuda_op",
        ["#include <torch/library.h>", DECLARED, op],
        COS_ADD,
        is_python_module=False,
    )
    torch.testing.assert_close(torch.ops.drop_in_cuda_op.cos_add(x, y), m.cos_add(x, y))


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda_files(files):
    files(
        ext_dot_cpp="#include <torch/extension.h>\n"
        + DECLARED
        + 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("cos_add", &cos_add); }',
        ext_dot_cu="#include <torch/types.h>\n#include <cuda_runtime.h>\n" + COS_ADD,
    )
    m = jitkern.load(
        "drop_in_cuda_files",
        ["ext.cpp", "ext.cu"],
        extra_cuda_cflags=["-O2"],
        keep_intermediates=False,
    )
    x, y = torch.randn(2, 4, 4, device="cuda")
    torch.testing.assert_close(m.cos_add(x, y), x.cos() + y.cos(), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "elf", "ptx"),
    [("", None, None), ("8.0;9.0+PTX", ["80", "90"], ["90"]), ("Turing 8.6", ["75", "86"], ["75"])],
)
def test_archs_of_the_list_are_in_the_library(listed, elf, ptx, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    path = jitkern.load_inline(
        f"drop_in_archs_{len(listed)}",
        "",
        KERNEL % 1,
        is_python_module=False,
        no_implicit_headers=True,
    )

    def found(option):
        output = subprocess.check_output(["cuobjdump", option, path], text=True)
        return sorted(set(re.findall(r"sm_(\d+)", output)))

    major, minor = torch.cuda.get_device_capability()
    here = [f"{major}{minor}"]
    assert (found("--list-elf"), found("--list-ptx")) == (elf or here, ptx or here)


# The rest of PyTorch's cases, each a build against torch/extension.h or more.


@pytest.mark.stress
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


@pytest.mark.stress
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


@pytest.mark.stress
def test_reload():
    for number in (123, 456, 456, 789):
        m = jitkern.load_inline(
            "drop_in_reloaded", f"int f() {{ return {number}; }}", functions="f"
        )
        assert m.f() == number


@pytest.mark.stress
def test_register_operators():
    source = """
    #include <torch/script.h>
    torch::Tensor func(torch::Tensor x) { return x; }
    static torch::RegisterOperators r("drop_in_test::func", &func);
    """
    path = jitkern.load_inline("is_python_module", source, functions="func", is_python_module=False)
    assert path.endswith(".so")
    assert torch.equal(torch.ops.drop_in_test.func(torch.eye(5)), torch.eye(5))


@pytest.mark.stress
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


@pytest.mark.stress
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


@pytest.mark.stress
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
@pytest.mark.stress
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


def test_what_the_linker_said_is_the_reason():
    text = 'int q(); int r(); extern "C" int f() { return q() + r(); }'
    with pytest.raises(CompileError, match=r"undefined reference to .q\(\)") as caught:
        jitkern.load_inline(
            "drop_in_undefined", text, extra_ldflags=["-Wl,--no-undefined"],
            no_implicit_headers=True, is_python_module=False,
        )  # fmt: skip
    said = str(caught.value)
    assert said.index("undefined reference to `r()") < said.index("ld returned")


def test_a_cuda_file_without_cuda_says_so(files):
    files(only_dot_cu="int f() { return 1; }")
    with pytest.raises(CompileError, match=r"a \.cu file takes nvcc, with_cuda=True"):
        jitkern.load("drop_in_only", "only.cu", with_cuda=False, is_python_module=False)
