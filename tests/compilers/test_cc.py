"""The real C compiler."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import assert_refused, one_in_four

from jitkern import config, jit
from jitkern.errors import CompileError, CompilerNotFound, DeclarationError, TargetError
from jitkern.loading.loader import load
from jitkern.source.kinds import Cpp, Generated, Variant
from jitkern.target import Target


@pytest.fixture
def build(tmp_path):
    """Compile `text` as a kernel file and return its entry."""
    folder = tmp_path / "kernels" / "k"
    folder.mkdir(parents=True)

    def run(text, function="k", template=(), name="k.cpp", target=None, **options):
        (folder / name).write_text(text)
        source = Cpp(name, folder=str(folder), **options)
        return jit.ensure(
            Variant("test::k", source, function, template), target or Target.current("cpu")
        )

    run.folder = folder
    return run


K = 'extern "C" void k(int* x) {}'
SEVEN = 'extern "C" void k(int* x) { *x = 7; }'


def written(entry, kind=ctypes.c_int):
    """What a kernel writes to the only argument that it has."""
    value = kind()
    load(Cpp("k.cpp"), entry).call([ctypes.addressof(value)], "k")
    return value.value


def parameters(entry):
    return entry.manifest.meta["parameters"]


PARAMETERS = {
    "their types come from the compiler": (
        """#include <cstdint>
#define FLOATS const float* __restrict__
using size = int64_t;
struct opaque;
extern "C" void k(FLOATS a, double* b, size n, int i, unsigned u, bool f, uint8_t c, void* v, opaque* o, float s, long long l) {}""",
        "*f32 *f64 i64 i32 u32 bool u8 * * f32 i64",
    ),
    "arrays and pointers are what the compiler takes them for": (
        """#include "float16.h"
