"""`jitkern.ops.cross_entropy` and its siblings beside torch.nn.functional.cross_entropy in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import refusing_to_wait
from row_calls import DTYPES, bits, each_device, each_dtype, repeats

from jitkern import ops

pytestmark = pytest.mark.common_cache

inf, nan = math.inf, math.nan
# Bounds of the loss and of the gradient, relative and absolute: half a unit of the last place of
# the result, and a few of float32.
LOSS = {torch.float64: (1e-12, 1e-12)}
GRADIENT = {
    torch.float64: (1e-11, 1e-14), torch.float32: (4e-6, 2e-7),
    torch.bfloat16: (2**-8 * 1.05, 1e-8), torch.float16: (2**-11 * 1.05, 2**-25),
}  # fmt: skip
CASES = {
    "plain": {}, "ignored": {"ignore_index": 2}, "smooth": {"label_smoothing": 0.1},
    "z": {"z_loss": 1e-3}, "capped": {"softcap": 5.0},
    "all": {"ignore_index": 2, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 5.0},
}  # fmt: skip


def expected(logits, target, reduction="mean", z_loss=0.0, softcap=0.0, **options):
    """The loss and the gradient in float64, of the same rounded logits."""
    x = logits.detach().double().requires_grad_()
    v = softcap * torch.tanh(x / softcap) if softcap else x
    target = target.long()
    losses = F.cross_entropy(v, target, reduction="none", **options)
    counted = target != options.get("ignore_index", -100)
    if z_loss:
        lse = torch.logsumexp(v, 0 if v.dim() == 1 else 1)
        losses = losses + torch.where(counted, z_loss * lse**2, 0)
    loss = losses if reduction == "none" else losses.sum()
    loss = loss / counted.sum() if reduction == "mean" else loss
    return loss, x


def assert_close(got, want, rel, floor):
    got, want = got.double(), want.double()
    torch.testing.assert_close(got, want, rtol=rel, atol=floor, equal_nan=True)


def loss_dtype(logits):
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def compare(logits, target, upstream=None, **options):
    """Compare losses and gradients of all forms of the op with those of PyTorch in float64.

    upstream: the gradient of the loss, for the forms that take one; 1 without it.
    """
    loss, x = expected(logits, target, **options)
    grad = torch.ones_like(loss) if upstream is None else torch.full_like(loss, upstream)
    (want,) = torch.autograd.grad(loss, x, grad, retain_graph=True)
    rel, floor = GRADIENT[logits.dtype]
    if options.get("softcap"):  # 1 - tanh(x) ** 2 where tanh(x) is nearly 1
        floor = max(floor, torch.finfo(loss_dtype(logits)).eps)
    bounds = LOSS.get(logits.dtype, (2e-6, 2e-6)), (rel, floor)
    leaf = logits.detach().clone().requires_grad_()
    got = ops.cross_entropy(leaf, target, **options)
    assert got.dtype == loss_dtype(logits)
    assert_close(got, loss.detach(), *bounds[0])
    (gradient,) = torch.autograd.grad(got, leaf, grad.to(got.dtype))
    assert (gradient.dtype, gradient.shape) == (logits.dtype, logits.shape)
    assert_close(gradient, want, *bounds[1])

    (want,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    total, dlogits = ops.cross_entropy_with_grad(logits, target, **options)
    assert_close(total, loss.detach(), *bounds[0])
    assert_close(dlogits, want, *bounds[1])
    if logits.is_contiguous() and logits.dim() < 3:
        changed = logits.clone()
        again = ops.cross_entropy_with_grad_(changed, target, **options)
        assert torch.equal(bits(again), bits(total))
        assert torch.equal(bits(changed), bits(dlogits))


def odd_rows(cols, dtype, device, ignore_index=-100, **_options):
    """Rows with infinities, NaN, large numbers and masks, and their targets."""
    x = torch.randn(12, cols, device=device).mul_(3).to(dtype)
    big = torch.finfo(dtype).max * 0.9
    x[1] = -inf
    x[2, : cols // 2] = -inf
    x[3, cols // 2] = nan
    x[4, cols // 2] = inf
    x[5, cols // 2], x[5, 0] = big, -big
    x[6] += 3e4
    x[7, -1] = -inf
    target = torch.randint(0, cols, (12,), device=device)
    target[2] = target[7] = cols - 1
    target[5], target[8] = cols // 2, 0
    target[target == ignore_index] = cols - 1
    target[9] = ignore_index
    return x, target


def combinations():
    """Devices, dtypes, cases and reductions: on a GPU each needs kernels of its own, so fewer."""
    for device, dtype, case in itertools.product(("cpu", "cuda"), DTYPES, CASES):
        reductions = ("mean", "sum", "none") if case == "plain" else ("mean",)
        if device == "cuda" and dtype is not torch.bfloat16 and case not in ("plain", "all"):
            continue
        for reduction in reductions:
            yield pytest.param(
                device, dtype, CASES[case], reduction, id=f"{device}-{dtype}-{case}-{reduction}",
                marks=[pytest.mark.gpu] if device == "cuda" else [],
            )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("device", "dtype", "options", "reduction"), list(combinations()))
def test_equals_pytorch_in_float64(device, dtype, options, reduction):
    torch.manual_seed(0)
    for rows, cols in ((4, 1000),) if device == "cuda" else ((9, 33), (4, 1000)):
        logits = torch.randn(rows, cols, device=device).mul_(3).to(dtype)
        target = torch.randint(0, cols, (rows,), device=device)
        target[1] = 2
        compare(logits, target, 0.75, reduction=reduction, **options)


SIZES = (1, 2, 7, 128, 1000, 2049)
# On a GPU: warps, blocks, shared memory, clusters of 2 and 4; even and odd.
LONG = {
    torch.bfloat16: (1, 7, 128, 2049, 9000, 32000, 50257, 65536, 128256),
    torch.float32: (33, 128256), torch.float16: (50264,), torch.float64: (7, 128256),
}  # fmt: skip


@pytest.mark.long
@each_device
@each_dtype
@pytest.mark.parametrize("options", [{}, CASES["all"]], ids=["plain", "all"])
def test_rows_of_all_lengths_with_infinities_and_nan(device, dtype, options):
    torch.manual_seed(1)
    sizes = LONG[dtype] if not options or dtype is torch.bfloat16 else ()
    for cols in sizes[:: 3 if options else 1] if device == "cuda" else SIZES:
        logits, target = odd_rows(cols, dtype, device, **options)
        with torch.no_grad():
            loss, _ = expected(logits, target, "none", **options)
        got = ops.cross_entropy(logits, target, reduction="none", **options)
        assert_close(got, loss, *LOSS.get(dtype, (2e-6, 1e-5)))
        finite = loss.isfinite() & (torch.arange(12, device=device) != 9)
        compare(logits[finite], target[finite], reduction="sum", **options)
        # A row whose loss is NaN is NaN throughout; one that is ignored is 0, whatever it holds.
        _, dlogits = ops.cross_entropy_with_grad(logits, target, reduction="none", **options)
        assert dlogits[loss.isnan()].isnan().all()
        assert not dlogits[9].any()


@pytest.mark.long
@each_device
@each_dtype
def test_strides_offsets_and_shapes(device, dtype):
    if device == "cuda" and dtype is not torch.bfloat16:
        pytest.skip("others need kernels of their own, and differ in nothing here")
    torch.manual_seed(2)
    flat = torch.randn(4 * 300 + 1, device=device).to(dtype)
    target = torch.tensor([0, 299, 7, -100], device=device)
    compare(flat[1:].view(4, 300), target)  # not aligned
    compare(torch.randn(300, 4, device=device).to(dtype).T, target)
    compare(torch.randn(1, 300, device=device).to(dtype).expand(4, 300), target)
    compare(torch.randn(4, 600, device=device).to(dtype)[:, ::2], target, 2.0)
    compare(torch.randn(9, device=device).to(dtype), target.new_full((), 3), label_smoothing=0.5)
    many = torch.randint(0, 7, (2, 5, 3), device=device)
    compare(torch.randn(2, 7, 5, 3, device=device).to(dtype), many, 3.0, ignore_index=2)
    compare(torch.randn(2, 5, 7, device=device).to(dtype).mT, many[:, :, 0], reduction="none")
    if dtype is torch.float32:
        compare(torch.randn(4, 300, device=device), target.int())
    strided = torch.randint(0, 7, (8, 2), device=device)[:, 1]
    compare(torch.randn(8, 7, device=device).to(dtype), strided)


@pytest.mark.long
@each_device
def test_nothing_to_count(device):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    ignored = torch.full((3,), -100, device=device)
    for target, x in ((ignored, logits), (ignored[:0], logits[:0])):
        loss = ops.cross_entropy(x, target)
        assert loss.isnan()
        assert not torch.autograd.grad(loss, x)[0].any()
        assert ops.cross_entropy(x, target, reduction="sum") == 0
        assert not ops.cross_entropy(x, target, reduction="none").any()
        assert ops.cross_entropy_with_grad(x.detach(), target)[0].isnan()


@pytest.mark.long
@each_device
@pytest.mark.parametrize("wrong", [5, -1, 2**40])
def test_a_target_that_is_no_class_makes_its_row_nan(device, wrong):
    logits = torch.randn(3, 5, device=device)
    target = torch.tensor([1, wrong, 4], device=device)
    losses, dlogits = ops.cross_entropy_with_grad(logits, target, reduction="none")
    assert losses.isnan().tolist() == [False, True, False]
    assert dlogits.isnan().all(1).tolist() == [False, True, False]
    assert not dlogits[[0, 2]].isnan().any()
    assert ops.cross_entropy(logits, target).isnan()
    reference = ops.cross_entropy.run_reference(logits, target, reduction="none")
    torch.testing.assert_close(losses, reference, equal_nan=True)


@each_device
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_do_not_cancel(device, smoothing):
    """The loss of a row does not depend on what is added to all of its logits."""
    x = torch.randn(8, 1000, device=device).bfloat16().float()
    target = torch.randint(0, 1000, (8,), device=device)
    options = {"label_smoothing": smoothing, "reduction": "none"}
    rounded = (x * 256).round() / 256
    small, same, big = (
        ops.cross_entropy(one, target, **options) for one in (x, rounded, rounded + 2**14)
    )
    torch.testing.assert_close(big, same, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(small, same, rtol=0.1, atol=0.1)


@pytest.mark.long
@each_device
def test_the_upstream_gradient_is_used_without_a_wait(device):
    logits = torch.randn(6, 40, device=device, requires_grad=True)
    target = torch.randint(0, 40, (6,), device=device)
    ops.cross_entropy(logits, target).backward()  # everything is compiled
    with refusing_to_wait() if device == "cuda" else torch.no_grad(), torch.enable_grad():
        (ops.cross_entropy(logits, target) * 3).backward()
    want = expected(logits, target)
    (gradient,) = torch.autograd.grad(want[0], want[1])
    torch.testing.assert_close(logits.grad, 4 * gradient.float())


@pytest.mark.long
@each_device
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_backward_of_with_grad_may_run_twice(device, reduction):
    logits = torch.randn(6, 40, device=device, requires_grad=True)
    target = torch.randint(0, 40, (6,), device=device)
    loss, dlogits = ops.cross_entropy_with_grad(logits, target, reduction=reduction)
    assert not dlogits.requires_grad
    before, ones = dlogits.clone(), torch.ones_like(loss)
    for by in (1, 3, 1):
        (gradient,) = torch.autograd.grad(loss, logits, ones * by, retain_graph=True)
        torch.testing.assert_close(gradient, before * by)
        assert gradient.data_ptr() != dlogits.data_ptr()
        gradient.zero_()
    assert torch.equal(dlogits, before)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_first_and_second_derivatives(device, options):
    torch.manual_seed(3)
    logits = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([0, 2, 4], device=device)

    def loss(x):
        return ops.cross_entropy(x, target, **options)

    assert torch.autograd.gradcheck(loss, (logits,))
    assert torch.autograd.gradgradcheck(loss, (logits,))
    assert torch.autograd.gradcheck(
        lambda x: ops.cross_entropy_with_grad(x, target, **options)[0], (logits,)
    )
    batch = torch.vmap(ops.cross_entropy, in_dims=(0, None))(torch.stack([logits] * 2), target)
    torch.testing.assert_close(batch, ops.cross_entropy(logits, target).expand(2))


@pytest.mark.long
@each_device
@each_dtype
def test_rescale(device, dtype):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for shape in ((3, 40), (5, 1000), (4, 33), (0, 3), (7,)):
        x = torch.randn(shape, device=device).to(dtype)
        for factors in (torch.tensor(1.0), torch.tensor(2.5), torch.rand(shape[:-1])):
            by = factors.to(device, wide)
            want = (x.to(wide) * by.unsqueeze(-1)).to(dtype)
            got = x.clone()
            ops.cross_entropy_rescale_(got, by)
            assert torch.equal(got, want)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_classes_the_reference_agrees(device, reduction):
    for targets in ([], [0, -100, 5]):
        target = torch.tensor(targets, dtype=torch.int64, device=device)
        logits = torch.ones(len(targets), 0, device=device)
        for op in (ops.cross_entropy, ops.cross_entropy_with_grad, ops.cross_entropy_with_grad_):
            args = logits, target, -100, 0.1, 0.1, 0.0, reduction
            torch.testing.assert_close(op(*args), op.run_reference(*args), equal_nan=True)


def test_rescale_takes_one_number_or_one_for_each_row():
    x, by = torch.rand(2, 3, 4), torch.rand(2, 3)
    got, want = x.clone(), x.clone()
    ops.cross_entropy_rescale_(got, by)
    ops.cross_entropy_rescale_.run_reference(want, by)
    assert torch.equal(got, want)
    for wrong in (by.reshape(6), by.T.contiguous(), by.reshape(6, 1), torch.ones(1)):
        with pytest.raises(RuntimeError, match="one for each row, of shape"):
            ops.cross_entropy_rescale_(x, wrong)


@pytest.mark.long
def test_logits_that_are_not_dense_are_not_changed():
    with pytest.raises(RuntimeError, match="pass them contiguous"):
        ops.cross_entropy_with_grad_(torch.ones(3, 4).T, torch.zeros(4).long())
    logits = torch.randn(2, 7, 5).mT.contiguous().mT  # the classes are last in memory
    want = ops.cross_entropy_with_grad(logits, torch.zeros(2, 5).long())
    loss = ops.cross_entropy_with_grad_(logits, torch.zeros(2, 5).long())
    assert torch.equal(loss, want[0])
    assert torch.equal(logits, want[1])


@pytest.mark.long
@each_device
@pytest.mark.parametrize("name", ["with_grad_", "rescale_"])
def test_ops_that_change_an_argument_pass_the_checks(device, name):
    op = getattr(ops, f"cross_entropy_{name}")
    for args in op.sample_inputs(device):
        torch.library.opcheck(op.overload, args)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1000, 50257, 65536, 128256])
def test_results_repeat_on_a_side_stream_and_in_a_graph(cols):
    logits = torch.randn(300, cols, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, cols, (300,), device="cuda")

    repeats(lambda: ops.cross_entropy(logits, target), waits=True)
    repeats(lambda: ops.cross_entropy_with_grad(logits, target), waits=True)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows, cols = 17000, 128256
    logits = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.randint(0, cols, (rows,), device="cuda")
    last = logits[-8:].clone()
    losses = ops.cross_entropy(logits, target, reduction="none")
    again = ops.cross_entropy_with_grad_(logits, target, reduction="none")
    torch.testing.assert_close(losses, again, rtol=2e-6, atol=2e-6)
    want, dlogits = ops.cross_entropy_with_grad(last, target[-8:], reduction="none")
    torch.testing.assert_close(losses[-8:], want, rtol=2e-6, atol=2e-6)
    assert torch.equal(bits(logits[-8:]), bits(dlogits))
