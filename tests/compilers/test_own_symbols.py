"""A library reads its own variables and calls its own functions, whatever else a process has loaded."""

import ctypes
import shutil
import subprocess
import sys

import pytest
import torch
from cpp_texts import MODULE
from helpers import write_files

import jitkern
from jitkern import jit
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")

CPU = Target.current("cpu")
COMPILERS = [
    "g++",
    pytest.param(
        "clang++",
        marks=[pytest.mark.skipif(not shutil.which("clang++"), reason="none"), pytest.mark.long],
    ),
]
# Each with external linkage, and each a case of its own for compilers and loaders.
SYMBOLS = """
inline constexpr int inline_constant[2] = {VALUE, 0};
inline int inline_variable = VALUE;
inline thread_local int of_a_thread = VALUE;
struct Members { static constexpr int constant[2] = {VALUE, 0}; static inline int variable = VALUE; };
template <int N> struct Template { static int member; };
template <int N> int Template<N>::member = VALUE;
template <typename T> constexpr T variable_template[2] = {VALUE, 0};
inline int& static_of_a_function() { static int local = VALUE + 0 * inline_variable; return local; }
template <typename T> int& static_of_a_template() { static int local = VALUE; return local; }
struct Virtual { virtual int value() { return VALUE; } };
extern "C" { int plain = VALUE; __attribute__((weak)) int weak_variable = VALUE; }
extern "C" { __attribute__((weak)) int weak_function() { return VALUE; } }
__attribute__((visibility("default"))) int visible = VALUE;
asm(".pushsection .data\\n.globl of_assembler\\n.type of_assembler, %gnu_unique_object\\n"
    ".size of_assembler, 4\\nof_assembler: .long " STRING(VALUE) "\\n.popsection\\n.comm common, 4, 4");
extern "C" int of_assembler, common;
static int set_common = common = VALUE;
int swab(int value) { return value + VALUE; }
extern "C" int isalnum(int) { return VALUE; }  // a function of libc
__attribute__((noipa)) Virtual* made() { static Virtual made; return &made; }
static int found(int n) {
  const int all[] = {
      inline_constant[n], inline_variable, of_a_thread, Members::constant[n], Members::variable,
      Template<3>::member, variable_template<int>[n], static_of_a_function(),
      static_of_a_template<int>(), made()->value(), plain, weak_variable, weak_function(), visible,
      of_assembler, common, swab(0), isalnum(0)};
  int differing = 0, number = 1;
  for (int one : all) { if (one != VALUE) differing = differing * 100 + number; number++; }
  return differing;
}
"""
HEAD = "#define STRING_OF(x) #x\n#define STRING(x) STRING_OF(x)\n"
KERNEL = HEAD + SYMBOLS + 'extern "C" void labs(int* out, int n) { *out = found(n); }\n'


@pytest.fixture
def everywhere(monkeypatch):
    """Let the process find the symbols of each library that it loads, as with RTLD_GLOBAL."""
    plain = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *_: plain(name, ctypes.RTLD_GLOBAL))
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | ctypes.RTLD_GLOBAL)
    yield
    sys.setdlopenflags(flags)


@pytest.mark.long
@pytest.mark.parametrize("cxx", COMPILERS)
def test_variants_of_a_kernel_share_no_symbol(cxx, everywhere):
    """Each variant alone has these values, and `labs` is a function of libc."""
    kernel = jitkern.cpp_kernel(text=KERNEL, name="labs", flags=["-rdynamic"])
    with jitkern.config.using(cxx=cxx):
        for value in (5, 6):
            out = torch.ones(1, dtype=torch.int32)
            kernel[{"VALUE": value}](out, 0)
            assert out.item() == 0, "the number of the symbol in the list `all`"


@pytest.mark.long
def test_a_module_shares_its_symbols_among_its_units_alone(everywhere, tmp_path):
    """A static library brings one of the symbols; flags of the compiler do not reach it."""
    archived = 'inline int v = VALUE; extern "C" int of_the_archive() { return v; }\n'
    header = "inline int& counter() { static int count = VALUE; return count; }\n"
    head = f"""{HEAD}{SYMBOLS}#include "counter.h"
extern "C" int of_the_archive(); int of_the_other_unit();
#define ANSWER (of_the_other_unit(), found(0) * 1000 + of_the_archive() * 100 + counter())"""
    main = MODULE % head
    use = "int use(int n) { return found(n) + counter(); }\n"
    before = f"{HEAD}{SYMBOLS}{header}{archived} {use}"
    other = '#include "counter.h"\nint of_the_other_unit() { return ++counter(); }\n'
    texts = {"main.cpp": main, "other.cpp": other, "counter.h": header, "q.cpp": archived}
    write_files(tmp_path, {**texts, "before.cpp": before})
    for command in (
        "c++ -std=c++17 -fPIC -DVALUE=5 -shared before.cpp -o before.so",
        "c++ -std=c++17 -fPIC -DVALUE=3 -c q.cpp -o q.o",
        "ar rcs libq.a q.o",
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    ctypes.CDLL(str(tmp_path / "before.so"))
    source = Extension(
        ["main.cpp", "other.cpp"], folder=str(tmp_path), function="answer", name="m",
        flags=["-DVALUE=3"], libraries=["q"], library_dirs=["."],
    )  # fmt: skip
    assert jit.loaded(Variant("test::m", source), CPU)() == 304
