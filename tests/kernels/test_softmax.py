"""softmax and log_softmax: layouts, dimensions, scales, extreme values, every form on a GPU."""

import pytest
import torch
from row_calls import DTYPES, awkward, each_device, each_dtype, repeats, right

import jitkern.ops as ops

pytestmark = pytest.mark.common_cache

INF, NAN = float("inf"), float("nan")
LENGTHS = (1, 8, 33, 256, 781, 1024, 4001, 4096, 16384, 20000, 50257, 65536, 128256, 262143, 600_000)  # fmt: skip
PAIRS = [
    pytest.param(ops.softmax, ops.softmax_backward, id="softmax"),
    pytest.param(ops.log_softmax, ops.log_softmax_backward, id="log_softmax"),
]
each_op = pytest.mark.parametrize(("op", "backward"), PAIRS)
# Of a gradient the relative error in the norm of a whole tensor: numbers of a row may cancel.
NORMS = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3, torch.float64: 1e-12}


def right_gradient(backward, grad, out, *rest):
    """Check a gradient against float64, and that a second call gives the same bits."""
    got, again = backward(grad, out, *rest), backward(grad, out, *rest)
    exact = backward.run_reference(grad.double(), out.double(), *rest)
    assert (got.shape, got.dtype, got.is_contiguous()) == (exact.shape, grad.dtype, True)
    least = torch.finfo(got.dtype).smallest_normal * exact.numel() ** 0.5
    error = (got.double() - exact).norm()
    assert not got.numel() or error <= NORMS[got.dtype] * exact.norm() + least
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.long
@each_device
@each_dtype
@each_op
def test_layouts(device, dtype, op, backward):
    for x in awkward(dtype, device):
        for scale in (1.0, -0.25):
            right(op, x, -1, scale)
        out, grad = op(x), torch.randn_like(x)
        right_gradient(backward, grad, out)
        same = torch.randn(x.shape[-1:], device=device).to(dtype).expand(x.shape)
        right_gradient(backward, same, out, -1, 2.0)


@pytest.mark.long
@each_device
@each_dtype
@each_op
def test_every_dimension(device, dtype, op, backward):
    x = torch.randn(30, 40, 50, device=device).to(dtype)
    for tensor in (x, x.transpose(0, 2), x[:, ::2]):
        for dim in (0, 2, -2):
            right(op, tensor, dim, 0.5)
            right_gradient(backward, torch.randn_like(tensor), op(tensor, dim), dim, 0.5)
    with pytest.raises(RuntimeError, match="x has 3 dimensions, and no dimension 3"):
        op(x, 3)
    with pytest.raises(RuntimeError, match="grad and out differ"):
        backward(x, x[0])


@pytest.mark.long
@each_device
@each_op
def test_extreme_values(device, op, backward):
    reference = torch.softmax if op is ops.softmax else torch.log_softmax
    parts = [[1.0, -INF], [-INF, -INF], [INF, 0], [NAN, 0], [3e38, -3e38], [-1e4, 1e4], [0, -0.0]]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for more in (1, 4, 20000):  # other forms on a GPU
            x = torch.tensor(parts, device=device).repeat_interleave(more, 1).to(dtype)
            for scale in (1.0, -1.0, 0.0):
                wanted = reference((x * scale).double(), -1).to(dtype)
                torch.testing.assert_close(
                    op(x, -1, scale), wanted, equal_nan=True, rtol=8e-3, atol=1e-5
                )


@pytest.mark.gpu
@pytest.mark.parametrize("cols", LENGTHS)
@each_op
def test_every_form_on_a_gpu(op, backward, cols):
    for dtype in DTYPES:
        x = torch.randn(67, cols, device="cuda").mul_(3).to(dtype)
        right(op, x, -1, 0.7)
        right_gradient(backward, torch.randn_like(x), op(x))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [256, 4096, 128256])
def test_on_a_side_stream_and_in_a_graph(cols):
    x = torch.randn(64, cols, device="cuda", dtype=torch.bfloat16)
    repeats(lambda: ops.softmax(x))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x = torch.randn(1 << 20, 2056, device="cuda", dtype=torch.bfloat16)
    out = ops.softmax(x)
    dx = ops.softmax_backward(x, out)
    for rows in (slice(0, 3), slice(-3, None)):
        exact = torch.softmax(x[rows].double(), -1)
        torch.testing.assert_close(out[rows].double(), exact, rtol=5e-3, atol=1e-6)
        y, grad = out[rows].double(), x[rows].double()
        wanted = y * (grad - (y * grad).sum(-1, keepdim=True))
        torch.testing.assert_close(dx[rows].double(), wanted, rtol=5e-3, atol=1e-6)
