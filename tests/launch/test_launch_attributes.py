"""Dynamic shared memory, clusters of 16 and the carve-out: set once for a kernel and a device."""

import ctypes

import pytest
import torch
from fake_gpu import TARGET
from helpers import needs_nvrtc
from tuning import op_of

from jitkern import jit
from jitkern.declare import Cuda
from jitkern.loading.cuda_driver import CudaFunction
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.call_traces import refused_by

SHARED, CARVEOUT, NON_PORTABLE = 8, 9, 14
CU = "__global__ void k(float *y, const float *x) {}\n"


def on_cuda(asked=lambda n: {}):
    def launch(k, x, n):
        y = torch.empty_like(x)
        k.k(y, x, grid=16, block=32, **asked(n))
        return y

    return op_of(
        Cuda(text=CU), launch, schema="(Tensor x, int n) -> Tensor",
        sample=lambda device: (torch.ones(8, device=device), 100),
    )  # fmt: skip


META = torch.ones(8, device="meta")
X = torch.ones(8)


def attributes(gpu):
    made = gpu.array("set", ctypes.c_int, 16)
    return {number: made[number] for number in (SHARED, CARVEOUT, NON_PORTABLE) if made[number]}


@pytest.mark.long
@needs_nvrtc
def test_a_program_asks_for_shared_memory_once_never_for_less(gpu):
    gpu.learn(on_cuda(lambda n: {"smem": n * 1024}), (META, 100))
    # With static shared memory, 40 KB may be more than 48.
    limits = [(10, 0), (40, 40), (100, 100), (60, 100), (100, 100), (200, 200), (100, 200)]
    for n, limit in limits:
        assert gpu.call(X, n)
        assert attributes(gpu) == ({SHARED: limit * 1024} if limit else {})
    assert gpu.sets == 3


@pytest.mark.long
@needs_nvrtc
def test_a_program_leaves_pythons_higher_limit_alone(gpu):
    gpu.learn(on_cuda(lambda n: {"smem": n * 1024}), (META, 100))
    python = CudaFunction(b"", {"parameters": ["*f32", "*f32"], "symbol": "k"}, "`k`", ("", "", ""))
    one = (1, 1, 1)
    python.launch([0, 0], 0, 0, one, one, 200 * 1024, None, False, False)
    assert gpu.call(X, 100)
    assert (gpu.sets, attributes(gpu)) == (1, {SHARED: 200 * 1024})


@pytest.mark.long
@needs_nvrtc
def test_a_program_allows_clusters_of_16_and_a_carve_out_once(gpu):
    gpu.learn(on_cuda(lambda n: {"cluster": n, "carveout": 100 - n}), (META, 8))
    for n, sets, wide in ((8, 1, {}), (16, 3, {NON_PORTABLE: 1}), (2, 4, {NON_PORTABLE: 1})):
        for _ in range(2):
            assert gpu.call(X, n)
            assert gpu.array("cluster", ctypes.c_uint, 3) == [n, 1, 1]
            assert (gpu.sets, attributes(gpu)) == (sets, {CARVEOUT: 100 - n, **wide})
    assert gpu.call(X, 101) is None  # a carve-out below 0: the message is Python's


@pytest.mark.long
@needs_nvrtc
def test_a_launch_that_names_none_of_them_sets_nothing(gpu):
    gpu.learn(on_cuda(), (META, 8))
    assert gpu.call(X, 8) and not gpu.sets and not gpu.queries


def test_the_python_launcher_sets_each_once(gpu):
    function = CudaFunction(b"", {"parameters": [], "symbol": "k"}, "`k`", ("", "", ""))
    one = (1, 1, 1)
    for _ in range(2):
        function.launch([], 0, 0, (16, 1, 1), one, 100 << 10, (16, 1, 1), False, False, 30)
        function.launch([], 0, 0, (16, 1, 1), one, 60 << 10, (8, 1, 1), False, False)
    assert attributes(gpu) == {SHARED: 100 << 10, CARVEOUT: 30, NON_PORTABLE: 1}
    assert gpu.sets == 3
    function.launch([], 0, 0, one, one, 0, None, False, False, 31)
    assert gpu.sets == 4 and gpu.launches == 5


@needs_nvrtc
@pytest.mark.parametrize("carveout", [-1, 101, 2.5, True], ids=str)
def test_a_carve_out_that_is_no_percentage_is_refused(carveout):
    op = on_cuda(lambda n: {"carveout": carveout})
    source = op.sources["cuda"][0]
    for variant in needs_of(op, source, "cuda", TARGET).variants:
        jit.ensure(variant, TARGET)
    (reason,) = refused_by(op, source, TARGET, [(META, 8)], {})
    assert "`carveout` must be the share of shared memory in percent" in reason
