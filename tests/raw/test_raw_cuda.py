"""CUDA kernels from elsewhere, as they are: by path and name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import H100, needs_nvrtc_13, target_of, waiting_gpu

import jitkern
from jitkern import config
from jitkern.compilers.cuda import toolkit
from jitkern.errors import CompileError, DeclarationError, LaunchError, NotCached, TargetError
from jitkern.source import cpp_text

TEACHING = Path(__file__).parent / "teaching"
FILES = [  # file, kernel, template arguments, parameters
    ("vecadd.cu", "vecadd", (), ["*f32", "*f32", "*f32", "i32"]),
    ("managed.cu", "saxpy", (), ["i32", "f32", "*f32", "*f32"]),
    ("samples.cu", "reduce", (torch.float32, 256), ["*f32", "*f32", "u32"]),
    ("matrix.cu", "weighted", (), ["*f32", "*f32", "i64"]),
    ("containers.cu", "twice(double*, int)", (), ["*f64", "i32"]),
    ("groups.cu", "sum", (), ["*f32", "*f16", "i32"]),
]
ids = [file for file, *_ in FILES]


@pytest.mark.long
@needs_nvrtc_13
@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize(("file", "name", "template", "parameters"), FILES, ids=ids)
def test_a_teaching_file_with_a_guard_compiles_without_nvcc(file, name, template, parameters):
    k = jitkern.cuda_kernel(f"teaching/{file}", name, template=template)
    entry = k.compile(H100)
    assert entry.manifest.meta["parameters"] == parameters
    assert entry.manifest.compiler["name"] == "nvrtc"
    assert k.compile(H100).path == entry.path  # and again from the cache


@needs_nvrtc_13
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_a_kernel_compiles_for_any_arch(arch):
    k = jitkern.cuda_kernel(TEACHING / "vecadd.cu", "vecadd")
    entry = k.compile(target_of(arch))
    assert entry.path.parent.name == target_of(arch)
    assert entry.path.name.startswith("raw.vecadd-")


SCANNED = r"""
#define HD __host__ __device__
#define HD2 HD inline
namespace a { namespace b::c {
template <typename T, int N = (3 > 2), template <typename> class X = Y>
__global__ void __launch_bounds__(128, 2) k(T* o, const T (&x)[N]) { if (o) { *o = '}'; } }
}}
extern "C" { __global__ void in_block(float* x, int n) { const char* s = "{"; } }
extern "C" __global__ void alone(float* x) noexcept {}
HD2 float both(float x) { return x; }
LIB_DEVICE int of_a_library() { return 1; }
constexpr int constant(int x) { return x; }
const int SIZE = 256;
const char* names[] = {"a", "b"};
struct Matrix : Base { int w;
  Matrix(int n) : w(n), e{nullptr} { fill(e); }
  __host__ __device__ float get(int i) const { return e[i]; }
  Matrix& operator=(const Matrix& o) { w = o.w; return *this; }
};
struct Shape { virtual int corners() { return 1; } __device__ int f(); };
typedef float (*Function)(float, int);
struct Host { std::string name; __device__ int f(); };
struct Matrix make(int n) { return Matrix(n); }
typedef struct __align__(16) { int x, y; } Pair;
auto fn = [](int x) { return x; };
template <typename T> void launch(T* x) { k<T><<<1, 2>>>(x); }
template void launch<float>(float*);
using V = std::vector<int>;
using S = std::size_t;
namespace cg = cooperative_groups;
__device__ int counter = 0;  // } {
auto text = R"x({ ) " ) { )x";
int main(int argc, char** argv) {
#ifdef X
  printf("%d }\n", 1'000);
#endif
  k<<<1, 1>>>(0); }
"""


def test_functions_are_read_from_text():
    found = {f.name: f for f in cpp_text.functions_in(SCANNED)}
    assert found["a::b::c::k"].template == ("T", "N", "X")
    assert found["a::b::c::k"].parameters == "T* o, const T (&x)[N]"
    assert [f.display_name for f in cpp_text.kernels_in(SCANNED)] == [
        "a::b::c::k<T, N, X>", "in_block", "alone",
    ]  # fmt: skip
    assert found["main"].defined and found["make"].template is None
    assert cpp_text.functions_in("void f() { { }") == []


def test_a_missing_file_tells_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeclarationError) as caught:
        jitkern.cuda_kernel("nothing.cu", "k")
    assert str(caught.value) == (
        f"there is no file {Path(__file__).parent}/nothing.cu or {tmp_path}/nothing.cu"
    )


def test_a_path_starts_at_the_callers_folder(file, monkeypatch):
    path = file("__global__ void k(float* x) {}")
    monkeypatch.chdir(path.parent)
    assert jitkern.cuda_kernel("k.cu", "k").source.folder == str(path.parent)
    assert jitkern.cuda_kernel("teaching/vecadd.cu", "vecadd").source.folder == str(TEACHING)


@pytest.mark.parametrize("name", ["nothing", "main", "scale<float>"])
def test_a_missing_kernel_lists_what_there_is(name):
    says = rf"vecadd\.cu has no `__global__` function `{name}`; it has: vecadd"
    with pytest.raises(DeclarationError, match=says):
        jitkern.cuda_kernel("teaching/vecadd.cu", name)


def test_a_name_in_several_namespaces_must_be_qualified(file):
    path = file("".join(f"namespace {n} {{ __global__ void k(int* x) {{}} }}\n" for n in "ab"))
    with pytest.raises(DeclarationError, match=r"several `__global__` functions `k`: a::k, b::k"):
        jitkern.cuda_kernel(path, "k")
    assert jitkern.cuda_kernel(path, "b::k").function == "b::k"


@needs_nvrtc_13
def test_names_of_all_kinds_are_found(file):
    path = file(
        "#define MAKE(n) __global__ void n(double* x) {}\nMAKE(made)\n"
        'extern "C" __global__ void plain(int* x) {}\n'
        "namespace a { template <typename T> __global__ void k(T* x) {} }\n"
    )
    parameters = {"made": "*f64", "plain": "*i32", "k<float>": "*f32", "a::k<short>": "*i16"}
    for name, code in parameters.items():
        entry = jitkern.cuda_kernel(path, name).compile(H100)
        assert entry.manifest.meta["parameters"] == [code]


PASTED = """
#define DEFINE_OP(name, op) \\
  __global__ void name##_kernel(float* a, int n) { a[0] = a[0] op n; }
DEFINE_OP(add, +)
DEFINE_OP(mul, *)
#ifndef __CUDACC_RTC__
int main() { add_kernel<<<1, 1>>>(0, 1); }
#endif
"""


@needs_nvrtc_13
@pytest.mark.usefixtures("no_nvcc")
def test_a_macro_may_make_a_name(file):
    for text in (PASTED, PASTED.replace("\n", "\r\n")):
        k = jitkern.cuda_kernel(file(text), "mul_kernel")
        assert k.compile(H100).manifest.meta["parameters"] == ["*f32", "i32"]
    with pytest.raises(CompileError, match="no function `div_kernel`; it has: none outside of mac"):
        jitkern.cuda_kernel(file(PASTED), "div_kernel").compile(H100)
    with pytest.raises(DeclarationError, match="no `__global__` function `main`"):
        jitkern.cuda_kernel(file(PASTED), "main")


def test_a_macro_may_make_the_name_of_a_cpp_function(file):
    text = "#define OP(n, op) void n##_op(float* x, float y) { *x = *x op y; }\nOP(add, +)\nOP(mul, *)\n"
    x = torch.ones(1)
    jitkern.cpp_kernel(file(text, "k.cpp"), "add_op")(x, 2.0)
    assert x.item() == 3
    with pytest.raises(CompileError, match="no function `sub_op`; it has: none outside of macros"):
        jitkern.cpp_kernel(file(text, "k.cpp"), "sub_op").compile()


HOSTS = [  # what only the host uses, and a compiler for devices takes
    "class Base { public: virtual ~Base() = default; virtual void run() = 0; };",
    "struct { int n; float dt; } params;",
    "enum Color { RED, GREEN } color = RED;",
    "struct Tmp { int a; } tmp = {3};",
    "#define MAKE(n) __global__ void n(double* x) { *x = 1; }\nMAKE(made)\nint f() { return 1; }",
    "#include <vector>\n#include <fstream>",
]


@needs_nvrtc_13
@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize("host", HOSTS)
def test_what_no_kernel_uses_does_not_matter(file, host):
    path = file(f"#include <stdio.h>\n{host}\n__global__ void k(float* x) {{}}\nint main() {{}}\n")
    assert jitkern.cuda_kernel(path, "k").compile(H100).manifest.compiler["name"] == "nvrtc"


@pytest.mark.long
@needs_nvrtc_13
@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize("header", ["", "#include <cooperative_groups/reduce.h>\n"])
def test_int64_is_long_as_on_linux_except_to_libcuxx(file, header):
    text = f"#include <cstdint>\n#include <cstdio>\n{header}__global__ void k(int64_t* x) {{}}\nint main() {{}}"
    entry = jitkern.cuda_kernel(file(text), "k").compile(H100)
    assert entry.manifest.meta["symbol"] == ("_Z1kPx" if header else "_Z1kPl")


TEMPLATE = "template <typename T, int N> {} void k(T* x) {{ *x = N; }}"


@pytest.mark.long
@needs_nvrtc_13
@pytest.mark.parametrize("nvcc", [True, False])
def test_template_arguments_that_are_missing_are_asked_for(file, monkeypatch, nvcc):
    if not nvcc:
        monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    says = "`k` is a template of <T, N>: name all of them, as "
    text = TEMPLATE.format("__global__")
    for head in ("", "#include <stdio.h>\n"):
        with pytest.raises(CompileError, match=says):
            jitkern.cuda_kernel(file(head + text), "k").compile(H100)
    with pytest.raises(CompileError, match=says):
        jitkern.cpp_kernel(file(TEMPLATE.format(""), "k.cpp"), "k").compile()


@pytest.mark.long
def test_a_function_beside_one_of_the_library_is_to_be_spelled(file):
    text = "#include <cmath>\nvoid exp(float* x, int n) { *x = n; }"
    with pytest.raises(CompileError, match=r"is overloaded; name one: `exp\(float\* x, int n\)`"):
        jitkern.cpp_kernel(file(text, "k.cpp"), "exp").compile()


@needs_nvrtc_13
@pytest.mark.parametrize(
    "macro",
    [
        "#define G __global__",
        '#define G extern "C" __global__',
        "#ifdef __CUDACC__\n#define G __global__\n#else\n#define G \n#endif",
        "#define MARK __global__\n#define G static MARK",
        '#include "defs.h"',
    ],
)
def test_a_macro_may_stand_for_global(file, macro):
    file("#define G __global__\n", "defs.h")
    path = file(f"{macro}\nG void k(float* x) {{}}\nvoid host(float* x) {{}}\n")
    k = jitkern.cuda_kernel(path, "k")
    assert k.compile(H100).manifest.meta["parameters"] == ["*f32"]
    with pytest.raises(DeclarationError, match="no `__global__` function `host`; it has: k"):
        jitkern.cuda_kernel(path, "host")


def test_template_arguments_in_order_or_by_name(file):
    path = file("template <typename T, int N> __global__ void k(T* x) {}")
    k = jitkern.cuda_kernel(path, "k")
    variants = [
        k[torch.float16, 4].variant,
        k[{"T": torch.float16, "N": 4}].variant,
        jitkern.cuda_kernel(path, "k", template=(torch.float16, 4)).variant,
    ]
    assert {variant.template for variant in variants} == {(("T", "f16"), ("N", 4))}
    assert k[torch.float16].variant.template == (("T", "f16"),)
    with pytest.raises(LaunchError, match=r"has 2 template parameters \(T, N\), got 3"):
        k[1, 2, 3]


@needs_nvrtc_13
def test_flags_includes_and_edits_are_in_the_key(file, tmp_path):
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "value.h").write_text("#define VALUE 1\n")
    path = file("#include <value.h>\n__global__ void k(int* x) { *x = VALUE + MORE; }")

    def entry(more):
        k = jitkern.cuda_kernel(path, "k", include=["roots"], flags=[f"-DMORE={more}"])
        return k.compile(H100).path

    first, second = entry(1), entry(2)
    (tmp_path / "roots" / "value.h").write_text("#define VALUE 3\n")
    assert len({first, second, entry(1)}) == 3


def test_without_a_gpu_and_a_target_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(TargetError):
        jitkern.cuda_kernel("teaching/vecadd.cu", "vecadd").compile()


def test_what_is_not_cached_names_the_compile_method():
    k = jitkern.cuda_kernel("teaching/vecadd.cu", "vecadd")
    with config.using(compile="never"), pytest.raises(NotCached, match="its `compile` method"):
        k.compile(H100)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
def test_vecadd_of_ten_floats_runs(offset):
    k = jitkern.cuda_kernel("teaching/vecadd.cu", "vecadd")
    a, b = (torch.randn(10 + offset, device="cuda")[offset:] for _ in range(2))
    c = torch.zeros(10, device="cuda")
    for _ in range(2):
        k(a, b, c, 10, grid=1, block=10)
    assert torch.equal(c, a + b)


@pytest.mark.gpu
def test_kernels_of_teaching_files_run():
    x = torch.rand(1024, device="cuda")
    sums = torch.zeros(4, device="cuda")
    reduce = jitkern.cuda_kernel("teaching/samples.cu", "reduce")
    reduce[x.dtype, 256](x, sums, 1024, grid=4, block=256, smem=1024)
    torch.testing.assert_close(sums, x.view(4, 256).sum(1))
    y = torch.ones(1024, device="cuda")
    jitkern.cuda_kernel("teaching/managed.cu", "saxpy")(1024, 2.0, x, y, grid=4, block=256)
    torch.testing.assert_close(y, 2 * x + 1)
    half, total = x.half(), torch.zeros(1, device="cuda")
    jitkern.cuda_kernel("teaching/groups.cu", "sum")(total, half, 1024, grid=1, block=32)
    torch.testing.assert_close(total[0], half.float().square().sum())
    d = torch.ones(8, dtype=torch.float64, device="cuda")
    jitkern.cuda_kernel("teaching/containers.cu", "twice(double*, int)")(d, 8, grid=1, block=8)
    assert d.tolist() == [2] * 8


@pytest.mark.gpu
def test_a_kernel_runs_on_the_current_stream():
    k = jitkern.cuda_kernel("teaching/vecadd.cu", "vecadd")
    a = torch.ones(10, device="cuda")
    c = torch.zeros(10, device="cuda")
    k(a, a, c, 10, grid=1, block=10)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), waiting_gpu():
        k(a, c, c, 10, grid=1, block=10)
        assert not stream.query()
    assert c.tolist() == [3] * 10


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 2**31}, r"argument 4 \(`int n`\) must be an integer that fits i32"),
        ({"n": 1.0}, r"argument 4 \(`int n`\) must be i32, got float"),
        ({"a": torch.zeros(10)}, r"argument 1 \(`.*`\) must be a tensor on cuda:0, got one on cpu"),
        ({"a": torch.zeros(10).double()}, r"argument 1 \(`.*`\) must be"),
        ({"grid": None}, "`grid` must be one to three sizes"),
    ],
)
def test_wrong_launches_are_refused(change, says):
    k = jitkern.cuda_kernel("teaching/vecadd.cu", "vecadd")
    x = torch.zeros(10, device="cuda")
    given = {"a": x, "n": 10, "grid": 1, **change}
    with pytest.raises(LaunchError, match=says):
        k(given["a"], x, x, given["n"], grid=given["grid"], block=10)
