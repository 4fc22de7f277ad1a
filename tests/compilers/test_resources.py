"""Registers, spills, memory and threads of kernels, as compilers tell; no GPU is needed."""

import ctypes
import itertools
import json
import re

import pytest
import torch
from helpers import H100, needs_nvrtc_13, needs_triton

from jitkern import cache_tools, jit
from jitkern.cli.explain import resources_of
from jitkern.compilers.cuda import ptx, toolkit
from jitkern.compilers.cuda.nvrtc_api import NvrtcProgram
from jitkern.declare import Cuda, kernel
from jitkern.op.needed_kernels import needs_of
from jitkern.source.kinds import Triton, Variant
from jitkern.target import Target

TARGET = Target.parse(H100)
pytestmark = needs_nvrtc_13
TEXT = """
extern "C" __global__ void __launch_bounds__(128) exchange(float* y, const float* x) {
  __shared__ float s[300];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[127 - threadIdx.x];
}
extern "C" __global__ void indexed(float* y, const float* x, int n) {
  float a[300];
  for (int i = 0; i < 300; i++) a[i] = x[i];
  y[threadIdx.x] = a[n] + a[n + 1];
}
extern "C" __global__ void __launch_bounds__(THREADS) many(float* y, const float* x) {
  float a[100];
  #pragma unroll
  for (int i = 0; i < 100; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 100; i++) a[i] = a[i] * a[(i + 7) % 100] + a[(i * 5 + 1) % 100];
  #pragma unroll
  for (int i = 0; i < 100; i++) y[i * 1024 + threadIdx.x] = a[i];
}
"""
_COMPILED = {}
_number = itertools.count()


def told(arch, symbol, threads=1024):
    """What the compiler tells of a kernel that it builds for an arch."""
    if (arch, threads) not in _COMPILED:
        program = NvrtcProgram(toolkit.nvrtc_for(TARGET), TEXT, "k.cu", (), {})
        failed, log = program.compile([f"-arch={arch}", f"-DTHREADS={threads}", ptx.VERBOSE])
        assert not failed, log
        _COMPILED[arch, threads] = program.text("PTX"), log
        program.destroy()
    text, log = _COMPILED[arch, threads]
    return ptx.resources(text, symbol, log)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_compiler_tells_what_a_kernel_takes(arch):
    many, exchange, indexed = (told(arch, symbol) for symbol in ("many", "exchange", "indexed"))
    assert many["spills"] > 400 and many["local"] > 0 and many["registers"] == 64
    assert exchange["max_threads"] == 128 and exchange["shared"] == 1200
    assert 8 < exchange["registers"] < indexed["registers"] < 64
    assert (indexed["local"], indexed["spills"]) == (1200, 0)  # an array is no spill


def test_threads_are_those_that_the_registers_allow():
    free, few = (told("sm_90", "many", threads) for threads in (128, 1024))
    assert few["max_threads"] == 1024 and free["max_threads"] == 128
    assert few["registers"] <= 64 < free["registers"] and few["spills"] and not free["spills"]
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas info    : Function properties for k\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used %d registers, 352 bytes cmem[0]\n"
    )  # as CUDA 12 has it
    found = [ptx.resources(".entry k()\n{", "k", log % n) for n in (16, 64, 65, 128, 255)]
    assert [one["max_threads"] for one in found] == [1024, 1024, 896, 512, 256]


def test_a_function_that_a_kernel_calls_has_lines_of_its_own():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas info    : Function properties for helper\n"
        "    40 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Function properties for k\n"
        "    16 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 24 registers, used 0 barriers, 64 bytes smem\n"
        "ptxas info    : Compiling entry function 'k2' for 'sm_90'\n"
    )
    text = ".entry k2(\n)\n.maxntid 64, 1, 1\n{ }\n.entry k(\n)\n.reqntid 32, 2, 2\n{ }\n"
    found = ptx.resources(text, "k", log)
    assert found == {"registers": 24, "local": 16, "spills": 4, "shared": 64, "max_threads": 128}
    assert ptx.resources(text, "k2", log) == ptx.resources(text, "k", "") == {}


# ------------------------------------------------------------------ in manifests


@pytest.fixture
def source(tmp_path):
    (tmp_path / "k.cu").write_text(TEXT)
    return Cuda("k.cu", folder=str(tmp_path), flags=["-DTHREADS=1024"])


@pytest.mark.long
def test_nvrtc_keeps_them(source):
    variant = Variant("test::many", source, "many")
    wanted = told("sm_90", "many")
    assert jit.ensure(variant, TARGET).manifest.meta["resources"] == wanted and wanted["spills"]


