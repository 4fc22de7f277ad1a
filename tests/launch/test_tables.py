"""Tables of tensors as parameters of CUDA kernels, compiled for a GPU that is not here."""

import struct

import pytest
import torch
from helpers import needs_nvrtc
from tuning import GPU as TARGET, op_of

from jitkern import jit
from jitkern.calls.samples import Sample
from jitkern.declare import Cuda
from jitkern.errors import LaunchError
from jitkern.launch.arguments import checked
from jitkern.launch.kernels import Kernels, ignore
from jitkern.launch.resources.tables import Table
from jitkern.op.needed_kernels import units_of
from jitkern.prewarming.call_traces import refused_by, traces_of

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
    def launch(k, ps, gs, lr):
        for p, g in k.tables(ps, gs, chunk=1000):
            template = {"T": p.dtype, "U": g.dtype, "N": p.capacity}
            k.step[template](p, g, lr, grid=p.chunks, block=256)

    schema = "(Tensor(a!)[] ps, Tensor[] gs, float lr) -> ()"
    return op_of(Cuda(text=STEP), launch, schema=schema)


def meta(count, dtype=torch.float32):
    return [torch.empty(2 * i, dtype=dtype, device="meta") for i in range(count)]


@pytest.mark.long
@needs_nvrtc
def test_300_tensors_are_one_launch_of_a_kernel_built_for_a_gpu(step):
    source = step.sources["cuda"][0]
    call = (meta(300), meta(300, torch.bfloat16), 0.5)
    units, problems = units_of(step, source, "cuda", [Sample("a call", call)])
    assert not problems
    (variant,) = (variant for unit in units for variant in unit[0])
    entry = jit.ensure(variant, TARGET)
    assert entry.manifest.meta["parameters"] == ["@f32:512", "&bf16:512", "f32"]
    assert refused_by(step, source, TARGET, [call], {}) == []
    (traced,), reasons, _ = traces_of(step, source, TARGET, [call], {})
    assert not reasons
    names = [instruction.name for instruction in traced.trace.steps]
    assert (names.count("LAUNCH"), names.count("TABULATE")) == (1, 1)
    shorter = meta(200), meta(200, torch.bfloat16), 2.0
    (other,) = traces_of(step, source, TARGET, [shorter], {}).traces
    assert other.trace.program == traced.trace.program, "one for other lengths, ranks and sizes"


BOTH = """
#include <cuda.h>
#include "tensor_table.h"
template <typename T, int N>
__global__ void both(T *out, const __grid_constant__ jitkern::Table<const T, N> x,
                     const __grid_constant__ CUtensorMap map, int rows,
                     const __grid_constant__ jitkern::Pointers<T, N> y) {
  out[0] = x.data[0][0] + y.data[0][0] + (T)rows + (T)(size_t)&map;
}
"""


@pytest.mark.long
@needs_nvrtc
def test_a_program_passes_tables_and_a_tensor_map_to_one_kernel(gpu):
    def launch(k, xs, ys, w):
        out = torch.empty(1, dtype=w.dtype, device=w.device)
        for x, y in k.tables(xs, ys, chunk=1000):
            of_w = k.tensor_map(w, (16, 64))
            template = {"T": w.dtype, "N": x.capacity}
            k.both[template](out, x, of_w, w.shape[0], y, grid=x.chunks, block=32)
        return out

    call = meta(3)[1:], meta(3)[1:], torch.ones(20, 64, device="meta")
    schema = "(Tensor[] xs, Tensor[] ys, Tensor w) -> Tensor"
    gpu.learn(op_of(Cuda(text=BOTH), launch, schema=schema, sample=lambda _: call), call)
    for sizes in ((5, 1001), (3,), (0, 2500, 7)):
        xs, ys = ([torch.ones(n) for n in sizes] for _ in range(2))
        w = torch.ones(16 + len(sizes), 64)
        _, x, of_w, rows, y = gpu.call(xs, ys, w)
        tables = (Table(tensors, 32, 1000, dense=False) for tensors in (xs, ys))
        for code, given, table in zip(("@f32:32", "&f32:32"), (x, y), tables):
            wanted = table.packed(code)
            held = [*range(8 * len(sizes))]  # the rest of the addresses and sizes means nothing
            if code[0] == "@":
                held += [256 + i for i in held] + [512 + i for i in range(4 * len(sizes) + 4)]
                held += [*range(644, 648)]
            assert [given[i] for i in held] == [wanted[i] for i in held]
        assert (of_w[2], of_w[6], of_w[7], rows) == (w.data_ptr(), 64, len(w), len(w))
        assert gpu.grid == sum(-(-n // 1000) for n in sizes)
    one = torch.ones(4)
    assert gpu.call([one], [one, one], w) is None, "lists of two lengths"
    assert gpu.call([one], [torch.ones(5)], w) is None, "tensors of two sizes"
    assert gpu.call([one.double()], [one.double()], w) is None, "another dtype"
    assert gpu.call([torch.ones(4, 4).t()], [torch.ones(4, 4)], w) is None, "not contiguous"
    assert gpu.call([one] * 33, [one] * 33, w) is None, "another capacity"
    assert gpu.call([], [], w) is None


def test_a_table_is_packed_as_the_header_declares_it():
    tensors = [torch.ones(n) for n in (5, 0, 1000, 1001)]
    table = Table(tensors, 32, 1000, dense=False)
    packed = table.packed("@f32:32")
    assert len(packed) == 20 * 32 + 8
    assert struct.unpack_from("4Q", packed) == tuple(t.data_ptr() for t in tensors)
    assert struct.unpack_from("4q", packed, 8 * 32) == (5, 0, 1000, 1001)
    assert struct.unpack_from("5i", packed, 16 * 32) == (0, 1, 1, 2, 4)
    assert struct.unpack_from("i", packed, 20 * 32 + 4) == (4,)
    assert table.packed("&f32:32") == packed[: 8 * 32]
    assert table.chunks == 4


@pytest.mark.parametrize(
    ("code", "argument", "message"),
    [
        ("@f32:32", 1.0, "must be a table of k.tables.., for Table<f32, 32>, got float"),
        ("@f16:32", "table", "must be a table of float16 tensors, got one of torch.float32"),
        ("&f32:64", "table", "must be a Pointers<f32, 64>, got a table of capacity 32"),
        ("*f32", "table", "must be a tensor, got Table"),
    ],
)
def test_what_is_no_fitting_table_is_refused(code, argument, message):
    table = Table([torch.ones(2)], 32, 1000, dense=False)
    with pytest.raises(LaunchError, match=message):
        checked("k", [code], [table if argument == "table" else argument], torch.device("cpu"))


@pytest.mark.parametrize(
    ("lists", "options", "message"),
    [
        ([], {}, "takes 1 to 8 lists"),
        ([torch.ones(1)], {"chunk": 0}, "chunk must be a whole number from 1 up, got 0"),
        ([[torch.ones(1)]], {"most": 100}, "most must be a positive multiple of 32, got 100"),
        ([[torch.ones(1)], []], {}, r"have \[1, 0\] tensors"),
    ],
)
def test_what_is_no_table_is_refused(lists, options, message):
    with pytest.raises(LaunchError, match=message):
        Kernels(ignore).tables(*lists, **options)
