"""What only a GPU can show: streams, threads, graphs, launch failures, launch attributes."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from helpers import run_threads, waiting_gpu

import jitkern
import jitkern.ops
from jitkern.errors import LaunchError, NotCached

pytestmark = pytest.mark.gpu

SOURCE = """
#include <cooperative_groups.h>
__global__ void fill(int* out, long long n, int value) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}
__global__ void together(int* out) {
  auto grid = cooperative_groups::this_grid();
  if (grid.thread_rank() == 0) out[0] = 7;
  grid.sync();
  if (threadIdx.x == 0) out[1 + blockIdx.x] = out[0];
}
"""


@pytest.fixture
def launch(declared):
    """Declare an op `(Tensor x) -> Tensor` from a launch function on SOURCE."""
    return partial(declared, SOURCE)


def fill(k, x):
    out = torch.empty_like(x)
    k.fill(out, x.numel(), 5, grid=(x.numel() + 255) // 256, block=256)
    return out


X = torch.zeros(1000, dtype=torch.int32)


def test_the_current_stream_is_used(launch):
    op, x = launch(fill), X.cuda()
    op(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), waiting_gpu():
        out = op(x)
        assert not stream.query()
    assert (out == 5).all()


def test_a_thread_that_never_used_cuda_can_launch(launch):
    op, x, results = launch(fill), X.cuda(), []
    op(x)
    run_threads(*[lambda: results.append(op(x))] * 8)
    assert len(results) == 8 and all((out == 5).all() for out in results)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_miss_during_capture_is_refused_with_the_prewarm_hint(launch):
    op, x = launch(fill), X.cuda()
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(NotCached, match="graph is being captured.*jitkern prewarm"), graph:
        op(x)


def test_a_failed_launch_tells_its_configuration(launch):
    def bad(k, x):
        k.fill(x, x.numel(), 5, grid=(1, 70_000), block=32)  # beyond the 65,535 of y
        return torch.empty_like(x)

    op, x = launch(bad), X.cuda()
    gc.collect()
    before = torch.cuda.memory_allocated()
    says = r"CUDA error 1 .*grid=\(1, 70000, 1\) block=\(32, 1, 1\) smem=0"
    for _ in range(20):
        with pytest.raises(LaunchError, match=says):
            op(x)
    assert torch.cuda.memory_allocated() == before
    assert (launch(fill)(x) == 5).all()


def test_a_zero_grid_launches_nothing(launch):
    op = launch(fill)
    assert op(X[:0].cuda()).shape == (0,)


def test_a_cpu_tensor_among_cuda_ones_is_named(launch):
    def mixed(k, x):
        k.fill(torch.empty(4, dtype=torch.int32), 4, 5, grid=1, block=32)
        return torch.empty_like(x)

    says = r"argument 1 \(`.*`\) must be a tensor on cuda:0, got one on cpu"
    with pytest.raises(LaunchError, match=says):
        launch(mixed)(X.cuda())


def test_int64_is_not_truncated(launch):
    def far(k, x):
        out = torch.zeros_like(x)
        k.fill(out, 2**40 + 3, 5, grid=1, block=64)
        return out

    assert (launch(far)(X.cuda())[:64] == 5).all()


def test_more_shared_memory_than_there_is_is_refused(launch):
    def large(k, x):
        k.fill(x, x.numel(), 5, grid=1, block=256, smem=40_000_000)
        return torch.empty_like(x)

    with pytest.raises(LaunchError, match="bytes of shared memory"):
        launch(large)(X.cuda())


def test_cooperative_launch(launch):
    def together(k, x):
        out = torch.zeros_like(x)
        k.together(out, grid=16, block=64, cooperative=True)
        return out

    assert (launch(together)(X[:17].cuda()) == 7).all()


def test_a_warm_start_needs_no_compiler_and_imports_no_triton(run_python):
    code = """
import subprocess, sys, torch
torch.zeros(1, device="cuda")
import jitkern.ops, jitkern
from jitkern import config
if {warm}:
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton": raise ImportError("hidden")
    sys.meta_path.insert(0, Hidden())
    def refuse(*a, **k): raise AssertionError("a subprocess")
    subprocess.Popen.__init__ = refuse
x = torch.randn(4, 48, device="cuda")
for kind in ("nvrtc", "triton"):
    with config.using(prefer=kind):
        assert torch.equal(jitkern.ops.vec_add(x, x), x + x)
        torch.testing.assert_close(jitkern.ops.softmax(x), torch.softmax(x, -1))
print(jitkern.stats()["compiles"], "triton" in sys.modules)
"""
    cold = run_python(code.format(warm=False))
    assert cold.stdout.startswith("4 "), cold.stderr
    warm = run_python(code.format(warm=True), PATH="/nonexistent", JITKERN_COMPILE="never")
    assert warm.stdout == "0 False\n", warm.stderr


@pytest.mark.parametrize("kind", ["nvrtc", "triton"])
def test_a_record_serves_the_first_call_of_a_later_process(run_python, kind):
    code = """
import sys, torch, jitkern.ops
torch.zeros(1, device="cuda")
ops = jitkern.ops.vec_add, jitkern.ops.softmax
def check(x):
    assert torch.equal(ops[0](x, x), x + x)
    torch.testing.assert_close(ops[1](x), torch.softmax(x, -1))
check(torch.randn(4, 48, device="cuda"))
print("jitkern.launch.runner" in sys.modules)
check(torch.randn(7, 64, device="cuda"))
with torch.cuda.stream(torch.cuda.Stream()):
    check(torch.randn(3, 51, device="cuda"))
"""
    first, last = [run_python(code, JITKERN_PREFER=kind) for _ in range(2)]
    assert first.stdout == "True\n", first.stderr
    assert last.stdout == "False\n", last.stderr


ACCUMULATES = """
import triton
import triton.language as tl

@triton.autotune(
    [triton.Config({"B": size}) for size in (64, 128, 256)],
    key=["n"], reset_to_zero=["sums"], restore_value=["x"],
)
@triton.jit
def accumulate(sums, x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    values = tl.load(x + at, at < n, 0)
    tl.atomic_add(sums + at, values, at < n)
    tl.store(x + at, values + 1, at < n)
"""


def test_tuning_resets_to_zero_and_restores_what_is_named(tmp_path):
    (tmp_path / "k.py").write_text(ACCUMULATES)
    accumulate = jitkern.triton_kernel(f"{tmp_path / 'k.py'}:accumulate")
    x, n = torch.arange(1000.0, device="cuda"), 1000
    sums = torch.zeros_like(x)
    for step in range(3):  # the first call measures
        sums.zero_()
        accumulate[lambda chosen: ((n + chosen["B"] - 1) // chosen["B"],)](sums, x, n)
        assert sums.equal(torch.arange(1000.0, device="cuda") + step)
        assert x.equal(sums + 1)
