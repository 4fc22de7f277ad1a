"""The real NVRTC, which needs no GPU."""

import sys
import types
from pathlib import Path

import pytest
from helpers import assert_refused, needs_nvrtc_13

import jitkern.ops
from jitkern import config, jit
from jitkern.compilers import compiler_for
from jitkern.compilers.cuda import nvrtc_api, ptx, stand_ins, toolkit
from jitkern.compilers.cuda.nvrtc_api import NvrtcProgram
from jitkern.errors import CompileError, CompilerNotFound, TargetError
from jitkern.source.kinds import Cuda, Include, Variant
from jitkern.target import Target

TARGET = Target.parse("cuda-sm_90-cu130-torch2.11.0")
KERNELS = Path(jitkern.ops.softmax.sources["cuda"][0].folder).parent

pytestmark = needs_nvrtc_13
needs_nvcc = pytest.mark.skipif(toolkit.nvcc() is None, reason="needs nvcc")
each_nvcc = pytest.mark.parametrize(
    "nvcc", [None, pytest.param(toolkit.nvcc(), marks=needs_nvcc)], ids=["no nvcc", "nvcc"]
)
OF_F32 = (("T", "f32"),)
K = "__global__ void k(float* o) { *o = 1; }"


@pytest.fixture
def build(tmp_path):
    folder = tmp_path / "kernels" / "k"
    folder.mkdir(parents=True)

    def run(text=K, function="k", template=(), target=TARGET, **options):
        """Compile a text, or where it is bytes, a file of these."""
        raw = text if isinstance(text, bytes) else text.encode()
        (folder / "k.cu").write_bytes(raw)
        source = Cuda("k.cu", folder=str(folder), **options)
        return jit.ensure(Variant("test::k", source, function, template), target)

    run.folder = folder
    return run


@pytest.fixture
def no_nvcc(monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)


def parameters(entry):
    return entry.manifest.meta["parameters"]


def compiler(entry):
    return entry.manifest.compiler["name"]


PARAMETERS = {
    "extern C": (
        'extern "C" __global__ void k(float* o, const double* x, long long n, int i, unsigned u, float s, bool b, char c, float2* v) {}',
        ["*f32", "*f64", "i64", "i32", "u32", "f32", "bool", "i8", "*"],
    ),
    "arrays and pointers to pointers": (
        """#include <cuda_fp16.h>
        template <typename T> struct Pair { T a, b; };
        __global__ void k(Pair<Pair<int*>> p, Pair<int*>* q, float a[4][4], const double b[2][3][4], float** c,
                          const int* const* d, volatile float* e, __half h, void (*f)(int), float* (*g)[2]) {}""",
        ["", "*", "*f32", "*f64", "*i64", "*i64", "*f32", "", "", "*i64"],
    ),
    "static": ("static __global__ void k(int* o) { *o = 1; }", ["*i32"]),
    "a struct by value": (
        "struct S { int a[4]; };\n__global__ void k(S s, int* o) {}",
        ["", "*i32"],
    ),
    "short names": ("__global__ void k(uint* a, ushort* b, ulong c) {}", ["*u32", "*u16", "u64"]),
    "short names that a header has": (
        "#include <sys/types.h>\n__global__ void k(uint* a, ushort* b, ulong c) {}",
        ["*u32", "*u16", "u64"],
    ),
}


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_are_read(build, case):
    text, codes = PARAMETERS[case]
    assert parameters(build(text)) == codes


def test_an_extern_c_kernel_keeps_its_name(build):
    entry = build('extern "C" __global__ void k() {}')
    assert entry.manifest.meta["symbol"] == "k"
    assert entry.read("kernel.cubin")[:4] == b"\x7fELF"


