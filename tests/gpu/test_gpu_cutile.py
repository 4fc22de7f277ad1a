"""Kernels in cuTile on a GPU, from a bundle that a machine without one has built; see cutile_ops.py."""

import importlib.util
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch

from jitkern import cache_tools
from jitkern.jit import open_cache

BUNDLE = os.environ.get("CUTILE_BUNDLE", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not BUNDLE and not importlib.util.find_spec("cutile_cache"),
        reason="needs cuda-tile, or CUTILE_BUNDLE: see tests/gpu/cutile_ops.py",
    ),
]
served = partial(helpers.served, device="cuda")


@pytest.fixture(autouse=True)
def ops(cache_dir, monkeypatch):
    """The ops, in a cache that holds the bundle."""
    if BUNDLE:
        cache_tools.unpack(open_cache(), Path(BUNDLE))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import cutile_ops

    return cutile_ops


def test_a_gemm_is_as_exact_as_torchs(ops):
    """Its tiles need more than 48 KB of shared memory."""
    for a, b in ops.gemm.sample_inputs("cuda"):
        exact = a.double() @ b.double()
        wrong, torchs = ((out.double() - exact).abs().max() for out in (ops.gemm(a, b), a @ b))
        assert wrong <= 2 * torchs + 1e-6, a.shape


def test_a_call_is_served_by_c(ops):
    for x, by in ops.scale.sample_inputs("cuda"):
        assert torch.equal(served(ops.scale, x, by), x * by)


def test_a_kernel_of_clusters_is_launched_by_tiles(ops):
    for x, by in ops.scale_by_pairs.sample_inputs("cuda"):
        assert torch.equal(served(ops.scale_by_pairs, x, by), x * by)


def test_strides_of_any_kind_are_read(ops):
    for x in ops.matrices("cuda"):
        torch.testing.assert_close(ops.row_sums(x), x.float().sum(1), rtol=1e-4, atol=1e-3)


def test_an_empty_tensor_launches_nothing(ops):
    assert ops.scale(torch.empty(0, device="cuda"), 0.5).shape == (0,)


def test_a_gradient_and_a_compiled_graph_are_right(ops):
    x = torch.randn(1000, device="cuda", requires_grad=True)
    ops.scale(x, 0.5).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))
    compiled = torch.compile(lambda x: ops.scale(x + 1, 0.5), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.detach()), (x.detach() + 1) * 0.5)


def test_a_captured_graph_replays_the_kernel(ops):
    x = torch.randn(1 << 20, device="cuda")
    ops.scale(x, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.scale(x, 0.5)
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, torch.full_like(x, 1.5))


def test_streams_and_threads_launch_alike(ops):
    x, found = torch.randn(1 << 20, device="cuda"), []
    torch.cuda.synchronize()

    def call():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(ops.scale(x, 0.5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 4
    assert all(torch.equal(out, x * 0.5) for out in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_launches_on_itself(ops):
    for device in ("cuda:1", "cuda:0"):
        x = torch.randn(1000, device=device)
        assert torch.equal(ops.scale(x, 0.5), x * 0.5)


@pytest.mark.skipif(not BUNDLE, reason="needs CUTILE_BUNDLE")
def test_a_process_needs_the_bundle_alone(ops, cache_dir):
    """No cuTile is found, and nothing is compiled."""
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import cutile_ops, torch\n"
        "for x, by in cutile_ops.scale.sample_inputs('cuda'):\n"
        "    assert torch.equal(cutile_ops.scale(x, by), x * by)\n"
        "from jitkern.errors import NotCached\n"
        "try:\n    cutile_ops.scale(x.half(), by)\n"
        "except NotCached as e:\n    print(e)\n"
    )
    environment = {**os.environ, "JITKERN_COMPILE": "never"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "jitkern prewarm" in done.stdout
