"""Registers, spills, memory and threads of kernels, from their cubins; no GPU is needed."""

import ctypes
import itertools
import json
import re

import pytest
import torch
from helpers import H100, needs_triton

from jitkern import cache_tools, jit
from jitkern.cli import hints
from jitkern.compilers.cuda import cubin, toolkit
from jitkern.compilers.cuda.nvrtc_api import NvrtcProgram
from jitkern.declare import Cuda, kernel
from jitkern.op.needed_kernels import needs_of
from jitkern.source.kinds import Triton, Variant
from jitkern.target import Target

TARGET = Target.parse(H100)
pytestmark = pytest.mark.skipif(
    not any(version[0] == 13 for version in toolkit.nvrtc_libraries()),
    reason="needs NVRTC 13: pip install jitkern[cuda]",
)
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
KERNELS = ("exchange", "indexed", "many")
_COMPILED = {}
_number = itertools.count()


def compiled(arch, threads=1024):
    """The cubin for an arch, and the log in which the assembler tells the same."""
    if (arch, threads) not in _COMPILED:
        library = toolkit.nvrtc_for(TARGET)
        program = NvrtcProgram(library, TEXT, "k.cu", (), {})
        options = [f"-arch={arch}", f"-DTHREADS={threads}", "-Xptxas=-v"]
        failed, log = program.compile(options)
        assert not failed, log
        _COMPILED[arch, threads] = program.bytes("CUBIN"), log
        program.destroy()
    return _COMPILED[arch, threads]


def said(log, symbol):
    """What the assembler says of a kernel."""
    part = re.search(rf"entry function '{symbol}'(.*?)(Compile time|\Z)", log, re.DOTALL)[1]

    def number(pattern):
        found = re.search(pattern, part)
        return int(found[1]) if found else 0

    moved = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return {
        "registers": number(r"Used (\d+) registers"), "local": number(r"(\d+) bytes stack frame"),
        "spills": moved, "shared": number(r"(\d+) bytes smem"),
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_a_cubin_tells_what_the_assembler_says(arch):
    binary, log = compiled(arch)
    for symbol in KERNELS:
        found, wanted = cubin.resources(binary, symbol), said(log, symbol)
        assert (found["local"], found["shared"]) == (wanted["local"], wanted["shared"])
        assert abs(found["registers"] - wanted["registers"]) <= 2  # the assembler tells an estimate
        assert bool(found["spills"]) == bool(wanted["spills"])
    assert cubin.resources(binary, "many")["spills"] > 100
    assert cubin.resources(binary, "exchange")["max_threads"] == 128
    assert cubin.resources(binary, "exchange")["shared"] == 1200


def test_threads_are_those_that_the_registers_allow():
    free, few = (cubin.resources(compiled("sm_90", n)[0], "many") for n in (128, 1024))
    assert few["max_threads"] == 1024 and free["max_threads"] == 128
    assert few["registers"] <= 64 < free["registers"] and few["spills"] and not free["spills"]
    indexed = cubin.resources(compiled("sm_90")[0], "indexed")
    assert (indexed["local"], indexed["spills"]) == (1200, 0)  # an array is no spill
    assert [cubin.threads_with(n) for n in (16, 64, 65, 128, 255)] == [1024, 1024, 896, 512, 256]


def test_a_cubin_of_another_form_tells_nothing():
    binary, _ = compiled("sm_90")
    assert cubin.resources(binary, "nothing") == {}
    assert cubin.resources(b"\x7fELF" + bytes(100), "many") == {}
    for length in range(0, len(binary), 977):
        assert isinstance(cubin.resources(binary[:length], "many"), dict)
    for at in range(0, len(binary), 331):
        damaged = binary[:at] + b"\xff" * 8 + binary[at + 8 :]
        assert isinstance(cubin.resources(damaged, "many"), dict)


# ------------------------------------------------------------------ in manifests


@pytest.fixture
def source(tmp_path):
    (tmp_path / "k.cu").write_text(TEXT)
    return Cuda("k.cu", folder=str(tmp_path), flags=["-DTHREADS=1024"])


@pytest.mark.long
def test_nvrtc_keeps_them_and_a_hit_reads_no_cubin(source, monkeypatch):
    variant = Variant("test::many", source, "many")
    entry = jit.ensure(variant, TARGET)
    wanted = cubin.resources(entry.read("kernel.cubin"), "many")
    assert entry.manifest.meta["resources"] == wanted and wanted["spills"]
    monkeypatch.setattr("jitkern.compilers.cuda.nvrtc_build.resources", None)
    assert jit.ensure(variant, TARGET).manifest.meta["resources"] == wanted


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
    assert hints.resources_of(entry)["dynamic_shared"] == entry.manifest.meta["smem"] > 0


# ------------------------------------------------------------------ explain


@pytest.fixture
def op(tmp_path):
    (tmp_path / "k.cu").write_text(TEXT)
    op = kernel(
        f"jitkern_cubin::k{next(_number)}(Tensor x) -> Tensor",
        cuda=Cuda(str(tmp_path / "k.cu"), flags=["-DTHREADS=1024"]),
    )

    @op.launch("cuda")
    def _(k, x):
        y = torch.empty_like(x)
        k.many(y, x, grid=1, block=128)
        k.exchange(y, x, grid=1, block=128)
        return y

    op.samples(lambda device: iter([torch.ones(200_000, device=device)]))
    return op


@pytest.mark.long
def test_explain_shows_them_and_hints_at_spills(op, cli):
    variants = needs_of(op, op.sources["cuda"][0], "cuda").variants
    for variant in variants:
        jit.ensure(variant, TARGET)
    out = cli("explain", op.name, "--target", str(TARGET))[1]
    assert re.search(r"  [0-9a-f]{8}  many  \d+ registers, \d+ spills and reloads, \d+ B of local "
                     r"memory, at most 1024 threads\n", out)  # fmt: skip
    assert re.search(
        r"  exchange  \d+ registers, 1200 B of shared memory, at most 128 threads\n", out
    )
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
    monkeypatch.setattr("jitkern.compilers.cuda.nvrtc_build.resources", lambda *_: {})
    variant = needs_of(op, op.sources["cuda"][0], "cuda").variants[0]
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
    variants = needs_of(op, op.sources["cuda"][0], "cuda").variants
    here = Target.current("cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    device = torch.zeros(1, device="cuda").device.index  # which makes the context
    for variant in variants:
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
