"""The real NVRTC, which needs no GPU."""

import sys
import types
from pathlib import Path

import pytest

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

pytestmark = pytest.mark.skipif(
    not any(version[0] == 13 for version in toolkit.nvrtc_libraries()),
    reason="needs NVRTC 13: pip install jitkern[cuda]",
)
needs_nvcc = pytest.mark.skipif(toolkit.nvcc() is None, reason="needs nvcc")


@pytest.fixture
def build(tmp_path):
    folder = tmp_path / "kernels" / "k"
    folder.mkdir(parents=True)

    def run(text, function="k", template=(), target=TARGET, **options):
        (folder / "k.cu").write_text(text)
        return jit.ensure(
            Variant("test::k", Cuda("k.cu", folder=str(folder), **options), function, template),
            target,
        )

    run.folder = folder
    return run


def parameters(entry):
    return entry.manifest.meta["parameters"]


def test_parameter_types_of_an_extern_c_kernel(build):
    entry = build(
        'extern "C" __global__ void k(float* o, const double* x, long long n, int i, unsigned u, float s, bool b, char c, float2* v) {}'
    )
    assert parameters(entry) == ["*f32", "*f64", "i64", "i32", "u32", "f32", "bool", "i8", "*"]
    assert entry.manifest.meta["symbol"] == "k"
    assert entry.read("kernel.cubin")[:4] == b"\x7fELF"


def test_a_header_found_from_the_current_directory_is_refused(build, tmp_path, monkeypatch):
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "v.h").write_text("#define V 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=f"opened {tmp_path}/inc/v.h, which the cache key does"):
        build("#include <v.h>\n__global__ void k(int* o) { *o = V; }", flags=["-Iinc"])


def test_template_arguments_go_by_name(build):
    text = "template <int N, typename T = float, bool FLAG = false>\n__global__ void k(T* o, long n) { if (FLAG) o[n] = N; }"
    entry = build(text, template=(("T", "f64"), ("N", 3)))
    assert parameters(entry) == ["*f64", "i64"]
    assert "ILi3Ed" in entry.manifest.meta["symbol"]


def test_a_gap_in_the_template_arguments_is_refused(build):
    text = "template <typename T, int N = 4, bool B = false> __global__ void k(T* o) {}"
    with pytest.raises(CompileError, match="template of <T, N, B>: give `N` too"):
        build(text, template=(("T", "f32"), ("B", True)))


def test_the_order_of_template_parameters_is_that_of_the_header(build):
    (build.folder / "k.h").write_text("template <int M, int N> __global__ void k(int* x) {}")
    entry = build('#include "k.h"', template=(("N", 2), ("M", 1)))
    assert "ILi1ELi2EE" in entry.manifest.meta["symbol"]


def test_where_the_order_is_unknown_the_arguments_go_by_number(build):
    text = "#define KERNEL(n) template <int M, int N> __global__ void n(int* x) {}\nKERNEL(k)"
    with pytest.raises(
        CompileError, match="cannot find its template declaration; pass .* by position"
    ):
        build(text, template=(("N", 2), ("M", 1)))
    entry = build(text, template=(("0", 1), ("1", 2)))
    assert "ILi1ELi2EE" in entry.manifest.meta["symbol"]


def test_arrays_and_pointers_to_pointers_are_pointers(build):
    text = """#include <cuda_fp16.h>
    template <typename T> struct Pair { T a, b; };
    __global__ void k(Pair<Pair<int*>> p, Pair<int*>* q, float a[4][4], const double b[2][3][4], float** c, const int* const* d,
                      volatile float* e, __half h, void (*f)(int), float* (*g)[2]) {}"""
    codes = ["", "*", "*f32", "*f64", "*i64", "*i64", "*f32", "", "", "*i64"]
    assert parameters(build(text)) == codes


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("f16", "*f16"), ("bf16", "*bf16"), ("i8", "*i8"), ("u8", "*u8"), ("bool", "*bool")],
)
def test_dtypes_become_cuda_types(build, dtype, code):
    text = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\ntemplate <typename T> __global__ void k(T* o) {}"
    assert parameters(build(text, template=(("T", dtype),))) == [code]


