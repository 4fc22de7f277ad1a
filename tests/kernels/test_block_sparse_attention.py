"""`jitkern.ops.block_sparse_attention` beside dense attention in float64, forward and backward."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import target_of
from row_calls import bits, captured, each_device, elsewhere, needs_memory

import jitkern
from jitkern.ops import (
    BlockSparseMask,
    block_sparse_attention as attention,
    block_sparse_attention_backward as backward,
)
from jitkern.prewarming.op_calls import spelt_calls

pytestmark = pytest.mark.common_cache

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative, L2
INF, NAN = math.inf, math.nan


def dense(q, k, v, seen, scale=None):
    """Attention in float64, with the gradient of a query that sees nothing made 0 by hand."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = scale * (q @ k.mT)
    nothing = ~seen.any(-1)
    s = torch.where(seen | nothing[..., None], s, -INF)
    out = torch.softmax(s, -1) @ v
    lse = torch.logsumexp(s, -1)
    return torch.where(nothing[..., None], 0, out), torch.where(nothing, -INF, lse)


def made(q_shape, key_heads=None, k_len=None, *, dtype=torch.float32, device="cpu"):
    """Random q, k and v that require gradients; q is [batch, heads, q_len, d]."""
    batch, heads, q_len, d = q_shape
    g = torch.Generator().manual_seed(q_len + d)
    shape = batch, key_heads or heads, k_len or q_len, d
    tensors = (torch.randn(size, generator=g) for size in (q_shape, shape, shape))
    return [x.to(dtype).to(device).requires_grad_() for x in tensors]


def right(tensors, mask, scale=None):
    """Check results and gradients against float64, and that a second call gives the same bits."""
    dtype, device = tensors[0].dtype, tensors[0].device
    wide = [x.detach().double().cpu().requires_grad_() for x in tensors]
    exact, exact_lse = dense(*wide, mask.to("cpu").to_dense(), scale)
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=g).to(x.dtype) for x in (tensors[0], exact_lse)]
    some = exact_lse != -INF
    grads[1] = torch.where(some, grads[1], 0).to(torch.float32)
    sums = torch.where(some, exact_lse, 0)
    torch.autograd.backward([exact, sums], [grad.double() for grad in grads])
    found = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = attention(*leaves, *mask.to(device).arguments, scale)
        torch.autograd.backward([out, lse], [grad.to(device) for grad in grads])
        found.append([out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)])
    out, lse = found[0][:2]
    assert out.is_contiguous() and out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse.cpu().double(), exact_lse.detach(), rtol=1e-5, atol=1e-5)
    assert not out.cpu()[~some].any() and not found[0][2].cpu()[~some].any()
    for got, want in zip([out, *found[0][2:]], [exact.detach(), *(x.grad for x in wide)]):
        error = (got.cpu().double() - want).norm()
        assert error <= TOLERANCE[dtype] * want.norm(), (error / want.norm(), got.shape)
    for one, again in zip(*found):
        assert torch.equal(bits(one), bits(again))


