"""silu_and_mul and its family: layouts, dtypes, extreme values, gradients."""

import pytest
import torch
from row_calls import each_device, needs_memory, repeats

import jitkern.ops
from benches.kernels.checks import Oracle, poison, widened

pytestmark = pytest.mark.common_cache

NAMES = ("silu", "gelu", "gelu_tanh", "relu2")
OPS = {
    name: [getattr(jitkern.ops, f"{name}_and_mul{end}") for end in ("", "_backward")]
    for name in NAMES
}
each_name = pytest.mark.parametrize("name", NAMES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = [(name, dtype) for name in NAMES for dtype in DTYPES[: 4 if name == "silu" else 2]]


def right(op, *args):
    """Check a call against float64, within half a unit in the last place and a little."""
    poison(args[:1], args[0].device)
    result, precise = op(*args), op.run_reference(*map(widened, args))
    assert (result.shape, result.is_contiguous()) == (precise.shape, True)
    if result.dtype == torch.float64:  # no more exact than the reference
        torch.testing.assert_close(result, precise, rtol=1e-12, atol=1e-13)
        return
    assert Oracle("pointwise", [result], [precise]).error(result, precise) <= 1


@pytest.mark.long
@each_device
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_layouts(device, name, dtype):
    forward, backward = OPS[name]

    def make(*shape):
        return 3 * torch.randn(shape, device=device).to(dtype)

    for x in (
        make(5, 2), make(3, 4, 512), make(7 * 64 + 1)[1:].view(7, 64), make(64, 6).T,
        make(1, 64).expand(5, 64), make(9, 200)[:, 8:72], make(2, 9, 72)[:, :4], make(1030),
        make(0, 6), make(4, 0),
    ):  # fmt: skip
        right(forward, x)
        grad = make(*x.shape[:-1], x.shape[-1] // 2)
        right(backward, grad, x)
        right(backward, grad[..., :1].expand(grad.shape), x)


@each_device
def test_a_dimension_of_size_1_may_have_any_stride(device):
    forward, backward = OPS["silu"]
    for shape in ((3, 1, 8), (2, 3, 1, 8), (3, 1, 1, 8)):
        x, grad = (torch.randn(*shape[:-1], n, device=device) for n in (shape[-1], shape[-1] // 2))
        odd = [
            t.as_strided(t.shape, [77 if n == 1 else s for n, s in zip(t.shape, t.stride())])
            for t in (x, grad)
        ]
        assert all(t.is_contiguous() for t in odd)
        for args in ((x, odd[1]), (odd[0], grad), odd):
            assert torch.equal(forward(args[0]), forward(x))
            assert torch.equal(backward(args[1], args[0]), backward(grad, x))
    x = torch.randn(1, 3, 8, device=device).transpose(0, 1)  # what a decoder has of one token
    assert torch.equal(forward(x), forward(x.reshape(3, 8)).unsqueeze(1))


@pytest.mark.long
@each_device
@each_name
def test_extreme_values(device, name):
    forward, backward = OPS[name]
    x = torch.tensor([-1e18, -1e4, -200, -88, -10, -1e-30, -0.0, 0, 1e-30, 10, 88, 1e4, 1e19])
    x = torch.cat([x, torch.ones(13)]).to(device)
    grad = torch.ones(13, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = x.to(dtype)
        out, slope = forward(values), backward(grad.to(dtype), values)
        torch.testing.assert_close(out.double(), forward.run_reference(values).double())
        assert not out.isnan().any() and not slope.isnan().any()
    nan = forward(torch.tensor([float("nan"), float("inf"), 2.0, 2.0], device=device))
    assert nan[0].isnan() and nan[1].isinf()


@pytest.mark.long
@each_device
@each_name
def test_gradients(device, name):
    forward, _ = OPS[name]
    x = torch.randn(3, 4, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(forward, (x,))
    assert torch.autograd.gradgradcheck(forward, (x,))


@pytest.mark.gpu
@each_name
def test_streams_graphs_and_repetition(name):
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    repeats(lambda: OPS[name][0](x))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    needs_memory(40)
    rows, width = (1 << 16) + 1, 1 << 15
    for start in (0, 1):  # of vectors, and of single elements: more threads than 2^31
        x = torch.zeros(rows * 2 * width + 1, dtype=torch.bfloat16, device="cuda")[start:]
        x = x[: rows * 2 * width].view(rows, 2 * width)
        x[-1] = torch.randn(2 * width, device="cuda")
        out = jitkern.ops.silu_and_mul(x)
        assert torch.equal(out[-1], jitkern.ops.silu_and_mul(x[-1])) and not out[:-1].any()
        back = jitkern.ops.silu_and_mul_backward(out, x)
        assert torch.equal(back[-1], jitkern.ops.silu_and_mul_backward(out[-1], x[-1]))
        assert not back[:-1].any()
        del x, out, back
