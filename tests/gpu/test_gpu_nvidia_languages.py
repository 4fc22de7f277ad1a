"""Kernels in cuTile and the CuTe DSL on a GPU, from bundles that a machine without one has built.

See cutile_ops.py and cute_ops.py.
"""

import importlib.util
import os
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch
from helpers import run_threads
from nvidia_ops import matrices

from jitkern import cache_tools
from jitkern.jit import open_cache

pytestmark = pytest.mark.gpu
LANGUAGES = {"cutile": "cutile_cache", "cute": "nvidia_cutlass_dsl"}  # each with its package
served = partial(helpers.served, device="cuda")


def bundle_of(language):
    return os.environ.get(f"{language.upper()}_BUNDLE", "")


@pytest.fixture(params=LANGUAGES)
def language(request):
    if not bundle_of(request.param) and not importlib.util.find_spec(LANGUAGES[request.param]):
        name = request.param
        pytest.skip(f"needs jitkern[{name}], or {name.upper()}_BUNDLE: see tests/gpu/{name}_ops.py")
    return request.param


@pytest.fixture(autouse=True)
def ops(language, cache_dir, monkeypatch):
    """The ops, in a cache that holds the bundle."""
    if bundle := bundle_of(language):
        cache_tools.unpack(open_cache(), Path(bundle))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module(f"{language}_ops")


def test_a_gemm_is_as_exact_as_torchs(ops):
    """In cuTile its tiles need more than 48 KB of shared memory."""
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
    for x in matrices("cuda"):
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

    run_threads(*[call] * 4)
    torch.cuda.synchronize()
    assert len(found) == 4
    assert all(torch.equal(out, x * 0.5) for out in found)


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_launches_on_itself(ops):
    for device in ("cuda:1", "cuda:0"):
        x = torch.randn(1000, device=device)
        assert torch.equal(ops.scale(x, 0.5), x * 0.5)


def test_a_process_needs_the_bundle_alone(ops, language, run_python):
    """No language of NVIDIA's is found, and nothing is compiled."""
    if not bundle_of(language):
        pytest.skip(f"needs {language.upper()}_BUNDLE")
    code = (
        "import sys; sys.modules['cuda'] = sys.modules['cutlass'] = None\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import {language}_ops as ops, torch\n"
        "for x, by in ops.scale.sample_inputs('cuda'):\n"
        "    assert torch.equal(ops.scale(x, by), x * by)\n"
        "from jitkern.errors import NotCached\n"
        "try:\n    ops.scale(x.half(), by)\n"
        "except NotCached as e:\n    print(e)\n"
    )
    done = run_python(code, JITKERN_COMPILE="never")
    assert done.returncode == 0, done.stderr
    assert "jitkern prewarm" in done.stdout
