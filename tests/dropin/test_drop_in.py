"""`jitkern.load_inline` and `jitkern.load` against the promises of `torch.utils.cpp_extension`.

The cases of PyTorch's test/test_cpp_extensions_jit.py (2.13, and what 2.14 added), written anew.
Those marked `long` build against torch/extension.h again and again: run them with `-m long`.

| case of PyTorch's                                          | here   | where, or why not |
|---|---|---|
| jit_compile_extension                                      | passes | test_two_files_a_class_and_odd_include_paths (long) |
| inline_..._functions_as_list                               | passes | test_the_default_prelude (long) |
| inline_..._functions_as_dict                               | passes | test_functions_of_a_dict_have_its_docstrings |
| inline_..._multiple_sources_and_no_functions               | passes | test_several_sources_and_no_functions (long) |
| inline_..._throws_when_functions_is_bad                    | passes | test_functions_of_another_type_are_a_value_error |
| lenient_flag_handling                                      | passes | test_the_default_prelude (long) |
| reload_jit_extension                                       | passes | test_a_changed_source_under_the_same_name, and test_reload (long) |
| set_default_type_also_changes_aten_default_type            | passes | test_the_default_prelude (long) |
| autograd_from_cpp                                          | passes | test_the_default_prelude (long) |
| custom_functorch_error                                     | passes | test_the_default_prelude (long) |
| custom_compound_op_autograd                                | passes | test_a_compound_op_has_gradients (long) |
| compilation_error_formatting                               | passes | test_a_syntax_error_has_lines_file_and_log |
| warning                                                    | passes | test_warnings_and_errors_are_translated (long) |
| cpp_frontend_module_has_same_output_as_python              | passes | test_a_module_of_the_cpp_frontend (long) |
| cpp_frontend_module_python_inter_op                        | passes | test_a_module_of_the_cpp_frontend (long) |
| cpp_frontend_module_has_up_to_date_attributes              | passes | test_a_module_of_the_cpp_frontend (long) |
| cpp_frontend_module_python_inter_op_with_cuda              | passes | test_a_module_of_the_cpp_frontend_on_a_gpu (gpu, long) |
| returns_shared_library_path_when_is_python_module_is_true  | passes | test_a_library_is_loaded_and_its_path_returned, test_register_operators (long) |
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
| jit_xpu_extension                                          | n/a    | SYCL: test_sycl_is_left_to_torch_with_one_warning |
| mps_extension                                              | n/a    | macOS |
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpp_texts import MODULE, library
from inline_modules import compiles, entries, module, value

import jitkern
from jitkern import jit, testing
from jitkern.compilers import compiler_for
from jitkern.compilers.torch_extension.inline import Inline, InlineCompiler
from jitkern.dropin import api, extension, memo
from jitkern.errors import DeclarationError
from jitkern.source.flags import words
from jitkern.source.kinds import Variant
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


# What comes back.


@pytest.mark.long
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


@pytest.mark.long
def test_functions_of_a_dict_have_its_docstrings():
    doc = 'says "two"\nlines \\t and 100%'

    def build(number):
        texts = ["#include <pybind11/pybind11.h>", f"int two() {{ return {number}; }}"]
        options = {"no_implicit_headers": True, "with_pytorch_error_handling": False}
        return jitkern.load_inline("drop_in_dict", texts, functions={"two": doc}, **options)

    m, changed = build(2), build(3)
    assert (m.two(), changed.two()) == (2, 3), "pybind11 knows modules by name"
    assert m.__spec__.origin == m.__file__ != changed.__file__
    assert m.two.__doc__.split("\n")[2:4] == ['says "two"', "lines \t and 100%"]


@pytest.mark.long
def test_a_library_is_loaded_and_its_path_returned(tmp_path):
    source = library("drop_in_stable")
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


@pytest.mark.parametrize("argument", ["extra_cflags", "extra_ldflags", "extra_include_paths"])
@pytest.mark.parametrize(
    ("given", "says"),
    [("-O3", "`-O3` is a string: give a list"), ({"-O3"}, ".* is a set, which has no order: give")],
)
def test_flags_that_are_no_list_are_refused(argument, given, says):
    with pytest.raises(TypeError, match=f"`x`: {says}"):
        jitkern.load_inline("x", "int f();", functions=["f"], **{argument: given})


def test_a_name_that_no_module_can_have_is_refused_at_once():
    before = compiles()
    with pytest.raises(ValueError, match="`drop-in` cannot name a Python module"):
        module("drop-in")
    assert compiles() == before
    library = 'extern "C" int drop_in() { return 1; }'
    arguments = {"no_implicit_headers": True, "is_python_module": False}
    assert Path(jitkern.load_inline("drop-in", library, **arguments)).is_file()
    assert module("2d_drop_in").answer() == 42


def test_the_signatures_are_those_of_torch():
    """They may end in a parameter that only a newer Torch has."""
    import inspect

    from torch.utils import cpp_extension

    for name in ("load", "load_inline"):
        theirs = inspect.signature(getattr(cpp_extension, name)).parameters.values()
        ours = inspect.signature(getattr(jitkern, name)).parameters.values()
        known = [(p.name, p.default) for p in theirs]
        assert [(p.name, p.default) for p in ours][: len(known)] == known


def test_bindings_that_need_no_lock_say_so():
    from jitkern.dropin.pybind import bindings

    first, *_ = bindings("f", safe=True, gil_not_used=True)
    assert first == "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m, pybind11::mod_gil_not_used()) {"


DECLARES = "int answer();"
DEFINES = "int answer() { return 1; }"


@pytest.mark.parametrize(
    ("functions", "cpp", "cuda", "says"),
    [
        (["anwser"], DEFINES, None, "does not declare `anwser`; did you mean answer?"),
        ({"n::anwser<int>": "doc"}, DEFINES, None, "does not declare `n::anwser<int>`"),
        ("answer", "", DEFINES, "does not declare `answer`: cuda_sources has it; declare it in"),
    ],
)
def test_a_function_that_no_source_declares_is_told(functions, cpp, cuda, says):
    with pytest.raises(DeclarationError, match=re.escape(says)):
        jitkern.load_inline("drop_in_typo", cpp, cuda, functions=functions)


@pytest.mark.parametrize(
    "cpp",
    [DECLARES, '#include "own.h"', "#include <own.h>", "using namespace at;", "#define F(x) x##r"],
)
def test_what_may_declare_a_function_is_built(cpp):
    from jitkern.dropin.pybind import bindings

    assert bindings("answer", safe=True, gil_not_used=False, cpp=cpp)


# Files.


@pytest.mark.long
def test_several_files_with_headers_beside_them(files):
    main = MODULE % "extern int other();\n#define ANSWER N + other()"
    files(
        a__main_dot_cpp=f'#include "n.h"\n{main}',
        a__n_dot_h="#define N 1\n",
        b__other_dot_cpp='#include "n.h"\nint other() { return N; }\n',
        b__n_dot_h="#define N 20\n",
    )
    sources = ["a/main.cpp", Path("b/other.cpp")]
    assert jitkern.load("drop_in_files", sources).answer() == 21
    files(b__n_dot_h="#define N 30\n")
    assert jitkern.load("drop_in_files", sources).answer() == 31, "a header is a part of the key"


@pytest.mark.long
def test_an_older_mtime_is_not_stale(files):
    folder = files(m_dot_cpp=MODULE % value(1))
    assert jitkern.load("drop_in_mtime", "m.cpp").answer() == 1
    files(m_dot_cpp=MODULE % value(2))
    os.utime(folder / "m.cpp", (0, 0))
    assert jitkern.load("drop_in_mtime", "m.cpp").answer() == 2


@pytest.mark.long
def test_include_roots_enter_the_key_by_content_alone(files, cache_dir):
    for name in ("one", "with space's"):
        files(**{f"{name}__n_dot_h": "#define ANSWER 7\n"})
    for name in ("one", "with space's"):
        assert module("drop_in_roots", "#include <n.h>", extra_include_paths=[name]).answer() == 7
        flag = f"-I{Path(name).absolute()}"
        assert module("drop_in_roots", "#include <n.h>", extra_cflags=[flag]).answer() == 7
    assert len(entries(cache_dir)) == 2, "one for the argument, one for the flag"


@pytest.mark.long
def test_a_file_in_another_encoding(files):
    folder = files()
    (folder / "m.cpp").write_bytes("// 你好\n".encode("gbk") + (MODULE % "").encode())
    assert jitkern.load("drop_in_encoding", "m.cpp").answer() == 42


def test_a_missing_file_is_named(files):
    with pytest.raises(FileNotFoundError, match=r"nothing\.cpp"):
        jitkern.load("x", ["nothing.cpp"])


# The key.


@pytest.mark.long
def test_the_same_call_returns_the_same_module():
    before = compiles()
    m = module("drop_in_again")
    assert module("drop_in_again") is m and compiles() == before + 1


@pytest.mark.long
def test_a_changed_source_under_the_same_name(cache_dir):
    """PyTorch's reload_jit_extension, less its headers."""
    modules = [module("drop_in_reload", value(number)) for number in (123, 456, 456, 789)]
    assert [m.answer() for m in modules] == [123, 456, 456, 789]
    built = [path for path in entries(cache_dir) if ".shortcut." not in path.name]
    assert modules[1] is modules[2] and len(built) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"extra_cflags": ["-DX"]}, {"extra_ldflags": ["-Wl,-O1"]}, {"extra_cuda_cflags": ["-DX"]},
        {"with_pytorch_error_handling": False, "functions": []}, {"is_python_module": False},
        {"no_implicit_headers": False},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_every_argument_that_matters_is_in_the_key(changed, monkeypatch):
    keys = []

    def keep(call, *rest, **options):
        source = extension.source_of(call)
        compiler, target = compiler_for(source), extension.target_of(source)
        exact, closure = compiler.target(source, target), compiler.closure(source)
        flags = compiler.flags(source, target)
        keys.append((flags, closure.files, exact, memo.shortcut_key(call)))

    monkeypatch.setattr(extension, "answer", keep)
    common = {"no_implicit_headers": True}
    jitkern.load_inline("x", "int x;", **common)
    jitkern.load_inline("x", "int x;", **{**common, **changed})
    jitkern.load_inline("y", "int x;", **common)
    for other in keys[1:]:
        assert keys[0][:3] != other[:3] and keys[0][3] != other[3]


