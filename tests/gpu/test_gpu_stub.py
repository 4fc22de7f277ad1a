"""Calls that a stub serves on a real GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch
from helpers import run_threads

import jitkern.ops
from jitkern import jit
from jitkern.declare import Triton
from jitkern.launch import measure
from jitkern.runtime import binding, specializer
from jitkern.runtime.programs import SLOTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
]

programs_of = partial(helpers.programs_of, device="cuda")
served = partial(helpers.served, device="cuda")


def test_capture_and_replay_by_stub():
    x, y = torch.randn(2, 64, 32, device="cuda")
    served(jitkern.ops.vec_add, x, y)
    served(jitkern.ops.softmax, x)
    before = [slot.misses for slot in SLOTS]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = jitkern.ops.softmax(jitkern.ops.vec_add(x, y))
    assert [slot.misses for slot in SLOTS] == before
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, torch.softmax(x + y, -1))


def test_two_streams_do_not_mix():
    x = torch.randn(64, 256, device="cuda")
    served(jitkern.ops.vec_add, x, x)
    big = torch.randn(2048, 2048, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number in range(20):
        outs = []
        for stream in streams:
            with torch.cuda.stream(stream):
                late = (big @ big)[:64, :256] * 0 + number
                outs.append(jitkern.ops.vec_add(late, late))
        torch.cuda.synchronize()
        assert all(torch.equal(out, torch.full_like(out, 2.0 * number)) for out in outs)


def test_threads_from_cold_agree():
    wrong = []

    def work(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        for i in range(30):
            shape = (3 + (seed * i) % 5, 16 * (1 + i % 4) + i % 3)
            dtype = (torch.float32, torch.float64)[i & 1]
            x = torch.randn(shape, device="cuda", dtype=dtype, generator=generator)
            if not torch.equal(jitkern.ops.vec_add(x, x), x + x):
                wrong.append(shape)

    run_threads(*(partial(work, seed) for seed in range(8)))
    assert not wrong


@pytest.mark.usefixtures("two_gpus")
def test_a_tensor_of_another_gpu_is_refused_by_the_stub():
    x, y = torch.randn(8, device="cuda:0"), torch.randn(8, device="cuda:1")
    served(jitkern.ops.vec_add, x, x)
    with pytest.raises(RuntimeError, match="cuda:1"):
        jitkern.ops.vec_add(x, y)


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_is_served_on_itself():
    for index in (0, 1, 0, 1):
        x = torch.randn(8, 8, device=f"cuda:{index}")
        assert torch.equal(served(jitkern.ops.vec_add, x, x), x + x)
        torch.testing.assert_close(served(jitkern.ops.softmax, x), torch.softmax(x, -1))
    assert torch.cuda.current_device() == 0


def test_a_variant_serves_only_the_device_it_was_traced_for():
    x = torch.randn(3, 3, 3, device="cuda")
    served(jitkern.ops.vec_add, x, x)
    known = programs_of(jitkern.ops.vec_add).known
    served_on = {index for _, (_, index, *_) in known}
    assert torch.cuda.current_device() in served_on
    assert served_on <= set(range(torch.cuda.device_count()))


def test_inductor_fuses_what_is_fusible_and_calls_the_rest():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(8, 32, device="cuda")
    for op, inside in ((jitkern.ops.vec_add, False), (jitkern.ops.softmax, True)):
        args = (x,) if op.name.endswith("softmax") else (x, x)
        compiled = torch.compile(lambda *a, op=op: op(*a).relu(), fullgraph=True)
        result, code = run_and_get_code(compiled, *args)
        torch.testing.assert_close(result, op.run_reference(*args).relu())
        assert any("jitkern" in text for text in code) == inside


def test_the_profiler_shows_the_op_and_the_kernel():
    x = torch.randn(8, 32, device="cuda")
    served(jitkern.ops.softmax, x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        jitkern.ops.softmax(x)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "jitkern::softmax" in names
    assert any("softmax" in name and name != "jitkern::softmax" for name in names), names


REVERSE = """
__global__ void reverse(int* out, const int* x, int n) {
  extern __shared__ int row[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = row[n - 1 - i];
}
"""


def test_shared_memory_that_grows_beyond_48_kib_by_stub(declared):
    def launch(k, x):
        out = torch.empty_like(x)
        k.reverse(out, x, x.numel(), grid=1, block=256, smem=4 * x.numel())
        return out

    x = torch.arange(25_000, dtype=torch.int32, device="cuda")
    assert torch.equal(declared(REVERSE, launch, flags=["-DFIRST"])(x), x.flip(0))
    op = declared(REVERSE, launch)
    for size in (100, 13000, 20000, 25000, 100):
        x = torch.arange(size, dtype=torch.int32, device="cuda")
        assert torch.equal(served(op, x), x.flip(0))


def test_shared_memory_that_grows_in_a_second_launch(declared):
    def launch(k, x):
        first, out = torch.empty_like(x), torch.empty_like(x)
        k.reverse(first, x, 10, grid=1, block=32, smem=40)
        k.reverse(out, x, x.numel(), grid=1, block=256, smem=4 * x.numel())
        return out

    op = declared(REVERSE, launch)
    for size in (100, 20000, 25000):
        x = torch.arange(size, dtype=torch.int32, device="cuda")
        assert torch.equal(op(x), x.flip(0))
        specializer.settle()
        assert torch.equal(op(x), x.flip(0))


TRITON = """
import triton
import triton.language as tl

@triton.autotune(
    configs=[triton.Config({"B": 128}, num_warps=2), triton.Config({"B": 1024}, num_warps=4)],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["B"] == 0})
