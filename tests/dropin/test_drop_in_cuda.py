"""CUDA sources of `load_inline` and `load`, without a GPU and on one."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

import jitkern
from jitkern import config
from jitkern.compilers.cuda import arch_flags, toolkit
from jitkern.compilers.torch_extension import commands
from jitkern.compilers.torch_extension.inline import Inline, InlineCompiler
from jitkern.errors import CompileError, TargetError
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


# CUDA, as far as no GPU is needed.

KERNEL = "__global__ void fill(int* out) { *out = %s; }\n"


def library(name, text, **options):
    """The path of a library of this CUDA text alone."""
    options = {"is_python_module": False, "no_implicit_headers": True, **options}
    return jitkern.load_inline(f"drop_in_{name}", "", text, **options)


def test_without_gpu_and_arch_a_cuda_source_is_refused(monkeypatch, cuda_target):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(arch_flags.Target, "visible", list)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(TargetError, match="TORCH_CUDA_ARCH_LIST=9.0, or in extra_cuda_cflags"):
        jitkern.load_inline("drop_in_no_gpu", "", KERNEL % 1)


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("9.0", "90:90"), ("8.0;9.0a+PTX", "80:80 90a:90a 90a:c90a"), ("8.0 8.6", "80:80 86:86"),
        ("Volta", "70:70 70:c70"), ("Maxwell+Tegra;6.1", "53:53 61:61"),
        ("Ampere+Tegra Hopper", "87:87 90:90 90:c90"), ("10.0f", "100f:100f"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("listed", "named"),
    [("Hoper", "Hoper"), *dict.fromkeys(("9.0;", "9.0 ", "; 9.0", "8.0; 9.0", ";", " "), "").items(),
     ("8.0, 9.0", "8.0,"), ("9.0\n", "9.0\n"), (" native", "")],
)  # fmt: skip
def test_an_unknown_arch_is_a_value_error_as_with_torch(listed, named, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    said = re.escape(f"Unknown CUDA arch ({named}) or GPU not supported")
    with pytest.raises(ValueError, match=said):
        arch_flags.arch_flags(config.cuda_arch_list(), ())
    with pytest.raises(ValueError, match=said):
        cpp_extension._get_cuda_arch_flags()


def test_cudnn_home_is_searched(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cudnn.h").touch()
    source = Inline(("main.cpp",), name="x", texts=("",), with_cuda=True)
    build = InlineCompiler().build_of(source, Target.current("cpu"))
    with config.using(environment={"CUDNN_HOME": str(tmp_path)}):
        command = commands.compile_step(build, 0, tmp_path).command
    assert str(tmp_path / "include") in command


@pytest.mark.long
@pytest.mark.skipif(not toolkit.nvcc(), reason="needs nvcc")
def test_nvcc_compiles_for_the_archs_of_the_list(monkeypatch, cuda_target, files):
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    files(n_dot_h="#define N 3\n")
    text = '#include "n.h"\n' + KERNEL % "N"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    two = library("nvcc", text, extra_include_paths=["."])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    one = library("nvcc", text, extra_include_paths=["."])
    assert one != two and "cuda-sm_90-" in two and "cuda-sm_80-" in one
    if shutil.which("cuobjdump"):
        listed = subprocess.check_output(["cuobjdump", "--list-elf", two], text=True)
        assert "sm_80" in listed and "sm_90" in listed
    half = "#include <cuda_fp16.h>\n__global__ void add(__half* x) { x[0] = x[1] + x[2]; }"
    with pytest.raises(CompileError, match="-U__CUDA_NO_HALF_OPERATORS__"):
        library("half", half)
    off = [f"-U__CUDA_NO_HALF{which}__" for which in ("_OPERATORS", "_CONVERSIONS", "2_OPERATORS")]
    library("half", half, extra_cuda_cflags=off)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "13.0")
    with pytest.raises(CompileError, match="this nvcc does not know .*TORCH_CUDA_ARCH_LIST"):
        library("arch", KERNEL % 1)


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
@pytest.mark.long
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
    texts = ["#include <torch/library.h>", DECLARED, op]
    jitkern.load_inline("drop_in_cuda_op", texts, COS_ADD, is_python_module=False)
    torch.testing.assert_close(torch.ops.drop_in_cuda_op.cos_add(x, y), m.cos_add(x, y))


@pytest.mark.gpu
@pytest.mark.long
def test_cuda_files(files):
    files(
        ext_dot_cpp=f"#include <torch/extension.h>\n{DECLARED}\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("cos_add", &cos_add); }',
        ext_dot_cu="#include <torch/types.h>\n#include <cuda_runtime.h>\n" + COS_ADD,
    )
    options = {"extra_cuda_cflags": ["-O2"], "keep_intermediates": False}
    m = jitkern.load("drop_in_cuda_files", ["ext.cpp", "ext.cu"], **options)
    x, y = torch.randn(2, 4, 4, device="cuda")
    torch.testing.assert_close(m.cos_add(x, y), x.cos() + y.cos(), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("listed", "elf", "ptx"),
    [("", None, None), ("8.0;9.0+PTX", ["80", "90"], ["90"]), ("Turing 8.6", ["75", "86"], ["75"])],
)
def test_archs_of_the_list_are_in_the_library(listed, elf, ptx, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    path = library(f"archs_{len(listed)}", KERNEL % 1)

    def found(option):
        output = subprocess.check_output(["cuobjdump", option, path], text=True)
        return sorted(set(re.findall(r"sm_(\d+)", output)))

    major, minor = torch.cuda.get_device_capability()
    here = [f"{major}{minor}"]
    assert (found("--list-elf"), found("--list-ptx")) == (elf or here, ptx or here)