def test_a_header_found_from_the_current_directory_is_refused(build, tmp_path, monkeypatch):
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "v.h").write_text("#define V 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=f"opened {tmp_path}/inc/v.h, which the cache key does"):
        build("#include <v.h>\n__global__ void k(int* o) { *o = V; }", flags=["-Iinc"])


@pytest.mark.usefixtures("no_nvcc")
def test_a_failure_leaves_nvrtc_as_it_was(build, tmp_path, monkeypatch):
    """A trace that a failure leaves open is written by the next compile, as `.json`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match="undefined"):
        build("__global__ void k(int* o) { *o = nowhere; }")
    before = {*tmp_path.iterdir()}
    nvrtc_api.compile_nothing(toolkit.nvrtc_for(TARGET))  # as another library would
    assert {*tmp_path.iterdir()} == before


def test_template_arguments_go_by_name(build):
    text = "template <int N, typename T = float, bool FLAG = false>\n__global__ void k(T* o, long n) { if (FLAG) o[n] = N; }"
    entry = build(text, template=(("T", "f64"), ("N", 3)))
    assert parameters(entry) == ["*f64", "i64"]
    assert "ILi3Ed" in entry.manifest.meta["symbol"]


def test_the_order_of_template_parameters_is_that_of_the_header(build):
    (build.folder / "k.h").write_text("template <int M, int N> __global__ void k(int* x) {}")
    entry = build('#include "k.h"', template=(("N", 2), ("M", 1)))
    assert "ILi1ELi2EE" in entry.manifest.meta["symbol"]


def test_where_the_order_is_unknown_the_arguments_go_by_number(build):
    text = "#define KERNEL(n) template <int M, int N> __global__ void n(int* x) {}\nKERNEL(k)"
    says = "cannot find its template declaration; pass .* by position"
    with pytest.raises(CompileError, match=says):
        build(text, template=(("N", 2), ("M", 1)))
    entry = build(text, template=(("0", 1), ("1", 2)))
    assert "ILi1ELi2EE" in entry.manifest.meta["symbol"]


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("f16", "*f16"), ("bf16", "*bf16"), ("i8", "*i8"), ("u8", "*u8"), ("bool", "*bool")],
)
def test_dtypes_become_cuda_types(build, dtype, code):
    text = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\ntemplate <typename T> __global__ void k(T* o) {}"
    assert parameters(build(text, template=(("T", dtype),))) == [code]


@pytest.mark.long
def test_a_kernel_may_lie_in_a_namespace_and_have_launch_bounds(build):
    plain = build("namespace a { __global__ void k(int* o) {} }", function="a::k")
    assert parameters(plain) == ["*i32"]
    text = "namespace a { template <typename T> __global__ void __launch_bounds__(128) k(T* o) {} }"
    assert parameters(build(text, function="a::k", template=OF_F32)) == ["*f32"]


def test_local_headers_and_roots(build, tmp_path):
    (build.folder / "near.cuh").write_text("#define A 1\n")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "far.cuh").write_text("#define B 2\n")
    text = '#include "near.cuh"\n#include <far.cuh>\n__global__ void k(int* o) { *o = A + B; }'
    one = build(text, include=[str(tmp_path / "far")])
    assert any("far.cuh" in label for label in one.manifest.inputs["source"]["closure"])
    two = build(text, include=[Include(str(tmp_path / "far"), version="1.0")])
    assert two.manifest.inputs["source"]["versions"] == {"far": "1.0"}


def test_cccl_and_cooperative_groups(build):
    assert build("#include <cuda/std/cstdint>\n__global__ void k(cuda::std::int32_t* o) {}")


def test_same_bytes_from_another_place(build, tmp_path):
    text = "#include <cuda_fp16.h>\n__global__ void k(__half* o) { *o = __float2half(1); }"
    first = build(text)
    moved = tmp_path / "moved" / "k"
    moved.mkdir(parents=True)
    (moved / "k.cu").write_text(text)
    with config.using(cache_dir=tmp_path / "other"):
        second = jit.ensure(Variant("test::k", Cuda("k.cu", folder=str(moved)), "k"), TARGET)
    assert first.path.name == second.path.name
    assert first.read("kernel.cubin") == second.read("kernel.cubin")


def test_the_arch_is_exact(build):
    text = "__global__ void k(int* o) {\n#if __CUDA_ARCH__ != 800\n#error\n#endif\n}"
    assert build(text, target=TARGET._replace(arch="sm_80"))


TEMPLATE = "template <typename T, int N = 4, bool B = false> __global__ void k(T* o) {}"
ARCH_FLAG = "remove the arch flag: the target sets it"
REFUSED = {
    "a syntax error": ("__global__ void k(int* o) {\n  *o = ;\n}", {}, rf"`k` of test::k for {TARGET}: .*kernels/k/k\.cu\(2\): error: "),
    "a macro that is not defined": ("__global__ void k(int* o) { *o = BLOCK; }", {}, r'k\.cu\(1\): error: identifier "BLOCK" is undefined'),
    "a missing kernel": (K, {"function": "other"}, r"has no function `other`; it has: k"),
    "a gap in template arguments": (TEMPLATE, {"template": (*OF_F32, ("B", True))}, "template of <T, N, B>: give `N` too"),
    "a wrong template name": (TEMPLATE, {"template": (("U", "f32"),)}, r"no template parameter `U`; it has: T, N, B"),
    "a template argument of no template": (K, {"template": OF_F32}, r"no template parameter `T`; it has: none"),
    "an arch of -gencode": (K, {"flags": ("-gencode=arch=compute_80,code=sm_80",)}, ARCH_FLAG),
    "an arch": (K, {"flags": ("-arch=sm_80",)}, ARCH_FLAG),
    "an arch as the next word": (K, {"flags": ("-arch", "sm_80")}, ARCH_FLAG),
    "code that a linker completes": (K, {"flags": ("-dlto",)}, r"its flags \['-dlto'\] NVRTC .* remove that flag"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_compiled_is_refused_with_its_reason(build, case):
    assert_refused(build, *REFUSED[case])


@pytest.mark.parametrize(
    ("of_target", "says"),
    [
        ({"arch": "sm_70"}, r"cannot build for cuda-sm_70-.*sm_90"),
        ({"cuda": "128"}, r'pip install "cuda-toolkit\[nvrtc\]=='),
        ({"cuda": "140"}, r'pip install "cuda-toolkit\[nvrtc\]=='),
    ],
    ids=str,
)
def test_a_target_that_nvrtc_does_not_know_is_refused(build, of_target, says):
    with pytest.raises(TargetError, match=says):
        build(target=TARGET._replace(**of_target))


@each_nvcc
def test_a_function_that_is_no_kernel_lacks_a_word(build, monkeypatch, nvcc):
    monkeypatch.setattr(toolkit, "nvcc", lambda: nvcc)
    with pytest.raises(CompileError, match=r"k\.cu:2: `k` in .* write `__global__` before"):
        build("#include <vector>\nvoid k(int* o) {}")


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ({(12, 9), (13, 0), (13, 2), (13, 5)}, (13, 2)),
        ({(12, 9), (13, 0), (13, 5)}, (13, 0)),
        ({(13, 4), (13, 5), (14, 0)}, (13, 4)),
    ],
)
def test_the_nvrtc_nearest_to_the_target_builds(monkeypatch, installed, chosen):
    monkeypatch.setattr(toolkit, "nvrtc_libraries", lambda: {v: ("path", v) for v in installed})
    assert toolkit.nvrtc_for(Target.parse("cuda-sm_90-cu132-torch2.15.0")) == chosen


def test_an_nvrtc_without_a_usable_trace_is_refused(monkeypatch):
    monkeypatch.setattr(toolkit, "nvrtc_libraries", lambda: {(12, 6): ("path", None)})
    with pytest.raises(TargetError, match=r'12.6 cannot .* "cuda-toolkit\[nvrtc\]==12.8.\*"'):
        toolkit.nvrtc_for(Target.parse("cuda-sm_90-cu126-torch2.11.0"))


@pytest.mark.parametrize(
    ("version", "added"),
    [((12, 8), ["-default-device"]), ((12, 9), ["--no-cache", "-default-device"]), ((13, 0), ["--no-cache"])],
)  # fmt: skip
def test_each_nvrtc_gets_the_options_that_it_knows(monkeypatch, version, added):
    """A cache of NVRTC's own would call cuInit; NVRTC 12 takes lambdas for host functions."""
    library = types.SimpleNamespace(got=[])
    library.nvrtcCreateProgram = lambda *arguments: 0
    library.nvrtcCompileProgram = lambda handle, count, options: library.got.extend(options)
    monkeypatch.setattr(nvrtc_api, "version", lambda library: version)
    monkeypatch.setattr(NvrtcProgram, "text", lambda program, output: "")
    given = ["-include", "a.h", "-include", "b.h"]
    NvrtcProgram(library, "", "k.cu", (), {}).compile(given)
    assert library.got == [option.encode() for option in (*given, *added)]


@pytest.mark.parametrize("version", [v for v in toolkit.nvrtc_libraries() if v[0] == 12])
def test_generic_lambdas_of_kernels_are_taken_by_nvrtc_12(build, version):
    text = """__global__ void k(float* o) {
  const auto twice = [&](auto value) { return 2 * value; };
  *o = twice(*o);
}"""
    target = TARGET._replace(cuda="{}{}".format(*version))
    assert parameters(build(text, target=target)) == ["*f32"]


def test_shipped_kernels_take_nothing_from_the_standard_library():
    """NVRTC 12 has none of it; `types.cuh` has what they need."""
    files = [*KERNELS.glob("*/*.cu"), *KERNELS.glob("*/*.cuh")]
    texts = {f.name: f.read_text() for f in files if "_extension" not in f.name}
    assert texts and not [name for name, text in texts.items() if "std::" in text]


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_headers_are_those_of_the_major_version_of_the_target(build, tmp_path, monkeypatch, cuda):
    """Wheels of CUDA 12 and 13 side by side, and a toolkit."""
    site, home = tmp_path / "site", tmp_path / "home"
    wheels = {"13": ["cu13"], "12": ["cuda_cccl", "cuda_runtime"]}
    for name in sum(wheels.values(), []):
        (site / "nvidia" / name / "include").mkdir(parents=True)
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
    monkeypatch.setattr(toolkit, "wheel_prefixes", toolkit.wheel_prefixes.__wrapped__)
    monkeypatch.setattr(toolkit, "cuda_homes", lambda: [home])
    monkeypatch.setattr(sys, "path", [str(site)])
    wanted = [site / "nvidia" / name / "include" for name in wheels[cuda]]
    wanted += [home / "include"] if cuda == "12" else []
    assert toolkit.include_directories(int(cuda)) == wanted
    assert toolkit.headers_version(home) == (12, 8)


def test_no_nvrtc_says_what_to_install(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvrtc_libraries", dict)
    with pytest.raises(CompilerNotFound, match="pip install"):
        build()


TEACHING = """#include <cstdio>
#include <cuda_runtime.h>
template <typename T> __global__ void k(T* o, int n) { if (threadIdx.x < n) o[threadIdx.x] = T(1); }
int main() { float* d; cudaMalloc(&d, 40); k<double><<<1, 10>>>((double*)d, 10); k<float><<<1, 10>>>(d, 10); printf("done\\n"); }
"""
GUARDED = TEACHING.replace("int main", "#ifndef __CUDACC_RTC__\nint main") + "#endif\n"


@pytest.mark.usefixtures("no_nvcc")
def test_host_code_in_a_guard_needs_no_nvcc(build):
    entry = build(GUARDED, template=OF_F32)
    assert (compiler(entry), parameters(entry)) == ("nvrtc", ["*f32", "i32"])


@pytest.mark.usefixtures("no_nvcc")
def test_host_code_with_neither_a_guard_nor_nvcc_is_told_of(build):
    says = (
        r'(?s)k\.cu\(4\): error: identifier "cudaMalloc" is undefined'
        ".*Guard what only the host needs with `#ifndef __CUDACC_RTC__`, or install nvcc: pip"
    )
    with pytest.raises(CompileError, match=says):
        build(TEACHING, template=OF_F32)


@pytest.mark.long
@needs_nvcc
def test_host_code_without_a_guard_goes_to_nvcc(build):
    entry = build(TEACHING, template=OF_F32)
    assert (compiler(entry), parameters(entry)) == ("nvcc", ["*f32", "i32"])


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize(
    "helper",
    ["constexpr int f(int x) { return 2 * x; }", "int f(int x) { return 2 * x; }",
     "struct S { int v; S(int x) : v(x) {} }; constexpr int f(int x) { return S(x).v; }",
     "auto f = [](int x) { return x; };"],
)  # fmt: skip
def test_a_helper_without_a_mark_is_compiled_for_the_device(build, helper):
    entry = build(f"#include <stdio.h>\n{helper}\n__global__ void k(int* o) {{ *o = f(*o); }}")
    assert compiler(entry) == "nvrtc"


# The kernel uses what only the host's headers have.
HOSTED = """#include <limits>
#include <cstdio>
template <typename T> __global__ void k(T* o) { *o = std::numeric_limits<T>::digits; }
int main() { printf("done\\n"); }
"""


@pytest.mark.long
@needs_nvcc
def test_a_kernel_that_needs_host_headers_goes_to_nvcc(build):
    entry = build(HOSTED, template=OF_F32)
    assert (compiler(entry), parameters(entry)) == ("nvcc", ["*f32"])
    assert entry.manifest.meta["symbol"].startswith("_Z1kIf")


@pytest.mark.parametrize(("nvcc", "install"), [(None, "nvcc"), (("nvcc", (12, 8)), "another nvcc")])
def test_a_kernel_that_needs_host_headers_and_no_nvcc_says_so(build, monkeypatch, nvcc, install):
    monkeypatch.setattr(toolkit, "nvcc", lambda: nvcc)
    with pytest.raises(CompileError) as caught:
        build(HOSTED, template=OF_F32)
    assert 'k.cu(3): error: namespace "std" has no member "numeric_limits"' in str(caught.value)
    command = 'pip install "cuda-toolkit[nvcc,nvvm,crt,cudart]==13.0.*"'
    assert f"install {install}: {command}" in str(caught.value)


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize(
    ("header", "says"),
    [("strange.h", r".*install nvcc: pip"), ("c10/util/Half.h", ": .*nvcc"), ("mylib/x.h", ": declare ")],
)  # fmt: skip
def test_an_unknown_header_and_no_nvcc_says_so(build, header, says):
    with pytest.raises(CompileError, match=rf"<{header}> is in no include root{says}"):
        build(f"#include <{header}>\n{K}")


@needs_nvcc
def test_an_unknown_header_is_to_be_declared(build):
    with pytest.raises(CompileError, match=r"<mylib/x.h> is in no include root: declare "):
        build(f"#include <mylib/x.h>\n{K}")


@each_nvcc
def test_a_type_without_its_header_names_the_header(build, monkeypatch, nvcc):
    monkeypatch.setattr(toolkit, "nvcc", lambda: nvcc)
    with pytest.raises(CompileError, match="`__half` comes from a header: #include <cuda_fp16.h>"):
        build("__global__ void k(__half* x) {}")


# As the extensions of Torch have it: one file, whose kernels need nothing of Torch.
OF_TORCH = """#ifndef __CUDACC_RTC__
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <pybind11/pybind11.h>
#define CHECK(x) TORCH_CHECK(x.is_cuda(), #x " must be on a GPU")
struct Workspace { at::Tensor memory; int64_t size; };
static const std::vector<at::ScalarType> kinds = {at::kFloat, at::kHalf};
#endif
template <typename scalar_t>
__global__ void k(scalar_t* out, const scalar_t* __restrict__ x, float a, int64_t n) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * a;
}
#ifndef __CUDACC_RTC__
torch::Tensor scale(torch::Tensor x, double a) {
  CHECK(x);
  const at::cuda::OptionalCUDAGuard guard(device_of(x));
  auto out = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scale", ([&] {
    k<scalar_t><<<1, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        out.data_ptr<scalar_t>(), x.data_ptr<scalar_t>(), a, x.numel());
  }));
  return out;
}
TORCH_LIBRARY_FRAGMENT(mine, m) { m.def("scale(Tensor x, float a) -> Tensor"); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scale", &scale, "scale"); }
#endif
"""


@pytest.mark.usefixtures("no_nvcc")
def test_an_extension_of_torch_may_be_guarded_as_a_whole(build):
    entry = build(OF_TORCH, template=(("scalar_t", "f64"),))
    assert parameters(entry) == ["*f64", "*f64", "f32", "i64"]
    with pytest.raises(CompileError, match=r"(?s)<torch/extension\.h> is in .* `#ifndef __CUDACC"):
        build(OF_TORCH.replace("#ifndef __CUDACC_RTC__", "#if 1"))


@pytest.mark.long
@pytest.mark.usefixtures("no_nvcc")
def test_cub_as_a_whole_needs_no_nvcc(build):
    text = """#include <cub/cub.cuh>
template <typename T> __global__ void k(T* out, const T* x) {
  using Reduce = cub::BlockReduce<T, 256>;
  __shared__ typename Reduce::TempStorage memory;
  T sum = Reduce(memory).Sum(x[threadIdx.x]);
  if (threadIdx.x == 0) *out = sum;
}"""
    entry = build(text, template=OF_F32)
    assert (compiler(entry), parameters(entry)) == ("nvrtc", ["*f32", "*f32"])


@pytest.mark.parametrize("name", ["CUB_NVRTC", "NVRTC"])
def test_the_error_by_which_cub_refuses_nvrtc_is_left_out(tmp_path, name):
    """As in CUB 3.2 and 3.3; it would be spared by a macro whose name has changed since."""
    (tmp_path / "cub").mkdir()
    (tmp_path / "cub" / "cub.cuh").write_text(
        f"#ifndef CCCL_DISABLE_{name}_COMPATIBILITY_CHECK\n#  if _CCCL_COMPILER(NVRTC)\n"
        '#    error \\\n      "Including <cub/cub.cuh> is not supported"\n#  endif\n#endif\n'
        "#include <cub/block/block_scan.cuh>\n#include <cub/device/device_scan.cuh>\n"
    )
    text = stand_ins.of_cub([tmp_path])["cub/cub.cuh"]
    assert "not supported" not in text and "device_scan" not in text
    assert text.count("endif") == 2 and "#include <cub/block/block_scan.cuh>" in text


@pytest.mark.long
@needs_nvcc
def test_nvcc_finds_the_headers_of_wheels(build, tmp_path, monkeypatch):
    wheel = tmp_path / "nvidia" / "cu13"
    (wheel / "include").mkdir(parents=True)
    (wheel / "include" / "cublas_of_a_wheel.h").write_text("#define OF_A_WHEEL 3\n")
    monkeypatch.setattr(toolkit, "wheel_prefixes", lambda: [wheel])
    text = f"#include <cublas_of_a_wheel.h>\n{HOSTED}".replace("digits", "digits + OF_A_WHEEL")
    assert compiler(build(text, template=OF_F32)) == "nvcc"


@pytest.mark.usefixtures("no_nvcc")
def test_an_error_beside_a_host_half_names_its_line(build):
    with pytest.raises(CompileError, match=r'k\.cu\(3\): error: identifier "nothing" is undefined'):
        build(TEACHING.replace("T(1)", "nothing"), template=OF_F32)


@pytest.mark.parametrize("function", ["k(float*)", "k(float *x)"])
def test_one_of_several_overloads(build, function):
    text = "__global__ void k(float* x) {}\n__global__ void k(double* x) {}"
    assert parameters(build(text, function=function)) == ["*f32"]
    with pytest.raises(CompileError, match=r"is overloaded; name one: `k\(float\* x\)`, `k\(d"):
        build(text)


@pytest.mark.usefixtures("no_nvcc")
def test_a_missing_cuda_header_names_its_wheel(build, monkeypatch):
    monkeypatch.setattr(toolkit, "include_directories", lambda major: [])
    with pytest.raises(CompileError, match=r'pip install "cuda-toolkit\[cudart\]==13.0.\*"'):
        build(f"#include <cuda_fp16.h>\n{K}")


def test_probe_names_are_read_whatever_the_kernel_is_called():
    text = ".entry va(\n) .entry _Z13jitkern_probeIPFvPfPKfjdsEXadL_Z2vaEEEvv(\n)"
    assert ptx.signature(text) == ("va", ["*f32", "*f32", "u32", "f64", "i16"])


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize("text", ["\ufeff" + K, f"// caf\xe9\n{K}", "\ufeff" + GUARDED])
def test_a_byte_order_mark_and_bytes_that_are_no_utf8_are_taken(build, text):
    raw = text.encode("utf-8" if text[0] == "\ufeff" else "latin-1")
    (build.folder / "near.cuh").write_bytes(raw)
    template = OF_F32 if "template" in text else ()
    assert build('#include "near.cuh"\n', template=template)  # a header
    assert build(raw, template=template)


@pytest.mark.long
@needs_nvcc
def test_nvcc_is_given_the_bytes_of_the_file(build):
    raw = b"\xef\xbb\xbf// caf\xe9\n" + HOSTED.encode()
    assert compiler(build(raw, template=OF_F32)) == "nvcc"


NVCC_ONLY = ("-O3", "--expt-relaxed-constexpr", "--extended-lambda", "-expt-extended-lambda")
NVCC_ONLY += ("-Xcompiler", "-fPIC", "-Xcompiler=-Wall", "--compiler-options", "-g")


@pytest.mark.long
@pytest.mark.usefixtures("no_nvcc")
def test_flags_of_nvcc_that_mean_nothing_to_nvrtc_are_left_out(build):
    text = "constexpr int twice(int x) { return 2 * x; }\n"
    text += "__global__ void k(int* o) { [=] { *o = twice(*o); }(); }"
    entry = build(text, flags=NVCC_ONLY)
    assert compiler(entry) == "nvrtc"
    assert build(text).path != entry.path


@pytest.mark.long
@needs_nvcc
def test_a_kernel_for_nvcc_is_given_its_flags(build):
    entry = build(HOSTED, template=OF_F32, flags=NVCC_ONLY)
    assert compiler(entry) == "nvcc"
    assert " ".join(NVCC_ONLY) in (entry.path / "compile.log").read_text()


@pytest.mark.long
@needs_nvcc
def test_an_extended_lambda_goes_to_nvcc(build, monkeypatch):
    text = "__global__ void k(int* o) { [=] __device__ { *o = 1; }(); }"
    assert compiler(build(text, flags=("--extended-lambda",))) == "nvcc"
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError, match="does not know `--extended-lambda`.* install nvcc"):
        build(text + " ", flags=("--extended-lambda",))


@pytest.mark.long
@needs_nvcc
@pytest.mark.parametrize("text", [K, f"{K}\nint main() {{}}"])
def test_another_flag_that_nvrtc_does_not_know_goes_to_nvcc(build, text):
    assert compiler(build(text, flags=("--threads", "1"))) == "nvcc"


@pytest.mark.parametrize("text", [K, f"{K}\nint main() {{}}"])
@pytest.mark.usefixtures("no_nvcc")
def test_a_flag_that_nvrtc_does_not_know_and_no_nvcc_says_so(build, text):
    with pytest.raises(CompileError, match=r"NVRTC does not know `--threads`.* install nvcc: pip"):
        build(text, flags=("--threads", "1"))


def test_wheels_of_both_layouts_are_found(tmp_path, monkeypatch):
    headers = [tmp_path / "nvidia" / name / "include" for name in ("cu13", "cuda_cccl", "curand")]
    for folder in headers:
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolkit.wheel_prefixes.__wrapped__() == [folder.parent for folder in headers]


@each_nvcc
def test_a_header_of_curand_that_is_missing_names_its_wheel(build, monkeypatch, nvcc):
    monkeypatch.setattr(toolkit, "nvcc", lambda: nvcc)
    with pytest.raises(CompileError, match=r'install "cuda-toolkit\[curand\]==13.0.\*"'):
        build(f"#include <curand_missing.h>\n{K}")  # which is in no toolkit


def test_nvrtc_runs_once_and_the_manifest_has_its_full_version(build, monkeypatch):
    programs, compiled = [], NvrtcProgram.compile
    compile_and_note = lambda self, options: programs.append(self) or compiled(self, options)
    monkeypatch.setattr(NvrtcProgram, "compile", compile_and_note)
    entry = build()
    assert len(programs) == 1
    source = Cuda("k.cu", folder=str(build.folder))
    assert entry.manifest.compiler in compiler_for(source).identities(source, TARGET)


def test_device_code_may_call_constexpr_functions_of_the_host(build):
    text = "#include <algorithm>\n__global__ void k(float* x) { x[0] = std::min(x[0], 2.0f); }"
    assert build(text)
