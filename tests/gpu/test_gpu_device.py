"""What a launch function says about the device and the launch, on a real GPU: by Python, then by stub."""

from __future__ import annotations

from functools import partial

import helpers
import pytest
import torch
from helpers import run_threads

from jitkern.errors import LaunchError
from jitkern.launch.resources.device_facts import ATTRIBUTES
from jitkern.runtime import binding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
]
served = partial(helpers.served, device="cuda")
programs_of = partial(helpers.programs_of, device="cuda")

FACTS = """
__global__ void facts(long long *y, long long a, long long b, long long c, long long d, long long e) {
  y[0] = a, y[1] = b, y[2] = c, y[3] = d, y[4] = e;
}
"""


def test_facts_are_those_of_the_device(declared):
    def launch(k, x):
        y = torch.empty(5, dtype=torch.int64, device=x.device)
        shared = k.shared_memory_per_block, k.shared_memory_per_multiprocessor
        facts = k.multiprocessors, k.threads_per_multiprocessor, *shared, k.l2_cache_size
        k.facts(y, *facts, grid=1, block=1)
        return y

    op, x = declared(FACTS, launch), torch.ones(3, device="cuda")
    device = torch.cuda.get_device_properties(x.device)
    wanted = [
        device.multi_processor_count, device.max_threads_per_multi_processor,
        device.shared_memory_per_block_optin, device.shared_memory_per_multiprocessor, device.L2_cache_size,
    ]  # fmt: skip
    assert len(wanted) == len(ATTRIBUTES)
    for _ in range(2):
        assert served(op, x).tolist() == wanted
    assert programs_of(op).misses == 1


# ------------------------------------------------------------------ workspaces

TOTAL = """
// All blocks add to a sum in the workspace; the last one writes it, and leaves zeros behind.
__global__ void total(double *y, double *sum, int *done, const float *x, long long n) {
  double mine = 0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    mine += x[i];
  atomicAdd(sum, mine);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(done, 1) == gridDim.x - 1) {
    __threadfence();
    *y = *(volatile double *)sum;
    *sum = 0;
    *done = 0;
  }
}
"""


def total(k, x, room):
    y = torch.empty(1, dtype=torch.float64, device=x.device)
    sums = k.workspace(8 * room, dtype=torch.float64)
    k.total(y, sums, k.workspace(4, dtype=torch.int32), x, x.numel(), grid=64, block=64)
    return y


SIGNATURE = "(Tensor x, int room=1) -> Tensor"


def test_a_workspace_stays_zeroed_from_call_to_call(declared):
    op, x = declared(TOTAL, total, SIGNATURE), torch.ones(10_000, device="cuda")
    served(op, x)
    before = programs_of(op).misses
    assert [op(x).item() for _ in range(20)] == [10_000.0] * 20
    assert programs_of(op).misses == before
    assert op(x, 100_000).item() == 10_000  # Python makes a larger one
    assert programs_of(op).misses == before + 1
    assert op(x, 100_000).item() == op(x).item() == 10_000
    assert programs_of(op).misses == before + 1


def test_streams_and_threads_share_no_workspace(declared):
    op, x = declared(TOTAL, total, SIGNATURE), torch.ones(1 << 20, device="cuda")
    served(op, x)
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            x.sum().item()
            results = [op(x, room) for room in (1, 1, 5000, 1, 9000) * 10]
            wrong.extend(r.item() for r in results if r.item() != 1 << 20)

    torch.cuda.synchronize()
    run_threads(*[work] * 6)
    assert not wrong


def test_the_first_call_on_a_stream_does_not_wait(declared):
    op, x = declared(TOTAL, total, SIGNATURE), torch.ones(1 << 20, device="cuda")
    served(op, x)
    torch.cuda.synchronize()
    results = []
    with helpers.refusing_to_wait():
        for _ in range(40):  # PyTorch has 32 streams: some serve again, with room for more
            with torch.cuda.stream(torch.cuda.Stream()):
                results += [op(x, room) for room in (1, 5000, 9000, 1)]
    torch.cuda.synchronize()
    assert {r.item() for r in results} == {1 << 20}