def elements(*shape, share=0.3):
    g = torch.Generator().manual_seed(sum(shape))
    seen = torch.rand(shape, generator=g) < share
    seen[..., : shape[-2] // 3, :] &= torch.rand(shape[-1], generator=g) < 0.1
    seen[..., 3, :] = False  # a query that sees nothing, in blocks that others see
    return seen


# On a GPU each form is a few kernels to compile. The CPU has one for all.
FORMS = [
    (torch.bfloat16, 128), (torch.float32, 40), (torch.bfloat16, 64), (torch.float16, 32),
    (torch.bfloat16, 96), (torch.float16, 256),
]  # fmt: skip
CASES = [
    *(pytest.param("cuda", *form, marks=pytest.mark.gpu) for form in FORMS),
    *(("cpu", *form) for form in FORMS[:2]),
    *(pytest.param("cpu", *form, marks=pytest.mark.long) for form in FORMS[2:]),
]


@pytest.mark.long
@pytest.mark.parametrize(("device", "dtype", "d"), CASES, ids=str)
def test_causal_windows_and_elements(device, dtype, d):
    kinds = {"dtype": dtype, "device": device}
    for q_len, k_len in ((300, 300), (256, 400), (400, 129), (320, 192)):
        tensors = made((2, 4, q_len, d), 2, k_len, **kinds)
        right(tensors, BlockSparseMask.causal(q_len, k_len))
        right(tensors, BlockSparseMask.sliding_window(q_len, k_len, left=70, right=9))
        right(tensors, BlockSparseMask.from_dense(elements(2, 1, q_len, k_len)), 0.3)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("block", [32, 64, 256, (64, 128), (96, 160)], ids=str)
def test_sizes_of_blocks(device, block):
    tensors = made((1, 2, 500, 64), 1, dtype=torch.bfloat16, device=device)
    right(tensors, BlockSparseMask.from_dense(elements(1, 2, 500, 500), block=block))
    right(tensors, BlockSparseMask.causal(500, block=block))


@pytest.mark.long
@each_device
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
def test_masks_of_batches_heads_and_all(device, heads):
    count, key_heads = heads
    tensors = made((2, count, 200, 64), key_heads, dtype=torch.float16, device=device)
    for shape in ((2, count), (1, count), (2, 1), (1, 1)):
        blocks = torch.rand(*shape, 2, 2) < 0.5
        blocks[..., 1, :] = False  # queries without a block
        blocks[..., 1] = False  # and keys
        right(tensors, BlockSparseMask.from_blocks(blocks, 200, 200))
        right(tensors, BlockSparseMask.from_blocks(blocks | True, 200, 200, causal=True))


@pytest.mark.long
@each_device
def test_strides(device):
    packed = torch.randn(2, 150, 3, 4, 64, dtype=torch.bfloat16, device=device)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    mask = BlockSparseMask.causal(150)
    right([q, k, v], mask)
    right([q, k.mT.contiguous().mT, v[:, :1].expand_as(v)], mask)


@pytest.mark.long
@each_device
def test_scales(device):
    tensors = made((1, 2, 200, 64), dtype=torch.float16, device=device)
    for scale in (-0.2, 0.0, 1.0):
        right(tensors, BlockSparseMask.causal(200), scale)
        right(tensors, BlockSparseMask.from_blocks(torch.ones(2, 2) > 0, 200, 200), scale)


@pytest.mark.long
@each_device
def test_nothing_gives_nothing(device):
    mask = BlockSparseMask.causal(64).to(device).arguments
    q, k, v = made((2, 2, 64, 64), device=device)
    out, lse = attention(q[:0], k[:0], v[:0], *mask)
    assert out.shape == (0, 2, 64, 64) and lse.shape == (0, 2, 64)
    none = BlockSparseMask.causal(64, 0).to(device).arguments
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], *none)
    assert not out.any() and (lse == -INF).all()
    none = BlockSparseMask.causal(0, 64).to(device).arguments
    attention(q[:, :, :0], k, v, *none)[0].sum().backward()
    assert not k.grad.any() and not v.grad.any()


@each_device
def test_infinities_and_nan_stay_where_they_are_seen(device):
    mask = BlockSparseMask.from_blocks(torch.eye(2, dtype=torch.bool), 256, 256).to(device)
    q, k, v = (x.detach() for x in made((1, 1, 256, 64), dtype=torch.bfloat16, device=device))
    want = attention(q, k, v, *mask.arguments)[0]
    q[0, 0, 5], k[0, 0, 200] = NAN, NAN
    if device == "cuda":  # the reference multiplies it by 0, which is NaN
        v[0, 0, 201] = INF
    out = attention(q, k, v, *mask.arguments)[0]
    assert out[0, 0, 5].isnan().all() and out[0, 0, 128:].isnan().all()
    rest = [i for i in range(128) if i != 5]
    assert torch.equal(out[0, 0, rest], want[0, 0, rest])
    k = torch.full_like(k, -INF)  # in the first tile: scores of -inf, which weigh nothing
    k[:, :, 100:] = 1
    out, lse = attention(q.fill_(1), k, v.fill_(2), *mask.arguments)
    assert (out == 2).all() and lse.isfinite().all()


@each_device
def test_what_lies_in_no_visited_block_has_no_influence(device):
    """Rows of queries, keys, values and gradients that pad a batch may hold anything."""
    blocks = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    mask = BlockSparseMask.from_blocks(blocks, 384, 384, causal=True).to(device)
    tensors = made((1, 2, 384, 16), 1, device=device)
    found = []
    for rest in (0, NAN):
        leaves = [x.detach().clone() for x in tensors]
        grad = torch.ones_like(leaves[0])
        for x in (*leaves, grad):
            x[:, :, 256:] = rest
        leaves = [x.requires_grad_() for x in leaves]
        out = attention(*leaves, *mask.arguments)[0]
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for clean, got in zip(*found):
        assert torch.equal(clean, got) and not got[:, :, 256:].any()


@each_device
def test_a_gradient_of_lse_of_empty_rows_has_no_influence(device):
    mask = BlockSparseMask.from_dense(elements(64, 64)).to(device)
    leaves = made((1, 2, 64, 16), device=device)
    out, lse = attention(*leaves, *mask.arguments)
    of_lse = torch.ones_like(lse)
    found = []
    for rest in (0, NAN, INF):
        of_lse[:, :, 3] = rest
        grads = [torch.ones_like(out), of_lse]
        found.append(torch.autograd.grad([out, lse], leaves, grads, retain_graph=True))
    for clean, *others in zip(*found):
        assert all(torch.equal(clean, got) for got in others)


