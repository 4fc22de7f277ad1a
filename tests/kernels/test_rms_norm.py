"""rms_norm, add_rms_norm and their quantized forms: layouts, dtypes, extreme values, gradients."""

import pytest
import torch
import torch.nn.functional as F
from row_calls import as_tuple, awkward, each_device, each_device_and_dtype, repeats, right

import jitkern.ops as ops

pytestmark = pytest.mark.common_cache

LENGTHS = (128, 256, 1024, 2048, 4096, 16376, 40000, 128256)


@pytest.mark.long
@each_device_and_dtype
def test_layouts(device, dtype):
    for x in awkward(dtype, device):
        weight = torch.randn(x.shape[-1] + 1, device=device).to(dtype)[1:]  # not aligned
        grad, residual = torch.randn_like(x), torch.randn_like(x)
        right(ops.rms_norm, x, weight, 1e-5, 1.0)
        right(ops.rms_norm, x)
        right(ops.add_rms_norm, x, residual, weight)
        # A row of one number has a gradient of 0 but for eps, which must not be small for float32.
        right(ops.rms_norm_backward, grad, x, weight, residual, 50.0, 1.0)
        grad = torch.randn(x.shape[-1:], device=device).to(dtype).expand(x.shape)
        right(ops.rms_norm_backward, grad, x, weight.contiguous(), None, 50.0)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_may_be_of_float32(device, dtype):
    for shape in ((5, 64), (3, 33), (2, 20000)):
        x = torch.randn(shape, device=device).to(dtype)
        weight = torch.randn(shape[-1], device=device)
        right(ops.rms_norm, x, weight)
        right(ops.add_rms_norm, x, x, weight)
        right(ops.rms_norm_backward, x, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", LENGTHS)
def test_every_form_on_a_gpu(cols):
    for dtype in (torch.bfloat16, torch.float32) if cols == 4096 else (torch.bfloat16,):
        for rows in (1, 67, max(2000, (1 << 21) // cols) if cols <= 4096 else 300):
            x, grad = (torch.randn(rows, cols, device="cuda").to(dtype) for _ in range(2))
            weight = torch.randn(cols, device="cuda").to(dtype)
            right(ops.rms_norm, x, weight)
            right(ops.add_rms_norm, x, grad, weight)
            right(ops.rms_norm_backward, grad, x, weight)
            right(ops.rms_norm_backward, grad, x, weight, grad, 1e-6, 0.5)
            right(ops.rms_norm_backward, grad, x, weight, None, 1e-6, 0.0, False, True)


@pytest.mark.long
@each_device
def test_extreme_values(device):
    inf, nan = float("inf"), float("nan")
    rows = [[1e16, -1e15], [1e-30, 2e-30], [0.0, 0.0], [nan, 1.0], [inf, 1.0], [-inf, inf]]
    for more in (2, 6, 20000):  # other forms on a GPU
        x = torch.tensor(rows, device=device).repeat(1, more)
        wanted = F.rms_norm(x.double().cpu(), x.shape[-1:], eps=1e-6).to(device)
        got = ops.rms_norm(x).double()
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-5, atol=0)
    zeros = torch.zeros(3, 8, device=device)
    assert torch.equal(ops.rms_norm(zeros), zeros)
    assert torch.equal(ops.rms_norm_backward(zeros, zeros)[0], zeros)
    for size, eps in ((1e-13, 0.0), (0.0, 1e-27)):  # the cube of 1 / rms is infinite
        x = (torch.randn(3, 8, device=device) * size).requires_grad_()
        wide = x.detach().double().requires_grad_()
        weights = torch.arange(8.0, device=device)
        ops.rms_norm(x, eps=eps).mul(weights).sum().backward()
        F.rms_norm(wide, (8,), eps=eps).mul(weights).sum().backward()
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e7)


def gradients(function, *leaves):
    """The gradients of a weighted sum of all results, for all leaves."""
    results = as_tuple(function(*leaves))
    weights = [torch.linspace(-1, 2, r.numel(), device=r.device).view(r.shape) for r in results]
    return torch.autograd.grad(sum((r * w).sum() for r, w in zip(results, weights)), leaves)


@pytest.mark.long
@each_device
def test_gradients(device):
    def make(*shape):
        return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    x, residual, weight = make(3, 6), make(3, 6), make(6)
    frozen = weight.detach()
    for function, leaves in (
        (lambda x, w: ops.rms_norm(x, w, 1e-3, 1.0), (x, weight)),
        (ops.rms_norm, (x,)),
        (lambda x: ops.rms_norm(x, frozen), (x,)),
        (lambda w: ops.rms_norm(x.detach(), w), (weight,)),
        (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-3), (x, residual, weight)),
        (lambda x, r, w: ops.add_rms_norm(x, r, w)[0], (x, residual, weight)),
        (lambda x, r: ops.add_rms_norm(x, r, frozen)[1], (x, residual)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)

    def norm(x, w):
        return F.rms_norm(x, (64,), w, 1e-6)

    for ours, theirs in (
        (ops.rms_norm, norm),
        (lambda x, w: ops.add_rms_norm(x, x, w), lambda x, w: (norm(x + x, w), x + x)),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        torch.testing.assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))