@pytest.mark.long
@pytest.mark.skipif(toolkit.nvcc() is None, reason="needs nvcc")
def test_nvcc_keeps_them(source):
    (source.paths[0]).write_text(
        "#include <limits>\n" + TEXT.replace("300]", "269 + std::numeric_limits<int>::digits]")
    )
    entry = jit.ensure(Variant("test::exchange", source, "exchange"), TARGET)
    assert entry.manifest.compiler["name"] == "nvcc"
    assert entry.manifest.meta["resources"]["shared"] == 1200


@pytest.mark.long
@needs_triton
def test_triton_keeps_them(tmp_path):
    (tmp_path / "t.py").write_text(
        "import triton\nimport triton.language as tl\n@triton.jit\n"
        "def k(out, x, B: tl.constexpr):\n    i = tl.arange(0, B)\n"
        "    tl.store(out, tl.sum(tl.load(x + i)))\n"
    )
    source = Triton("t.py", folder=str(tmp_path))
    variant = Variant("test::k", source, "k", (("B", 1024),), ("*f32:16", "*f32:16"))
    entry = jit.ensure(variant, TARGET)
    resources = entry.manifest.meta["resources"]
    assert resources["registers"] > 8 and resources["max_threads"] == 128
    assert resources_of(entry)["dynamic_shared"] == entry.manifest.meta["smem"] > 0


# ------------------------------------------------------------------ explain


@pytest.fixture
def op():
    source = Cuda(text=TEXT, flags=["-DTHREADS=1024"])
    op = kernel(f"jitkern_cubin::k{next(_number)}(Tensor x) -> Tensor", cuda=source)

    @op.launch("cuda")
    def _(k, x):
        y = torch.empty_like(x)
        k.many(y, x, grid=1, block=128)
        k.exchange(y, x, grid=1, block=128)
        return y

    op.samples(lambda device: iter([torch.ones(200_000, device=device)]))
    return op


def variants_of(op):
    return needs_of(op, op.sources["cuda"][0], "cuda").variants


@pytest.mark.long
def test_explain_shows_them_and_hints_at_spills(op, cli):
    for variant in variants_of(op):
        jit.ensure(variant, TARGET)
    out = cli("explain", op.name, "--target", str(TARGET))[1]
    assert re.search(r"  [0-9a-f]{8}  many  \d+ registers, \d+ B of spills and reloads, \d+ B of local "
                     r"memory, at most 1024 threads\n", out)  # fmt: skip
    shared = r"  exchange  \d+ registers, 1200 B of shared memory, at most 128 threads\n"
    assert re.search(shared, out)
    (hint,) = re.findall(r"hint: (.*)", out)
    assert hint.startswith(f"`many` for {TARGET} spills: ") and "__launch_bounds__" in hint
    found = json.loads(cli("explain", op.name, "--target", str(TARGET), "--json")[1])["ops"][0]
    rows = {row["variant"]: row for row in found["variants"] if row["kind"] == "nvrtc"}
    assert set(rows["many"]["resources"]) == {
        "registers", "local", "spills", "shared", "max_threads"
    }  # fmt: skip
    assert found["hints"] == [hint]
    digest = rows["exchange"]["key"][:12]
    assert "B of shared memory, at most 128 threads\n" in cli("explain", digest)[1]
    (entry,) = json.loads(cli("explain", digest, "--json")[1])["entries"]
    assert entry["resources"] == rows["exchange"]["resources"]


@pytest.mark.long
def test_an_entry_of_an_earlier_version_is_read_without_them(op, cli, monkeypatch):
    monkeypatch.setattr("jitkern.compilers.cuda.ptx.resources", lambda *_: {})
    variant = variants_of(op)[0]
    entry = jit.ensure(variant, TARGET)
    without = {n: v for n, v in entry.manifest.meta.items() if n != "resources"}
    for meta in (entry.manifest.meta, without):
        (entry.path / "manifest.json").write_bytes(entry.manifest._replace(meta=meta).encode())
        assert not jit.ensure(variant, TARGET).manifest.meta.get("resources")
        out = cli("explain", op.name, "--target", str(TARGET))[1]
        assert "many\n" in out and "hint" not in out
    assert cache_tools.rows(jit.open_cache())[0].ok


@pytest.mark.gpu
def test_the_driver_says_the_same(op):
    here = Target.current("cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    device = torch.zeros(1, device="cuda").device.index  # which makes the context
    for variant in variants_of(op):
        function = jit.loaded(variant, here)
        resources = jit.ensure(variant, here).manifest.meta["resources"]

        def attribute(number, function=function):
            value = ctypes.c_int()
            handle = ctypes.c_void_p(function.address)
            assert not driver.cuKernelGetAttribute(ctypes.byref(value), number, handle, device)
            return value.value

        assert attribute(4) == resources["registers"]
        assert 0 <= attribute(3) - resources["local"] < 16  # it may be rounded up
        assert attribute(0) == resources["max_threads"]
        assert attribute(1) - resources["shared"] in (0, 1024)  # what the system takes of it
