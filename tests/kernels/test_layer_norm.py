"""layer_norm: layouts, dtypes, rows far from zero, extreme values, gradients."""

import pytest
import torch
import torch.nn.functional as F
from row_calls import awkward, each_device, each_device_and_dtype, repeats, right

import jitkern.ops as ops

pytestmark = pytest.mark.common_cache


@pytest.mark.long
@each_device_and_dtype
def test_layouts(device, dtype):
    for x in awkward(dtype, device):
        if x.shape[-1] == 1:
            continue  # below
        grad = torch.randn_like(x)
        weight, bias = (torch.randn(x.shape[-1] + 1, device=device).to(dtype)[1:] for _ in range(2))
        right(ops.layer_norm, x, weight, bias)
        right(ops.layer_norm, x)
        right(ops.layer_norm_backward, grad, x, weight, bias)
        grad = torch.randn(x.shape[-1:], device=device).to(dtype).expand(x.shape)
        right(ops.layer_norm_backward, grad, x, None, bias.contiguous())


@pytest.mark.long
@each_device
def test_rows_of_one_number_are_the_bias(device):
    x, bias = torch.randn(5, 1, device=device), torch.randn(1, device=device)
    assert torch.equal(ops.layer_norm(x, None, bias), bias.expand(5, 1))
    dx, _, dbias = ops.layer_norm_backward(x, x, None, bias)
    assert torch.equal(dx, torch.zeros_like(x))
    torch.testing.assert_close(dbias, x.sum(0))


@pytest.mark.long
@each_device
def test_rows_far_from_zero_lose_nothing(device):
    for cols in (40, 1000, 33, 4096, 50000):  # other forms on a GPU
        x = torch.randn(7, cols, device=device) + 1e4
        (weight, bias), grad = torch.randn(2, cols, device=device), torch.randn_like(x)
        exact = ops.layer_norm.run_reference(x.double(), weight.double(), bias.double())
        # A mean of 1e4 is off by up to 5e-4 in float32; E[x^2] - E[x]^2 would be off by 6.
        assert (ops.layer_norm(x, weight, bias) - exact).abs().max() <= 2e-2
        of_x = ops.layer_norm_backward.run_reference(*(t.double() for t in (grad, x, weight)))[0]
        dx = ops.layer_norm_backward(grad, x, weight)[0]
        assert (dx - of_x).norm() <= 5e-3 * of_x.norm()


@pytest.mark.long
@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_and_bias_may_be_of_float32(device, dtype):
    for shape in ((5, 64), (3, 33), (2, 20000)):
        x = torch.randn(shape, device=device).to(dtype)
        weight, bias = torch.randn(2, shape[-1], device=device)
        right(ops.layer_norm, x, weight, bias)
        right(ops.layer_norm_backward, x, x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [128, 1024, 4096, 16376, 40000, 128256])
def test_every_form_on_a_gpu(cols):
    for dtype in (torch.bfloat16, torch.float32) if cols == 4096 else (torch.bfloat16,):
        for rows in (1, 67, max(2000, (1 << 21) // cols) if cols <= 4096 else 300):
            x, grad = (torch.randn(rows, cols, device="cuda").to(dtype) for _ in range(2))
            weight, bias = torch.randn(2, cols, device="cuda").to(dtype)
            right(ops.layer_norm, x, weight, bias)
            right(ops.layer_norm_backward, grad, x, weight, bias)


@pytest.mark.long
@each_device
def test_extreme_values(device):
    inf, nan = float("inf"), float("nan")
    rows = [[1e15, -1e15], [1e-30, 2e-30], [0.0, 0.0], [5.0, 5.0], [nan, 1.0], [inf, 1.0]]
    for more in (2, 6, 20000):
        x = torch.tensor(rows, device=device).repeat(1, more)
        wanted = F.layer_norm(x.double(), x.shape[-1:])
        ours = ops.layer_norm(x).double()
        torch.testing.assert_close(ours, wanted, equal_nan=True, rtol=1e-5, atol=1e-20)


@pytest.mark.long
@each_device
def test_gradients(device):
    x = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    weight, bias = (x[i].detach().clone().requires_grad_() for i in range(2))
    for leaves in ((x, weight, bias), (x, weight), (x,)):
        assert torch.autograd.gradcheck(ops.layer_norm, leaves)
        assert torch.autograd.gradgradcheck(ops.layer_norm, leaves)
    assert torch.autograd.gradcheck(lambda b: ops.layer_norm(x.detach(), None, b), (bias,))


@pytest.mark.long
@each_device
def test_nobody_pays_for_gradients_that_nobody_needs(device):
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    for needs in ((True, False, False), (False, True, True), (True, True, False)):
        found = ops.layer_norm_backward(x, x, weight, weight, 1e-5, *needs)
        assert tuple(g is not None for g in found) == needs


@pytest.mark.gpu
def test_streams_graphs_and_repetition():
    x, grad = (torch.randn(640, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
    repeats(lambda: ops.layer_norm(x, weight, weight))
    repeats(lambda: ops.layer_norm_backward(grad, x, weight, weight))