def test_the_processor_is_in_the_key_where_a_flag_depends_on_it(monkeypatch):
    def call(*flags):
        return api.call_of(
            "x", None, flags, None, None, None, files=["main.cpp"], texts=["int x;"], places=[],
            output="library", python=False,
        )  # fmt: skip

    def keys(*flags):
        variant = Variant("inline::x", extension.source_of(call(*flags)))
        key = jit.key_of(variant, Target.current("cpu"))
        return key.digest, memo.shortcut_key(call(*flags)).digest

    found = []
    for flags in ("sse4_2 avx2", "sse4_2 avx2 avx512f"):
        testing.set_processor(monkeypatch, flags)
        found.append((keys("-O3"), keys("-O3", "-march=native")))
    (plain, native), (other_plain, other_native) = found
    assert plain == other_plain
    assert native[0] != other_native[0] and native[1] != other_native[1]


def test_a_flag_moved_to_another_compiler_changes_the_key():
    found = set()
    for which in ("cflags", "cuda_cflags", "ldflags"):
        source = Inline(("a.cpp",), name="x", texts=("",), **{which: ("-DX",)})
        found.add(InlineCompiler().flags(source, Target.current("cpu")))
    assert len(found) == 3


@pytest.mark.long
def test_an_archive_enters_the_key_by_content(files):
    folder = files(other_dot_cpp="int other() { return 1; }")
    flags = [f"-L{folder} -lother"]

    def build(number):
        files(other_dot_cpp=f"int other() {{ return {number}; }}")
        subprocess.run(["c++", "-fPIC", "-c", "other.cpp"], check=True)
        subprocess.run(["ar", "rc", "libother.a", "other.o"], check=True)
        define = "int other();\n#define ANSWER other()"
        return module("drop_in_archive", define, extra_ldflags=flags).answer()

    assert [build(1), build(2)] == [1, 2]


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


@pytest.mark.long
def test_no_shell_reads_the_flags(files):
    folder = files()
    flags = [f"-DX=$(touch {folder}/touched)", "-DY=`touch touched`", "-DZ=1;touch touched"]
    module("drop_in_shell", extra_cflags=flags)
    assert not list(folder.rglob("touched"))
