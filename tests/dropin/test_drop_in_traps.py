"""What goes wrong in `load_inline` and `load` is said with a hint, and is no abort."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cpp_texts import MODULE, library
from inline_modules import module

import jitkern
from jitkern import config
from jitkern.compilers.result import first_hint
from jitkern.compilers.torch_extension import hints
from jitkern.errors import CompileError, CompilerNotFound, DeclarationError, LoadError

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
# In a process of its own: the errors of libraries (name, text and flags) that are loaded in a row.
LOAD = """
import jitkern
for name, text, *flags in {}:
    try:
        jitkern.load_inline(name, text, extra_cflags=flags, is_python_module=False, no_implicit_headers=True)
    except jitkern.LoadError as e:
        print(e)
"""
FRAGMENT = """
#include <torch/csrc/stable/library.h>
STABLE_TORCH_LIBRARY_FRAGMENT(drop_in_fragment, m) { m.def("%s(Tensor x) -> int"); /* { */ }
"""


# Traps.


def test_a_syntax_error_has_lines_file_and_log():
    with pytest.raises(RuntimeError) as e:
        jitkern.load_inline("drop_in_syntax", "int main() { return 0 }", no_implicit_headers=True)
    assert isinstance(e.value, CompileError)
    lines = str(e.value).splitlines()
    what = "`drop_in_syntax` of inline::drop_in_syntax"
    assert lines[0].startswith(f"could not compile {what} for cpu-")
    assert "main.cpp:1:22: error: expected" in lines[0]
    log = Path(lines[-1].removeprefix("full log: "))
    assert "main.cpp:1:22" in log.read_text() and "-std=c++" in e.value.command


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"cpp_sources": "int f() { return 1; }"}, "no Python module `drop_in_trap`: it has no PYBIND11_MODULE. "),
        ({"cpp_sources": MODULE.replace("TORCH_EXTENSION_NAME", "other") % ""}, "it has PyInit_other"),
        ({"cpp_sources": "#include <nothing.h>"}, "`nothing.h` lies in none of the directories"),
        ({"cpp_sources": MODULE % "", "extra_ldflags": ["-lnothing"]}, "the linker finds no -lnothing"),
    ],
    ids=["no macro", "another name", "no header", "no library"],
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
        ("nvcc fatal   : Unsupported gpu architecture 'compute_130'", "does not know compute_130: name another arch (TORCH_CUDA_ARCH_LIST"),
        ("#error -- unsupported GNU version! gcc versions later than 15", "name an older one, e.g. CC=g++-13"),
    ],
)  # fmt: skip
def test_what_nvcc_says_has_a_hint(said, hint):
    assert hint in first_hint(said, hints.HINTS)


@pytest.mark.long
def test_an_undefined_function_is_named():
    with pytest.raises(LoadError, match="undefined symbol.* is declared but not defined"):
        module("drop_in_undefined", "int nowhere();\n#define ANSWER nowhere()")


@pytest.mark.long
@pytest.mark.parametrize("is_python_module", [True, False])
def test_a_library_that_is_missing_is_named(files, is_python_module):
    folder = files(other_dot_cpp="int other() { return 1; }")
    subprocess.run(["c++", "-shared", "-fPIC", "other.cpp", "-o", "libaway.so"], check=True)
    define = f"int other();\n#define ANSWER other() + {int(is_python_module)}"
    with pytest.raises(LoadError, match=r"Say where libaway\.so is: extra_ldflags"):
        module(
            "drop_in_away", define, is_python_module=is_python_module,
            extra_ldflags=[f"-L{folder}", "-laway"],
        )  # fmt: skip


@pytest.mark.long
def test_a_namespace_registered_twice_is_an_error_and_no_abort(run_python):
    texts = [library("drop_in_ns") + end for end in ("", "// changed", "// again")]
    done = run_python(LOAD.format([("drop_in_ns", text) for text in texts]))
    assert done.returncode == 0, done.stderr
    says = (
        "registers the namespace `drop_in_ns` with TORCH_LIBRARY, and this process has that "
        "namespace already (./main.cpp:"
    )
    assert done.stdout.count(says) == 2


@pytest.mark.long
def test_an_op_defined_twice_in_a_fragment_is_an_error(run_python):
    texts = [FRAGMENT % "one", FRAGMENT % "two", FRAGMENT % "one" + "// changed"]
    done = run_python(LOAD.format([("drop_in_fragment", text) for text in texts]))
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


@pytest.mark.long
def test_what_is_registered_is_what_the_preprocessor_leaves(run_python):
    named = library("TORCH_EXTENSION_NAME")
    loaded = [
        ("drop_in_named", named), ("drop_in_other", named), ("drop_in_named", f"{named}// changed"),
        ("drop_in_first", BRANCHES, "-DFIRST"), ("drop_in_second", BRANCHES),
        ("drop_in_third", BRANCHES, "-DFIRST"), ("drop_in_fourth", f"{BRANCHES}// changed"),
    ]  # fmt: skip
    done = run_python(LOAD.format(loaded))
    assert done.returncode == 0, done.stderr
    named, third, fourth = done.stdout.splitlines()
    assert named.startswith("`drop_in_named` registers the namespace `drop_in_named` with")
    assert "Give the library another name, " in named
    assert third.startswith("`drop_in_third` defines the op `drop_in_branch::first` with")
    assert fourth.startswith("`drop_in_fourth` defines the op `drop_in_branch::second` with")


def test_no_compiler_says_what_to_install():
    missing = config.using(cxx="no-such-compiler")
    with missing, pytest.raises(CompilerNotFound, match="apt-get install g"):
        module("drop_in_no_compiler")


def test_no_ninja_says_what_to_install(monkeypatch):
    which = shutil.which
    without = lambda tool, *a, **k: None if tool == "ninja" else which(tool, *a, **k)
    monkeypatch.setattr(shutil, "which", without)
    with pytest.raises(CompilerNotFound, match="pip install ninja"):
        module("drop_in_no_ninja")


def test_what_the_linker_said_is_the_reason():
    text = 'int q(); int r(); extern "C" int f() { return q() + r(); }'
    with pytest.raises(CompileError, match=r"undefined reference to .q\(\)") as caught:
        jitkern.load_inline(
            "drop_in_undefined", text, extra_ldflags=["-Wl,--no-undefined"],
            no_implicit_headers=True, is_python_module=False,
        )  # fmt: skip
    said = str(caught.value)
    assert said.index("undefined reference to `r()") < said.index("ld returned")


def test_a_module_of_no_sources_is_refused():
    with pytest.raises(DeclarationError, match="`nothing` has no sources: give at least one"):
        jitkern.load("nothing", [])