@pytest.mark.long
@each_device
def test_nobody_pays_for_gradients_that_nobody_needs(device):
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    dx, dweight = ops.rms_norm_backward(x, x, weight, None, 1e-6, 0.0, True, False)
    assert dx is not None and dweight is None
    dx, dweight = ops.rms_norm_backward(x, x, weight, None, 1e-6, 0.0, False, True)
    assert dx is None and dweight is not None
    x.requires_grad_()
    (of_total,) = torch.autograd.grad(ops.add_rms_norm(x, x.detach(), weight)[1].sum(), x)
    assert torch.equal(of_total, torch.ones_like(x))


@pytest.mark.long
@each_device
@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("float8_e4m3fn", 448)])
def test_quantized(device, dtype, most):
    torch.manual_seed(0)  # a weight of -1 makes a column 0
    for own in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((5, 64), (2, 3, 33), (3, 1), (2, 40000), (0, 8)):
            x, residual = (torch.randn(shape, device=device).to(own) for _ in range(2))
            weight = torch.randn(shape[-1], device=device).to(own)
            out, scale, total = ops.add_rms_norm_quantized(x, residual, weight, 1e-5, 1.0, dtype)
            assert torch.equal(total, ops.add_rms_norm(x, residual, weight)[1])
            of_quantized(out, scale, x.double() + residual.double(), weight, most)
            out, scale = ops.rms_norm_quantized(x, weight, 1e-5, 1.0, dtype)
            of_quantized(out, scale, x.double(), weight, most)


def of_quantized(out, scale, x, weight, most):
    """Check that the numbers are the norm of x within half a step, and use the whole range."""
    wanted = F.rms_norm(x, x.shape[-1:], weight.double() + 1, 1e-5)
    assert (out.shape, scale.shape) == (x.shape, (*x.shape[:-1], 1))
    assert scale.dtype == torch.float32
    if x.numel():
        largest = wanted.abs().amax(-1, True)
        torch.testing.assert_close(scale.double(), largest / most, rtol=1e-5, atol=0)
        assert (out.double().abs().amax(-1) == most).all()
    step = scale.double() if most == 127 else (wanted.abs() / 8).maximum(scale.double() / 512)
    assert ((out.double() * scale.double() - wanted).abs() <= 0.501 * step).all()


@pytest.mark.long
@each_device
def test_quantized_rows_of_zeros_and_of_nan(device):
    x = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [3.0, -3.0]], device=device)
    for dtype in ("int8", "float8_e4m3fn"):
        out, scale = ops.rms_norm_quantized(x, dtype=dtype)
        assert torch.equal(out[0].float(), torch.zeros(2, device=device)) and scale[0] == 0
        assert scale[1].isnan()
        torch.testing.assert_close((out.float() * scale)[2].tolist(), [1.0, -1.0])


X = torch.ones(2, 4)
REFUSED = [
    (ops.rms_norm, (X.long(),), "rms_norm: x must be floating point, got torch.int64"),
    (ops.rms_norm, (X[0, 0],), "rms_norm: x needs at least one dimension"),
    (ops.rms_norm, (X, X[0, :3]), r"rms_norm: weights must be of shape \(4,\) .* \(3,\)"),
    (ops.rms_norm, (X, X[0].double()), "of torch.float32 or float32, got torch.float64"),
    (ops.add_rms_norm, (X, X[0]), r"add_rms_norm: all must be like x.* \(4,\)"),
]


@pytest.mark.parametrize(("op", "args", "says"), REFUSED)
def test_what_does_not_fit_is_refused(op, args, says):
    with pytest.raises(RuntimeError, match=says):
        op(*args)


@pytest.mark.gpu
def test_streams_graphs_and_repetition():
    x, grad = (torch.randn(640, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
    repeats(lambda: ops.add_rms_norm(x, grad, weight))
    repeats(lambda: ops.rms_norm_backward(grad, x, weight, x))
    repeats(lambda: ops.rms_norm_quantized(x, weight))


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count():
    rows, cols = (1 << 31) // 4096 + 3, 4096
    x = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16).normal_()
    weight = torch.randn(cols, device="cuda", dtype=torch.bfloat16)
    last, out = slice(rows - 5, rows), ops.rms_norm(x, weight)
    assert torch.equal(out[last], ops.rms_norm(x[last], weight))
    del out
    dx, _ = ops.rms_norm_backward(x, x, weight)
    assert torch.equal(dx[last], ops.rms_norm_backward(x[last], x[last], weight)[0])