def test_a_captured_graph_has_a_workspace_of_its_own(declared):
    op, x = declared(TOTAL, total, SIGNATURE), torch.ones(1 << 20, device="cuda")
    served(op, x)
    graphs, results = [], []
    for room in (1, 50_000):  # the second is larger than any workspace so far
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([op(x, room), op(x, room)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs):  # beside each other, and beside eager calls
            with torch.cuda.stream(stream):
                graph.replay()
        assert op(x).item() == 1 << 20
    torch.cuda.synchronize()
    assert all(y.item() == 1 << 20 for pair in results for y in pair)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Torch's own first graph
def test_a_workspace_under_reduce_overhead(declared):
    op, x = declared(TOTAL, total, SIGNATURE), torch.ones(1 << 16, device="cuda")
    served(op, x)
    compiled = torch.compile(lambda x: op(x * 2) + 1, mode="reduce-overhead", fullgraph=True)
    assert [compiled(x).item() for _ in range(5)] == [(2 << 16) + 1] * 5


# ------------------------------------------------------------------ features of one arch alone

WARPGROUP = """
__global__ void hop(float *y, int n) {
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  if (threadIdx.x < n) y[threadIdx.x] = 2;
}
"""


def test_a_kernel_for_one_arch_alone_runs(declared):
    def launch(k, x):
        y = torch.empty_like(x)
        k.hop(y, x.numel(), grid=1, block=128)
        return y

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    op = declared(WARPGROUP, launch, arch_specific=True)
    assert (served(op, torch.ones(100, device="cuda")) == 2).all()


# ------------------------------------------------------------------ attributes of launches

RANKS = """
#include <cooperative_groups.h>
extern __shared__ int row[];
__global__ void ranks(int *out, int n) {
  auto cluster = cooperative_groups::this_cluster();
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = cluster.num_blocks() * 1000 + cluster.block_rank() + (n ? row[n - 1] - n + 1 : 0);
}
"""


@pytest.mark.usefixtures("hopper")
def test_clusters_of_16_with_shared_memory_and_a_carve_out(declared):
    def launch(k, x, cluster, kib, percent):
        out = torch.empty(32, dtype=torch.int32, device=x.device)
        k.ranks(
            out, kib * 256, grid=32, block=32, smem=kib * 1024, cluster=cluster, carveout=percent
        )
        return out

    op = declared(RANKS, launch, "(Tensor x, int cluster, int kib, int percent) -> Tensor")
    x = torch.ones(1, device="cuda")
    cases = ((16, 8, 50), (2, 100, 100), (16, 8, 0), (8, 60, 90), (16, 100, 100))
    for cluster, kib, percent in cases:
        wanted = [cluster * 1000 + block % cluster for block in range(32)]
        for _ in range(3):
            assert served(op, x, cluster, kib, percent).tolist() == wanted


# ------------------------------------------------------------------ tensor maps

TILE = """
#include <cuda.h>

// One block copies one tile by TMA and stores it, with the swizzle of 16-byte pieces undone.
template <typename T, int ROWS, int COLUMNS, int SPAN>
__global__ void tile(T *out, const __grid_constant__ CUtensorMap map, int row, int column) {
  __shared__ alignas(1024) T tile[ROWS * COLUMNS];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned to = (unsigned)__cvta_generic_to_shared(tile);
  const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"((unsigned)sizeof tile) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(at)
        : "memory");
  }
  __syncthreads();
  asm volatile(
      "{\\n.reg .pred done;\\nAGAIN:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\\n@!done bra AGAIN;\\n}" ::"r"(at)
      : "memory");
  constexpr int PIECE = 16 / sizeof(T);
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {
    int piece = i / PIECE;  // in rows of 128 bytes, which have eight
    if (SPAN == 128) piece ^= piece / 8 % 8;
    out[i] = tile[piece * PIECE + i % PIECE];
  }
}
"""
OF_TILES = "(Tensor x, int row, int column) -> Tensor"


def tiled(rows, columns, span):
    def launch(k, x, row, column):
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        swizzle = "none" if span == 0 else "128B"
        k.tile[{"T": x.dtype, "ROWS": rows, "COLUMNS": columns, "SPAN": span}](
            out, k.tensor_map(x, (rows, columns), swizzle=swizzle, l2_promotion="128B"), row, column,
            grid=1, block=128,
        )  # fmt: skip
        return out

    return launch


def tile_of(x, rows, columns, row, column):
    """What TMA copies: zeros beyond the tensor."""
    wanted = torch.zeros(rows, columns, dtype=x.dtype, device=x.device)
    part = x[row : row + rows, column : column + columns]
    wanted[: part.shape[0], : part.shape[1]] = part
    return wanted


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("arch_specific", [False, True], ids=["sm_90", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "columns", "span"),
    [(torch.bfloat16, 64, 128), (torch.float32, 32, 0)],
    ids=["128B", "none"],
)
def test_a_tile_is_copied_by_tma(declared, dtype, columns, span, arch_specific):
    op = declared(TILE, tiled(16, columns, span), OF_TILES, arch_specific=arch_specific)
    for shape in ((100, 256), (33, 64), (2048, 1024)):
        x = torch.randn(shape, device="cuda").to(dtype)
        for row, column in ((0, 0), (16, 0), (24, 32), (shape[0] - 5, shape[1] - 24)):
            wanted = tile_of(x, 16, columns, row, column)
            for _ in range(2):
                assert torch.equal(served(op, x, row, column), wanted)
    wide = torch.randn(64, 512, device="cuda").to(dtype)
    view = wide[7:, 64:320]
    assert torch.equal(served(op, view, 3, 8), tile_of(view, 16, columns, 3, 8))


@pytest.mark.usefixtures("hopper")
def test_a_tile_under_capture(declared):
    op = declared(TILE, tiled(16, 64, 128), OF_TILES)
    x = torch.randn(64, 64, device="cuda").bfloat16()
    served(op, x, 3, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, 3, 0)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, tile_of(x, 16, 64, 3, 0))


@pytest.mark.usefixtures("hopper")
def test_a_tensor_that_tma_cannot_copy_is_refused(declared):
    op = declared(TILE, tiled(16, 64, 128), OF_TILES)
    x = torch.randn(64, 64, device="cuda").bfloat16()
    served(op, x, 0, 0)
    with pytest.raises(LaunchError, match=r"strides of x but the last.*\(65, 1\)"):
        op(torch.randn(64, 65, device="cuda").bfloat16(), 0, 0)
