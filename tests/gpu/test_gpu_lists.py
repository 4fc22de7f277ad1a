"""Lists of tensors in one launch on a real GPU, by the stub and by the Python launcher."""

from __future__ import annotations

import itertools
from functools import partial

import helpers
import pytest
import torch

from jitkern.declare import Cuda, kernel
from jitkern.runtime import binding, specializer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
]
_number = itertools.count()
programs_of = partial(helpers.programs_of, device="cuda")
STEP = """
#include "tensor_table.h"
template <typename T, typename U, int N>
__global__ void step(const __grid_constant__ jitkern::Table<T, N> p,
                     const __grid_constant__ jitkern::Pointers<const U, N> g, float lr) {
  const jitkern::Chunk c = p.chunk(blockIdx.x, 1000);
  for (long long i = c.begin + threadIdx.x; i < c.end; i += blockDim.x)
    p.data[c.tensor][i] = (T)((float)p.data[c.tensor][i] - lr * (float)g.data[c.tensor][i]);
}
"""


@pytest.fixture
def step():
    name = f"jitkern_test::gpu_step{next(_number)}_"
    op = kernel(f"{name}(Tensor(a!)[] ps, Tensor[] gs, float lr) -> ()", cuda=Cuda(text=STEP))

    @op.launch("cuda")
    def _(k, ps, gs, lr):
        for p, g in k.tables(ps, gs, chunk=1000):
            template = {"T": p.dtype, "U": g.dtype, "N": p.capacity}
            k.step[template](p, g, lr, grid=p.chunks, block=256)

    return op


def lists(count, *dtypes):
    generator = torch.Generator(device="cuda").manual_seed(count)
    kinds = itertools.cycle(dtypes)
    ps = [
        torch.randn(i * 37 % 2500, device="cuda", generator=generator).to(next(kinds))
        for i in range(count)
    ]
    gs = [torch.randn(p.shape, device="cuda", generator=generator).bfloat16() for p in ps]
    return ps, gs


def stepped(ps, gs, lr):
    return [(p.float() - lr * g.float()).to(p.dtype) for p, g in zip(ps, gs)]


@pytest.mark.parametrize("count", [1, 33, 300, 600, 1500])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float16)], ids=len)
def test_a_list_is_updated_the_same_by_stub_and_by_python(step, count, dtypes):
    ps, gs = lists(count, *dtypes)
    wanted = stepped(ps, gs, 0.5)
    in_python = [p.clone() for p in ps]
    helpers.by_python(step, step.sources["cuda"][0], "cuda", in_python, gs, 0.5)
    step([p.clone() for p in ps], gs, 0.5)
    specializer.settle()
    before = programs_of(step).misses
    by_stub = [p.clone() for p in ps]
    step(by_stub, gs, 0.5)
    assert programs_of(step).misses == before, programs_of(step).refused
    for a, b, c in zip(in_python, by_stub, wanted):
        torch.testing.assert_close(a, c)
        assert torch.equal(a, b)


def test_a_captured_launch_keeps_its_table(step):
    ps, gs = lists(300, torch.float32)
    step([p.clone() for p in ps], gs, 0.5)
    specializer.settle()
    moving = [p.clone() for p in ps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(moving, gs, 0.5)
    for a, b in zip(moving, ps):
        a.copy_(b)
    lists(300, torch.float16)  # other memory of the host in between
    graph.replay()
    graph.replay()
    for a, b in zip(moving, stepped(stepped(ps, gs, 0.5), gs, 0.5)):
        torch.testing.assert_close(a, b)