@pytest.mark.long
def test_namespaces_launch_bounds_and_static_kernels(build):
    assert parameters(build("namespace a { __global__ void k(int* o) {} }", function="a::k")) == [
        "*i32"
    ]
    assert parameters(
        build(
            "template <typename T> __global__ void __launch_bounds__(128) k(T* o) {}",
            template=(("T", "f32"),),
        )
    ) == ["*f32"]
    assert parameters(build("static __global__ void k(int* o) { *o = 1; }")) == ["*i32"]


def test_a_struct_by_value_is_recorded_as_impassable(build):
    assert parameters(build("struct S { int a[4]; };\n__global__ void k(S s, int* o) {}")) == [
        "",
        "*i32",
    ]


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
    assert build(
        "__global__ void k(int* o) {\n#if __CUDA_ARCH__ != 800\n#error\n#endif\n}",
        target=Target.parse("cuda-sm_80-cu130-torch2.11.0"),
    )


def test_a_syntax_error_names_file_and_line(build):
    with pytest.raises(
        CompileError,
        match=r"`k` of test::k for cuda-sm_90-cu130-torch2.11.0: .*kernels/k/k\.cu\(2\): error: ",
    ):
        build("__global__ void k(int* o) {\n  *o = ;\n}")


def test_an_undefined_macro_names_it(build):
    with pytest.raises(CompileError, match=r'k\.cu\(1\): error: identifier "BLOCK" is undefined'):
        build("__global__ void k(int* o) { *o = BLOCK; }")


def test_a_missing_kernel_lists_what_there_is(build):
    with pytest.raises(CompileError, match=r"has no function `other`; it has: k"):
        build("__global__ void k(int* o) {}", function="other")


@pytest.mark.parametrize("nvcc", [None, toolkit.nvcc()])
def test_a_function_that_is_no_kernel_lacks_a_word(build, monkeypatch, nvcc):
    monkeypatch.setattr(toolkit, "nvcc", lambda: nvcc)
    with pytest.raises(CompileError, match=r"k\.cu:2: `k` in .* write `__global__` before"):
        build("#include <vector>\nvoid k(int* o) {}")


def test_a_wrong_template_name_lists_what_there_is(build):
    with pytest.raises(CompileError, match=r"no template parameter `U`; it has: T, N"):
        build("template <typename T, int N> __global__ void k(T* o) {}", template=(("U", "f32"),))


def test_template_arguments_for_a_plain_kernel_are_refused(build):
    with pytest.raises(CompileError, match=r"no template parameter `T`; it has: none"):
        build("__global__ void k(float* o) {}", template=(("T", "f32"),))


def test_an_unsupported_arch_lists_the_supported_ones(build):
    with pytest.raises(TargetError, match=r"cannot build for cuda-sm_70-.*sm_90"):
        build("__global__ void k(int* o) {}", target=Target.parse("cuda-sm_70-cu130-torch2.11.0"))


@pytest.mark.parametrize("cuda", ["128", "140"])
def test_another_major_version_is_refused_with_the_remedy(build, cuda):
    with pytest.raises(TargetError, match=r'pip install "cuda-toolkit\[nvrtc\]=='):
        build(
            "__global__ void k(int* o) {}", target=Target.parse(f"cuda-sm_90-cu{cuda}-torch2.11.0")
        )


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
    [
        ((12, 8), ["-default-device"]),
        ((12, 9), ["--no-cache", "-default-device"]),
        ((13, 0), ["--no-cache"]),
    ],
)
def test_each_nvrtc_gets_the_options_that_it_knows(monkeypatch, version, added):
    """A cache of NVRTC's own would call cuInit; NVRTC 12 takes lambdas for host functions."""
    library = types.SimpleNamespace(got=[])
    library.nvrtcCreateProgram = lambda *arguments: 0
    library.nvrtcCompileProgram = lambda handle, count, options: library.got.extend(options)
    monkeypatch.setattr(nvrtc_api, "version", lambda library: version)
    monkeypatch.setattr(NvrtcProgram, "text", lambda program, output: "")
    NvrtcProgram(library, "", "k.cu", (), {}).compile(["-w"])
    assert library.got == [option.encode() for option in ("-w", *added)]


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
        build("__global__ void k(int* o) {}")


