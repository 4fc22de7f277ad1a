"""What a launch function says about the device and the launch, on a real GPU: by Python, then by stub."""

from __future__ import annotations

import itertools
from functools import partial

import helpers
import pytest
import torch

from jitkern.declare import Cuda, kernel
from jitkern.launch.device_facts import ATTRIBUTES
from jitkern.runtime import binding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
]
served = partial(helpers.served, device="cuda")
slot_of = partial(helpers.slot_of, device="cuda")
_number = itertools.count()

FACTS = """
__global__ void facts(long long *y, long long a, long long b, long long c, long long d, long long e) {
  y[0] = a, y[1] = b, y[2] = c, y[3] = d, y[4] = e;
}
"""


@pytest.fixture
def declared(tmp_path):
    """Declare an op for CUDA alone, from the text of its kernels and its launch function."""

    def declare(signature, text, function, **source):
        path = tmp_path / f"k{next(_number)}.cu"
        path.write_text(text)
        op = kernel(
            f"jitkern_gpu_device::k{next(_number)}{signature}", cuda=Cuda(str(path), **source)
        )
        op.launch("cuda")(function)
        return op

    return declare


def test_facts_are_those_of_the_device(declared):
    def launch(k, x):
        y = torch.empty(5, dtype=torch.int64, device=x.device)
        shared = k.shared_memory_per_block, k.shared_memory_per_multiprocessor
        k.facts(
            y,
            k.multiprocessors,
            k.threads_per_multiprocessor,
            *shared,
            k.l2_cache_size,
            grid=1,
            block=1,
        )
        return y

    op, x = declared("(Tensor x) -> Tensor", FACTS, launch), torch.ones(3, device="cuda")
    device = torch.cuda.get_device_properties(x.device)
    wanted = [
        device.multi_processor_count, device.max_threads_per_multi_processor,
        device.shared_memory_per_block_optin, device.shared_memory_per_multiprocessor, device.L2_cache_size,
    ]  # fmt: skip
    assert len(wanted) == len(ATTRIBUTES)
    for _ in range(2):
        assert served(op, x).tolist() == wanted
    assert slot_of(op).misses == 1