@triton.jit
def double(out, x, n, B: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        tl.store(out + i, tl.load(x + i) * 2)
    else:
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
"""


@helpers.needs_triton
def test_an_autotuned_kernel_is_measured_once_and_served_by_stub(
    declared, tmp_path, monkeypatch, run_python
):
    (tmp_path / "t.py").write_text(TRITON)
    measured = []
    milliseconds = measure.milliseconds

    def noted(*args, cold):
        measured.append(1)
        return milliseconds(*args, cold=cold)

    monkeypatch.setattr(measure, "milliseconds", noted)

    def launch(k, x):
        out = torch.empty_like(x)
        n = x.numel()
        k.double(out, x, n, grid=lambda meta: (-(-n // meta["B"]),))
        return out

    for _ in range(2):
        op = declared("", launch, source=Triton(str(tmp_path / "t.py")))
        for size in (1000, 2048):
            x = torch.randn(size, device="cuda")
            assert torch.equal(served(op, x), 2 * x)
    assert len(measured) == 2 * 2 * 2  # configurations, sizes, ops
    again = autotune_again(op, run_python)
    assert again.returncode == 0, again.stderr


def autotune_again(op, run_python):
    """The choices of this process, in another one that may not measure."""
    code = (
        "import torch\nfrom jitkern.source.kinds import Triton\n"
        "from jitkern.launch import autotune, declared, measure\nfrom jitkern.target import Target\n"
        "def refuse(*_, **__): raise AssertionError('measured')\n"
        "measure.milliseconds = refuse\n"
        f"source = Triton(**{op.sources['cuda'][0].fields()!r})\n"
        "target = Target.current('cuda')\n"
        f"configs = declared.declared_in({op.name!r}, source, 'double', target).configs\n"
        "assert len(configs) == 2\n"
        "s = (('n', 1000), ('out', 'f32'), ('x', 'f32'))\n"
        f"autotune.choose({op.name!r}, source, target, torch.device('cuda', 0), "
        "autotune.Question('double', configs, s), None)\n"
    )
    return run_python(code)


DESCRIPTOR = """
import triton
import triton.language as tl

@triton.jit
def copy(out, x, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    row = tl.program_id(0) * BM
    target.store([row, 0], source.load([row, 0]))
"""


@helpers.needs_triton
@pytest.mark.usefixtures("hopper")
def test_triton_scratch_memory_is_allocated(declared, tmp_path):
    (tmp_path / "d.py").write_text(DESCRIPTOR)

    def launch(k, x):
        out = torch.empty_like(x)
        rows, cols = x.shape
        k.copy[{"BM": 16, "BN": 64}](out, x, rows, cols, grid=rows // 16)
        return out

    op = declared("", launch, source=Triton(str(tmp_path / "d.py")))
    x = torch.randn(64, 64, device="cuda")
    for _ in range(3):
        assert torch.equal(served(op, x), x)
    metas = [entry.manifest.meta for _, entry in jit.open_cache().entries() if entry.op == op.name]
    assert any(any(meta.get("scratch", ())) for meta in metas)


@pytest.mark.long
def test_compute_sanitizer_finds_nothing(tmp_path):
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("needs compute-sanitizer")
    code = (
        "import torch, jitkern.ops as ops\nfrom jitkern.runtime import specializer\n"
        "for shape in ((64, 100), (3, 17), (1, 1)):\n"
        "    x = torch.randn(shape, device='cuda')\n"
        "    for _ in range(2):\n"
        "        a, b, c = ops.vec_add(x, x), ops.softmax(x), ops.muladd(x, x, x)\n"
        "        specializer.settle()\n"
        "torch.cuda.synchronize(); print('done')\n"
    )
    program = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.check_output(program) == b"done\n"
    checked = [tool, "--error-exitcode", "9", *program]
    done = subprocess.run(checked, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:]
