"""Calls of row kernels on awkward tensors, and how right their results are."""

import contextlib

import pytest
import torch
from helpers import refusing_to_wait

from benches.kernels.checks import Oracle, poison, widened

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each kernel takes a second or more to compile; the tests of all ops have the other dtypes.
each_device_and_dtype = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(pytest.param("cpu", t, marks=pytest.mark.long) for t in (torch.float16, torch.float64)),
        *(pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.bfloat16, torch.float32)),
    ],
    ids=str,
)


def right(op, *args):
    """Check the results of a call against float64, and that a second call gives the same bits."""
    poison([a for a in args if isinstance(a, torch.Tensor)], args[0].device)
    results, precise = as_tuple(op(*args)), as_tuple(op.run_reference(*map(widened, args)))
    for result, again, exact in zip(results, as_tuple(op(*args)), precise):
        assert (result is None) == (exact is None)
        if result is not None:
            assert (result.shape, result.is_contiguous()) == (exact.shape, True)
            error = Oracle("rows", [result], [exact]).error(result, exact)
            assert error <= 1, (error, [getattr(a, "shape", a) for a in args])
            assert torch.equal(bits(result), bits(again))


def bits(x):
    """The tensor as bytes, for which a NaN equals itself."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def as_tuple(results):
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def awkward(dtype, device):
    """Tensors of all layouts: an end within 16 bytes, a base between them, strides, nothing."""

    def make(*shape):
        return (3 * torch.randn(shape, device=device) + 1).to(dtype)

    shapes = ((3, 1), (33,), (2, 3, 64), (9, 1024), (4, 4099), (0, 6), (4, 0))
    return [
        *(make(*shape) for shape in shapes), make(7 * 64 + 1)[1:].view(7, 64), make(64, 6).T,
        make(1, 72).expand(5, 72), make(9, 200)[:, 8:72],
    ]  # fmt: skip


@contextlib.contextmanager
def elsewhere():
    """Run on a stream that is not the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def captured(function):
    """Return the results of a function in a CUDA graph, after two replays."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    graph.replay()
    graph.replay()
    return results


def repeats(function, *, waits=False):
    """Check that results have the same bits on another stream, where none waits, and in a graph."""
    wanted = as_tuple(function())
    with elsewhere(), contextlib.nullcontext() if waits else refusing_to_wait():
        again = as_tuple(function())
    torch.cuda.synchronize()
    for results in (again, as_tuple(captured(function))):
        torch.cuda.synchronize()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results, wanted, strict=True))


def needs_memory(gib):
    """Skip a test where no GPU has that much memory."""
    if torch.cuda.get_device_properties(0).total_memory < gib << 30:
        pytest.skip(f"needs {gib} GiB of GPU memory")