TEACHING = """#include <cstdio>
#include <cuda_runtime.h>
template <typename T> __global__ void k(T* o, int n) { if (threadIdx.x < n) o[threadIdx.x] = T(1); }
int main() { float* d; cudaMalloc(&d, 40); k<double><<<1, 10>>>((double*)d, 10); k<float><<<1, 10>>>(d, 10); printf("done\\n"); }
"""
GUARDED = TEACHING.replace("int main", "#ifndef __CUDACC_RTC__\nint main") + "#endif\n"


def test_host_code_in_a_guard_needs_no_nvcc(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    entry = build(GUARDED, template=(("T", "f32"),))
    assert entry.manifest.compiler["name"] == "nvrtc"
    assert parameters(entry) == ["*f32", "i32"]


def test_host_code_with_neither_a_guard_nor_nvcc_is_told_of(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError) as caught:
        build(TEACHING, template=(("T", "f32"),))
    assert 'k.cu(4): error: identifier "cudaMalloc" is undefined' in str(caught.value)
    assert (
        "Guard what only the host needs with `#ifndef __CUDACC_RTC__`, or install nvcc: pip"
        in str(caught.value)
    )


@pytest.mark.long
@needs_nvcc
def test_host_code_without_a_guard_goes_to_nvcc(build):
    entry = build(TEACHING, template=(("T", "f32"),))
    assert entry.manifest.compiler["name"] == "nvcc"
    assert parameters(entry) == ["*f32", "i32"]


@pytest.mark.parametrize(
    "helper",
    ["constexpr int f(int x) { return 2 * x; }", "int f(int x) { return 2 * x; }",
     "struct S { int v; S(int x) : v(x) {} }; constexpr int f(int x) { return S(x).v; }",
     "auto f = [](int x) { return x; };"],
)  # fmt: skip
def test_a_helper_without_a_mark_is_compiled_for_the_device(build, monkeypatch, helper):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    text = f"#include <stdio.h>\n{helper}\n__global__ void k(int* o) {{ *o = f(*o); }}"
    assert build(text).manifest.compiler["name"] == "nvrtc"


# The kernel uses what only the host's headers have.
HOSTED = """#include <limits>
#include <cstdio>
template <typename T> __global__ void k(T* o) { *o = std::numeric_limits<T>::digits; }
int main() { printf("done\\n"); }
"""


@pytest.mark.long
@needs_nvcc
def test_a_kernel_that_needs_host_headers_goes_to_nvcc(build):
    entry = build(HOSTED, template=(("T", "f32"),))
    assert entry.manifest.compiler["name"] == "nvcc"
    assert parameters(entry) == ["*f32"]
    assert entry.manifest.meta["symbol"].startswith("_Z1kIf")


@pytest.mark.parametrize("nvcc", [None, ("nvcc", (12, 8))])
def test_a_kernel_that_needs_host_headers_and_no_nvcc_says_so(build, monkeypatch, nvcc):
    monkeypatch.setattr(toolkit, "nvcc", lambda: nvcc)
    with pytest.raises(CompileError) as caught:
        build(HOSTED, template=(("T", "f32"),))
    assert 'k.cu(3): error: namespace "std" has no member "numeric_limits"' in str(caught.value)
    install = "another nvcc" if nvcc else "nvcc"
    assert f'install {install}: pip install "cuda-toolkit[nvcc,nvvm,crt,cudart]==13.0.*"' in str(
        caught.value
    )


def test_an_unknown_header_and_no_nvcc_says_so(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(
        CompileError, match=r"<strange\.h> is in no include root.*install nvcc: pip"
    ):
        build("#include <strange.h>\n__global__ void k(int* o) {}")


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


def test_an_extension_of_torch_may_be_guarded_as_a_whole(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    entry = build(OF_TORCH, template=(("scalar_t", "f64"),))
    assert parameters(entry) == ["*f64", "*f64", "f32", "i64"]
    with pytest.raises(CompileError, match=r"(?s)<torch/extension\.h> is in .* `#ifndef __CUDACC"):
        build(OF_TORCH.replace("#ifndef __CUDACC_RTC__", "#if 1"))


@pytest.mark.parametrize("include", ["", "#include <sys/types.h>\n"])
def test_the_short_names_of_unsigned_types_are_known(build, monkeypatch, include):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    entry = build(include + "__global__ void k(uint* a, ushort* b, ulong c) {}")
    assert parameters(entry) == ["*u32", "*u16", "u64"]


NEEDS_TORCH = "#include <c10/util/Half.h>\n__global__ void k(c10::Half* o) {}"


def test_a_kernel_that_needs_a_header_of_torch_says_so(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError, match=r"<c10/util/Half.h> is in no include root: .*nvcc"):
        build(NEEDS_TORCH)


@pytest.mark.long
def test_cub_as_a_whole_needs_no_nvcc(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    text = """#include <cub/cub.cuh>
template <typename T> __global__ void k(T* out, const T* x) {
  using Reduce = cub::BlockReduce<T, 256>;
  __shared__ typename Reduce::TempStorage memory;
  T sum = Reduce(memory).Sum(x[threadIdx.x]);
  if (threadIdx.x == 0) *out = sum;
}"""
    entry = build(text, template=(("T", "f32"),))
    assert entry.manifest.compiler["name"] == "nvrtc"
    assert parameters(entry) == ["*f32", "*f32"]


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
    entry = build(
        "#include <limits>\n#include <cublas_of_a_wheel.h>\ntemplate <typename T> __global__ void"
        " k(T* o) { *o = std::numeric_limits<T>::digits + OF_A_WHEEL; }",
        template=(("T", "f32"),),
    )
    assert entry.manifest.compiler["name"] == "nvcc"


def test_an_error_beside_a_host_half_names_its_line(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError, match=r'k\.cu\(3\): error: identifier "nothing" is undefined'):
        build(TEACHING.replace("T(1)", "nothing"), template=(("T", "f32"),))


@pytest.mark.parametrize("nvcc", [True, False])
def test_what_a_directory_or_a_header_is_missing_for_is_told(build, monkeypatch, nvcc):
    if not nvcc:
        monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError, match=r"<mylib/extension.h> is in no include root: declare "):
        build(f"#include <mylib/extension.h>\n{K}")
    with pytest.raises(CompileError, match="`__half` comes from a header: #include <cuda_fp16.h>"):
        build("__global__ void k(__half* x) {}")


@pytest.mark.parametrize("function", ["k(float*)", "k(float *x)"])
def test_one_of_several_overloads(build, function):
    text = "__global__ void k(float* x) {}\n__global__ void k(double* x) {}"
    assert parameters(build(text, function=function)) == ["*f32"]
    with pytest.raises(CompileError, match=r"is overloaded; name one: `k\(float\* x\)`, `k\(d"):
        build(text)


def test_a_missing_cuda_header_names_its_wheel(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    monkeypatch.setattr(toolkit, "include_directories", lambda major: [])
    with pytest.raises(CompileError, match=r'pip install "cuda-toolkit\[cudart\]==13.0.\*"'):
        build("#include <cuda_fp16.h>\n__global__ void k(int* o) {}")


def test_probe_names_are_read_whatever_the_kernel_is_called():
    text = ".entry va(\n) .entry _Z13jitkern_probeIPFvPfPKfjdsEXadL_Z2vaEEEvv(\n)"
    assert ptx.signature(text) == ("va", ["*f32", "*f32", "u32", "f64", "i16"])


K = "__global__ void k(float* o) { *o = 1; }"


@pytest.mark.parametrize("text", ["\ufeff" + K, f"// caf\xe9\n{K}", "\ufeff" + GUARDED])
def test_a_byte_order_mark_and_bytes_that_are_no_utf8_are_taken(build, monkeypatch, text):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    raw = text.encode("utf-8" if text[0] == "\ufeff" else "latin-1")
    (build.folder / "near.cuh").write_bytes(raw)
    template = (("T", "f32"),) if "template" in text else ()
    assert build('#include "near.cuh"\n', template=template)  # a header
    (build.folder / "k.cu").write_bytes(raw)
    variant = Variant("test::k", Cuda("k.cu", folder=str(build.folder)), "k", template)
    assert jit.ensure(variant, TARGET)


@pytest.mark.long
@needs_nvcc
def test_nvcc_is_given_the_bytes_of_the_file(build):
    (build.folder / "k.cu").write_bytes(b"\xef\xbb\xbf// caf\xe9\n" + HOSTED.encode())
    source = Cuda("k.cu", folder=str(build.folder))
    entry = jit.ensure(Variant("test::k", source, "k", (("T", "f32"),)), TARGET)
    assert entry.manifest.compiler["name"] == "nvcc"


NVCC_ONLY = ("-O3", "--expt-relaxed-constexpr", "--extended-lambda", "-expt-extended-lambda")
NVCC_ONLY += ("-Xcompiler", "-fPIC", "-Xcompiler=-Wall", "--compiler-options", "-g")


@pytest.mark.long
def test_flags_of_nvcc_that_mean_nothing_to_nvrtc_are_left_out(build, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    text = "constexpr int twice(int x) { return 2 * x; }\n"
    text += "__global__ void k(int* o) { [=] { *o = twice(*o); }(); }"
    entry = build(text, flags=NVCC_ONLY)
    assert entry.manifest.compiler["name"] == "nvrtc"
    assert build(text).path != entry.path


@pytest.mark.long
@needs_nvcc
def test_a_kernel_for_nvcc_is_given_its_flags(build):
    entry = build(HOSTED, template=(("T", "f32"),), flags=NVCC_ONLY)
    assert entry.manifest.compiler["name"] == "nvcc"
    assert " ".join(NVCC_ONLY) in (entry.path / "compile.log").read_text()


@pytest.mark.long
@needs_nvcc
def test_an_extended_lambda_goes_to_nvcc(build, monkeypatch):
    text = "__global__ void k(int* o) { [=] __device__ { *o = 1; }(); }"
    entry = build(text, flags=("--extended-lambda",))
    assert entry.manifest.compiler["name"] == "nvcc"
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError, match="does not know `--extended-lambda`.* install nvcc"):
        build(text + " ", flags=("--extended-lambda",))


@pytest.mark.long
@needs_nvcc
@pytest.mark.parametrize("text", [K, f"{K}\nint main() {{}}"])
def test_another_flag_that_nvrtc_does_not_know_goes_to_nvcc(build, text):
    entry = build(text, flags=("--threads", "1"))
    assert entry.manifest.compiler["name"] == "nvcc"


@pytest.mark.parametrize("text", [K, f"{K}\nint main() {{}}"])
def test_a_flag_that_nvrtc_does_not_know_and_no_nvcc_says_so(build, monkeypatch, text):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompileError, match=r"NVRTC does not know `--threads`.* install nvcc: pip"):
        build(text, flags=("--threads", "1"))


@pytest.mark.parametrize(
    "flags", [("-gencode=arch=compute_80,code=sm_80",), ("-arch=sm_80",), ("-arch", "sm_80")]
)
def test_a_flag_that_names_an_arch_is_refused(build, flags):
    with pytest.raises(CompileError, match="remove the arch flag: the target sets it"):
        build(K, flags=flags)


def test_a_flag_for_code_that_a_linker_completes_is_refused(build):
    with pytest.raises(CompileError, match=r"its flags \['-dlto'\] NVRTC .* remove that flag"):
        build(K, flags=("-dlto",))


def test_wheels_of_both_layouts_are_found(tmp_path, monkeypatch):
    headers = [tmp_path / "nvidia" / name / "include" for name in ("cu13", "cuda_cccl", "curand")]
    for folder in headers:
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolkit.wheel_prefixes.__wrapped__() == [folder.parent for folder in headers]


@pytest.mark.parametrize("nvcc", [True, False])
def test_a_header_of_curand_that_is_missing_names_its_wheel(build, monkeypatch, nvcc):
    if nvcc and toolkit.nvcc() is None:
        pytest.skip("needs nvcc")
    if not nvcc:
        monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    # no such header in any toolkit
    with pytest.raises(CompileError, match=r'install "cuda-toolkit\[curand\]==13.0.\*"'):
        build(f"#include <curand_missing.h>\n{K}")


def test_nvrtc_runs_once_and_the_manifest_has_its_full_version(build, monkeypatch):
    programs = []
    compiled = NvrtcProgram.compile
    monkeypatch.setattr(
        NvrtcProgram,
        "compile",
        lambda self, options: programs.append(self) or compiled(self, options),
    )
    entry = build("__global__ void k(float* o) {}")
    assert len(programs) == 1
    source = Cuda("k.cu", folder=str(build.folder))
    assert entry.manifest.compiler in compiler_for(source).identities(source, TARGET)


def test_device_code_may_call_constexpr_functions_of_the_host(build):
    text = "#include <algorithm>\n__global__ void k(float* x) { x[0] = std::min(x[0], 2.0f); }"
    assert build(text)