@each_device
def test_what_does_not_fit_is_refused(device):
    q, k, v = (x.detach() for x in made((2, 4, 64, 64), 2, device=device))
    mask = BlockSparseMask.causal(64).to(device).arguments
    long = BlockSparseMask.causal(300).to(device).arguments
    some = BlockSparseMask.from_dense(elements(64, 64)).to(device).arguments
    wide = torch.zeros(2, 4, 64, 257, device=device)
    for match, args in {
        r"q must be \[batch, heads, q_len, d\]": (q[0], k, v, *mask),
        "with d from 1 to 256": (wide, wide, wide, *mask),
        "of one floating-point dtype": (q.half(), k, v, *mask),
        "4 heads of q are not a multiple of 3": (q, *(x[:, :1].expand(-1, 3, -1, -1) for x in (k, v)), *mask),
        "make the mask for these lengths": (q, k, v, *long),
        "must be int32": (q, k, v, mask[0].long(), *mask[1:]),
        "multiples of 32": (q, k, v, *mask[:7], 48, 128),
        "go together": (q, k, v, *mask[:4], mask[1]),
        "must have 1 dimension": (q, k, v, mask[0], mask[1][None], *mask[2:]),
        r"bits must be \[patterns, 128, 4\], got \(1, 64, 4\)": (q, k, v, *some[:6], some[6][:, :64]),
        r"patterns like columns: \(0,\)": (q, k, v, *some[:4], some[4][:0], *some[5:]),
    }.items():  # fmt: skip
        complete, _ = attention.signature.complete(args, {})
        with pytest.raises(RuntimeError, match=match):
            attention.declaration.launchers["triton"](None, *complete)
        with pytest.raises(RuntimeError, match=match):
            attention(*args)


@pytest.mark.long
def test_launches_and_kernels_in_the_interpreter():
    """Without a GPU: results of launch functions and kernels, which Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_it_is_prewarmed_without_a_gpu(arch):
    q, k, lists = "bf16[1, 4, 256, 128]", "bf16[1, 2, 256, 128]", "i32[1, 1, 5], i32[3]"
    call = f"{q}, {k}, {k}, {lists}, {lists}, None, None, None, 128, 128, -1, 0"
    wanted = [
        spelt_calls(attention, [call], ["cuda"]),
        spelt_calls(backward, [f"{q}, None, {q}, f32[1, 4, 256], {call}"], ["cuda"]),
    ]
    for each in wanted:
        each.node = False
    results = jitkern.prewarm(wanted, [target_of(arch)])
    assert {result.status for result in results} <= {"built", "hit"}
    for function in ("forward", "backward_q", "backward_k"):
        assert any(result.variant.startswith(f"{function}.") for result in results)


@pytest.mark.gpu
def test_on_a_side_stream_and_in_a_graph():
    tensors = [x.detach() for x in made((1, 4, 1000, 128), 2, dtype=torch.bfloat16, device="cuda")]
    for mask in (
        BlockSparseMask.causal(1000, device="cuda"),
        BlockSparseMask.from_dense(elements(1, 4, 1000, 1000).cuda()),
    ):
        leaves = [x.requires_grad_() for x in tensors]

        def step(leaves=leaves, mask=mask):
            out, lse = attention(*leaves, *mask.arguments)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            return out.detach(), lse.detach(), *grads  # no graph outlives its stream

        want = step()
        for run in (step, lambda step=step: captured(step)):
            with elsewhere():
                got = run()
            torch.cuda.synchronize()
            assert all(map(torch.equal, got, want))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    needs_memory(60)
    length = (1 << 31) // (16 * 128) + 256
    shape = 1, length, 16, 128  # heads within tokens: rows lie 2048 apart
    q, k, v = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3)
    )
    for x in (q, k, v):
        x[:, :, -300:].normal_()
        x.requires_grad_()
    mask = BlockSparseMask.sliding_window(length, left=99, device="cuda")
    out, _ = attention(q, k, v, *mask.arguments)
    out[:, :, -200:].sum().backward()
    few = [x[:, :, -300:].detach().requires_grad_() for x in (q, k, v)]
    small = BlockSparseMask.sliding_window(300, left=99, device="cuda")
    want, _ = attention(*few, *small.arguments)
    want[:, :, -200:].sum().backward()
    torch.testing.assert_close(out[:, :, -200:], want[:, :, -200:], rtol=2e-2, atol=2e-2)
    for x, y in zip((q, k, v), few):
        torch.testing.assert_close(x.grad[:, :, -200:], y.grad[:, :, -200:], rtol=2e-2, atol=2e-2)