void k(float x[][4], const double y[2][3][4], volatile float* z, const volatile int* i,
       float** a, const void* const* b, bfloat16* p) {}""",
        "*f32 *f64 *f32 *i32 *i64 *i64 *bf16",
    ),
    "none, and noexcept": ('extern "C" void k() noexcept {}', ""),
    "macros of the source may have any name": (
        "\n".join(f"#define {name} 7" for name in ("F", "N", "P", "T", "code", "type", "text"))
        + '\nextern "C" void k(int *x, const double *y, long n) { *x = F; }',
        "*i32 *f64 i64",
    ),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_are_read(build, case):
    text, codes = PARAMETERS[case]
    assert parameters(build(text)) == codes.split()


def test_a_struct_by_value_is_no_parameter_that_can_be_passed(build):
    assert parameters(build('#include "float16.h"\nvoid k(float16 h, int* x) {}')) == ["", "*i32"]


DTYPES = ["f16", "u8", "f64", "i8", "bf16", "bool", "f32", "u32", "i64"]


@pytest.mark.parametrize("dtype", one_in_four(DTYPES))
def test_template_arguments_become_macros_of_one_word(build, dtype):
    text = '#include "float16.h"\nextern "C" void k(T *x, int n) { x[0] = T(x[N] + 1); }'
    assert parameters(build(text, template=(("T", dtype), ("N", 4)))) == [f"*{dtype}", "i32"]


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ('namespace a { void k(int* x) { *x = 7; } } extern "C" void k(double*) {}', "a::k"),
        ("namespace a { void k(int* x) { *x = 7; } void k(float* x) {} }", "a::k(int*)"),
    ],
    ids=["of another namespace", "overloaded"],
)
def test_a_function_is_not_its_twin(build, text, function):
    entry = build(text, function)
    assert (written(entry), parameters(entry)) == (7, ["*i32"])


def test_openmp(build):
    text = '#include <omp.h>\nextern "C" void k(int* x) {\n#pragma omp parallel\n*x = omp_in_parallel() || omp_get_max_threads() == 1; }'
    assert parameters(build(text, openmp=True)) == ["*i32"]


@pytest.mark.long
def test_native_goes_to_a_target_of_its_own(build):
    text = 'extern "C" void k(int* x) {}'
    plain, native = build(text), build(text, native=True)
    assert plain.path.parent.name.startswith("cpu-x86_64-torch")
    assert native.path != plain.path


def test_the_artifact_is_free_of_paths(build, tmp_path):
    entry = build(f'extern "C" const char* where() {{ return __FILE__; }}\n{K}')
    assert str(tmp_path).encode() not in entry.read(entry.manifest.meta["artifact"])


def test_a_syntax_error_names_file_and_line(build):
    says = r"`k` of test::k for cpu-.*kernels/k/k\.cpp:2:.*error: "
    with pytest.raises(CompileError, match=says) as caught:
        build('extern "C" void k(int* x) {\n  *x = ;\n}')
    assert "k.cpp" in caught.value.log
    assert "k.cpp:2:" in Path(str(caught.value).rpartition("full log: ")[2]).read_text()
    assert caught.value.command.startswith(f"{config.current().cxx} ")


@pytest.mark.parametrize("head, tail", [("static ", ""), ("namespace { ", " }")])
def test_a_function_that_others_cannot_see_is_a_kernel(build, head, tail):
    text = f'{head}void k(int* x) {{ *x = 7; }}{tail}\nextern "C" void uses(int* x) {{ k(x); }}'
    assert written(build(text)) == 7


@pytest.mark.parametrize(
    "flags", ["", "-Wl,-Bsymbolic", "-Wl,-Bsymbolic -Wl,-z,pack-relative-relocs"]
)
def test_however_the_linker_relocates_the_function_is_found(build, flags):
    assert written(build(SEVEN, flags=flags.split())) == 7


def test_a_function_that_returns_something_is_refused(build):
    says = r":2: `k` in \S+ is no kernel: a kernel function returns nothing: write `void`"
    with pytest.raises(CompileError, match=says) as e:
        build("\nint k(int* x) { return *x; }")
    assert "probe" not in str(e.value)


TEMPLATE = """
#include <cstdint>
template <typename T, int N = 2> void k(T* out, const T* x, double alpha, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = T(alpha) * x[i] + N + OFFSET;
}
"""


@pytest.mark.parametrize(
    ("function", "template"),
    [("k", (("OFFSET", 1), ("N", 3), ("T", "f32"))), ("k<float, 3>", (("OFFSET", 1),))],
)
def test_a_template_is_instantiated_other_arguments_are_macros(build, function, template):
    entry = build(TEMPLATE, function, template)
    assert parameters(entry) == ["*f32", "*f32", "f64", "i64"]
    out, x = ctypes.c_float(), ctypes.c_float(5.0)
    values = [ctypes.addressof(out), ctypes.addressof(x), 2.0, 1]
    load(Cpp("k.cpp"), entry).call(values, "k")
    assert out.value == 2 * 5 + 3 + 1


GAP = "template <typename T, int N = 4, bool B = false> void k(T* x) { *x = B ? -1 : N; }"


UNNAMED = "template <typename, int N> void k(int* x) { *x = N; }"
OF_16_BITS = '`bfloat16` comes from .*: #include "float16.h"'
REFUSED = {
    "a macro that is not defined": ('extern "C" void k(T* x) {}', {}, r"k\.cpp:1:.*T"),
    "a missing function": (K, {"function": "other"}, r"has no function `other`; it has: k"),
    "a gap in template arguments": (GAP, {"template": (("T", "f32"), ("B", True))}, "template of <T, N, B>: give `N` too"),
    "a number that is missing": (UNNAMED, {"template": (("1", "f32"),)}, "template argument 1 by number, and not 0"),
    "no name": (UNNAMED, {"template": (("N", 2),)}, "no name for template parameter 0, `typename`: pass template arguments by position"),
    "a parameter of 16 bits without its header": ('extern "C" void k(bfloat16* x) { x[0] = x[0] + 1; }', {}, OF_16_BITS),
    "a number of 16 bits without its header": (
        "template <typename T> void k(T* x) { x[0] = bfloat16(1); }", {"template": (("T", "f32"),)}, OF_16_BITS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_compiled_is_refused_with_its_reason(build, case):
    assert_refused(build, *REFUSED[case])


@pytest.mark.parametrize("template", [(("N", 2), ("M", 1)), (("0", 1), ("1", 2))])
def test_the_order_of_template_parameters_is_that_of_the_header(build, template):
    (build.folder / "k.h").write_text("template <int M, int N> void k(int* x) { *x = M - N; }")
    entry = build('#include "k.h"', template=template)
    assert written(entry) == 1 - 2


def test_of_several_templates_the_one_that_fits_is_meant(build):
    text = "template <typename T, int N> void k(T*) {}\ntemplate <int N> void k(int* x) { *x = N; }"
    entry = build(text, template=(("N", 2),))
    assert written(entry) == 2
    swapped = "template <int A, int B> void k(int*) {}\ntemplate <int B, int A> void k(float*) {}"
    with pytest.raises(CompileError, match="declarations that fit, `A, B`, `B, A`"):
        build(swapped, template=(("A", 1), ("B", 2)))


def test_a_static_template_is_a_kernel(build):
    text = "template <typename T> static void k(T* x) { *x = 7; }"
    assert written(build(text, template=(("T", "f32"),)), ctypes.c_float) == 7


def test_an_include_outside_the_roots_is_refused(build, tmp_path):
    (tmp_path / "stray.h").write_text("")
    with pytest.raises(CompileError, match=rf"opened {tmp_path}/stray.h.*include="):
        build(f'#define FILE "{tmp_path}/stray.h"\n#include FILE\nextern "C" void k(int* x) {{}}')


@pytest.mark.long
def test_a_replaced_compiler_is_asked_again_for_its_folders(build, tmp_path):
    tool = tmp_path / "c++"
    for number in (1, 2):
        own = tmp_path / f"compiler{number}"
        own.mkdir()
        (own / "of_the_compiler.h").write_text(f"#define VALUE {number}\n")
        (own / "c++").write_text(f'#!/bin/sh\nexec {shutil.which("c++")} -isystem {own} "$@"\n')
        (own / "c++").chmod(0o755)
        tool.unlink(missing_ok=True)
        tool.symlink_to(own / "c++")
        text = f"#include <of_the_compiler.h>\nvoid k(int* x) {{ *x = VALUE; }} // {number}"
        with config.using(cxx=str(tool)):
            assert written(build(text)) == number


ASM = 'asm(".pushsection .rodata\\n%s \\"%s\\"\\n.popsection");\nextern "C" void k(int* x) {}'


@pytest.fixture
def thing(tmp_path):
    """The folder of an archive, `libthing.a`, that defines `thing`."""
    (tmp_path / "f.c").write_text("int thing(void) { return 1; }")
    for command in ("cc -fPIC -c f.c", "ar rcs libthing.a f.o"):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
def compiler_that(tmp_path):
    """A C++ compiler whose name and lines of shell come before those of the real one."""

    def make(lines):
        (tmp_path / "c++").write_text(f'#!/bin/sh\n{lines}\nexec c++ "$@"\n')
        (tmp_path / "c++").chmod(0o755)
        return config.using(cxx=str(tmp_path / "c++"))

    return make


# Lines that make a compiler of another one: its output is cut, or for AArch64, or something else.
WRITE = 'for a in "$@"; do [ "$p" = -o ] && o=${a%out.o}; p=$a; done; c++ "$@" || exit'
ODD = {
    "junk": f'{WRITE}; [ -z "$o" ] || echo junk > "$o"; exit 0',
    "cut": f'{WRITE}; [ -z "$o" ] || {{ head -c 4000 "$o" > o; mv o "$o"; }}; exit 0',
    "foreign": f'{WRITE}; [ -z "$o" ] || printf "\\267\\000" | dd of="$o" bs=1 seek=18 conv=notrunc 2>&1; exit 0',
}


@pytest.mark.parametrize("kind", ODD)
def test_what_a_compiler_wrote_for_no_such_machine_is_not_kept(build, compiler_that, kind):
    says = r"c\+\+` ended without an error.* set CC or CXX to a"
    with compiler_that(ODD[kind]), pytest.raises(CompileError, match=says):
        build(SEVEN)
    assert written(build(SEVEN)) == 7


def test_a_compiler_that_says_nothing_is_named(build, compiler_that, tmp_path):
    silent = compiler_that('[ "$1" = --version ] || exit 1')
    with silent, pytest.raises(CompileError, match=rf"`{tmp_path}/c\+\+` printed nothing"):
        build(K)


def test_a_compiler_that_cannot_run_is_named(build, tmp_path):
    odd = tmp_path / "odd"
    odd.write_text("no program")
    odd.chmod(0o755)
    says = rf"`{odd}` cannot be run: .* set CC or CXX"
    with config.using(cxx=str(odd)), pytest.raises(CompileError, match=says):
        build(K)


@pytest.mark.long
def test_of_endless_output_the_first_errors_are_kept(build, compiler_that):
    shout = "yes 'k.cpp:1:1: error: no' | head -c 3000000; head -c 3000000 /dev/zero | tr '\\0' x"
    shouting = compiler_that(f'[ "$1" = --version ] || {{ {shout}; exit 1; }}')
    with shouting, pytest.raises(CompileError, match=r"k\.cpp:1:1: error: no") as caught:
        build(K)
    assert len(str(caught.value)) < 10_000 and len(caught.value.log) < 1 << 20


CALL = 'extern "C" int thing(void); extern "C" void k(int* x) { *x = thing(); }'


def test_what_the_linker_finds_by_a_name_is_refused(build, thing):
    with pytest.raises(CompileError, match=r"opened .*libthing\.a, which .* whole path in flags"):
        build(CALL, flags=[f"-L{thing}", "-lthing"])


@pytest.mark.long
def test_an_archive_that_a_flag_names_by_its_path_is_in_the_key(build, thing):
    flags = [f"{thing}/libthing.a"]
    first = build(CALL, flags=flags)
    (thing / "f.c").write_text("int thing(void) { return 2; }")
    subprocess.run(["cc", "-fPIC", "-c", "f.c"], cwd=thing, check=True)
    subprocess.run(["ar", "rcs", "libthing.a", "f.o"], cwd=thing, check=True)
    assert build(CALL, flags=flags).path != first.path


def test_what_a_compiler_links_by_itself_is_its_own(build, thing, compiler_that):
    with compiler_that(f'set -- "$@" {thing}/libthing.a'):
        assert build(K)


def test_libraries_of_the_system_may_be_linked(build):
    assert build(K, flags=["-lm", "-static-libgcc"])


@pytest.mark.parametrize("read", ['.inc" "bin', '.incl" "ude'])
def test_what_the_assembler_reads_is_refused(build, tmp_path, read):
    (tmp_path / "data").write_text("# 1\n")
    head = f'#define FILE "{tmp_path}/data"\n'
    with pytest.raises(CompileError, match=f"opened {tmp_path}/data, which the cache key does not"):
        build(head + ASM % (read, tmp_path / "data"))


def test_linker_flags_are_refused_where_files_cannot_be_known(build, compiler_that):
    refusal = "unrecognized option --dependency-file"
    with compiler_that(f'case "$*" in *dependency-file*) echo "{refusal}"; exit 1;; esac'):
        assert build(K)
        with pytest.raises(CompileError, match="`-lm` may have the linker read files"):
            build(K, flags=["-lm"])


UNKEYED = [
    ('#define D "/data"\nasm(".incbin " D);', [], "k.cpp has `.incbin`, which .*: write out what"),
    ("", ["-fprofile-use=/x"], "the flag `-fprofile-use=/x` reads .*a profile of an earlier run"),
    ("", ["@/x"], "the flag `@/x` reads .*flags in a file: write them out"),
    ("", ["-flto"], "the flag `-flto` reads .*leave it out"),
]


@pytest.mark.parametrize(("text", "flags", "says"), UNKEYED)
def test_what_no_key_covers_is_refused_before_a_compiler_runs(build, text, flags, says):
    with config.using(cxx="/no/compiler"), pytest.raises(DeclarationError, match=says):
        build(f"{text}\n{K}", flags=flags)
    assert build(K, flags=["-fprofile-generate"])


def test_a_precompiled_header_is_refused(build):
    (build.folder / "v.h").write_text("")
    (build.folder / "v.h.gch").write_text("")
    with pytest.raises(CompileError, match=r"v\.h\.gch, .* precompiled header, .*: delete it"):
        build('#include "v.h"\nextern "C" void k(int* x) {}')


def test_no_compiler_says_what_to_install(build):
    missing = config.using(cxx="no-such-compiler")
    with missing, pytest.raises(CompilerNotFound, match=r"apt-get install g\+\+") as caught:
        build(K)
    assert caught.value.remedy


def test_a_foreign_platform_is_refused(build):
    target = Target.parse("cpu-riscv64-torch2.13.0-linux_riscv64")
    with pytest.raises(TargetError, match="host code is built on its own platform"):
        build(K, target=target)


def test_flags_reach_the_compiler_and_its_log_stays(build):
    entry = build(f"#if !FAST\n#error\n#endif\n{K}", flags=["-DFAST=1"])
    log = (entry.path / "compile.log").read_text()
    assert log.startswith(f"$ {config.current().cxx} -O3")


@pytest.mark.parametrize("name", ["größe", "k" * 300], ids=["not ASCII", "long"])
def test_an_entry_is_found_again_whatever_its_kernel_is_called(build, name):
    text = f'extern "C" void {name}(float* x) {{ *x = 3; }}'
    build(text, function=name)
    with config.using(compile="never"):
        assert build(text, function=name).manifest.meta["parameters"] == ["*f32"]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("clang++"), reason="needs clang")
def test_clang_compiles(build):
    with config.using(cc="clang", cxx="clang++"):
        entry = build('extern "C" void k(int *x) { *x = 3; }')
        assert "clang" in entry.manifest.compiler["version"] and written(entry) == 3


def test_generated_code_brings_its_compilers_helpers():
    """They are atomic operations on aarch64, and divisions of 128 bits everywhere."""
    text = "__int128 divided(__int128 a, __int128 b) { return a / b; }"
    entry = jit.ensure(Variant("test::k", Generated("stub.c", text=text)), Target.current("cpu"))
    command = ["nm", "-D", "-u", entry.path / entry.manifest.meta["artifact"]]
    assert not subprocess.run(command, capture_output=True, check=True).stdout
