"""rope and rope_: layouts, dtypes, positions, gradients."""

import pytest
import torch
from row_calls import each_device, needs_memory, repeats

import jitkern.ops
from benches.kernels.checks import Oracle, poison, widened
from jitkern.errors import DeclarationError

pytestmark = pytest.mark.common_cache

rope, rope_ = jitkern.ops.rope, jitkern.ops.rope_
each_order = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tables(rows, half, device="cpu", dtype=torch.float32):
    frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(rows, dtype=torch.float64, device=device).unsqueeze(1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def right(*args):
    """Check a call against float64, within half a unit in the last place and a little."""
    poison(args[:2], args[0].device)
    results, precise = rope(*args), rope.run_reference(*map(widened, args))
    oracle = Oracle("pointwise", results, precise)
    for result, exact in zip(results, precise):
        assert (result.shape, result.is_contiguous()) == (exact.shape, True)
        assert oracle.error(result, exact) <= 1
    return results


@pytest.mark.long
@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_order
def test_layouts(device, dtype, interleaved):
    def make(*shape):
        return torch.randn(shape, device=device).to(dtype)

    cos, sin = tables(64, 16, device)
    qkv = make(2, 9, 12, 32)
    calls = {
        "a packed qkv": (qkv[:, :, :8], qkv[:, :, 8:10]),
        "heads, then tokens": (make(2, 8, 9, 32).mT.mT.transpose(1, 2), make(2, 2, 9, 32).transpose(1, 2)),
        "a part of the dimension": (make(9, 3, 48), make(9, 1, 48)),
        "a rest of odd length": (make(9, 3, 37), make(9, 1, 37)),
        "no alignment": (make(9 * 3 * 32 + 1)[1:].view(9, 3, 32), make(9, 1, 32)),
        "expanded": (make(1, 9, 3, 32).expand(2, 9, 3, 32), make(2, 9, 1, 32)),
        "the last dimension apart": (make(9, 32, 3).transpose(1, 2), make(9, 1, 32)),
        "no tokens": (make(2, 0, 3, 32), make(2, 0, 1, 32)),
        "no heads of k": (make(9, 3, 32), make(9, 0, 32)),
    }  # fmt: skip
    for q, k in calls.values():
        right(q, k, cos, sin, None, interleaved)
    right(q, k, cos.to(dtype), sin.to(dtype), None, interleaved, True)
    q, k = make(9, 3, 32), make(9, 1, 32)
    packed = torch.cat([cos, sin], -1)  # as in vLLM
    right(q, k, packed[:, :16], packed[:, 16:], None, interleaved)
    right(q, k, cos[:, ::2], sin[:, ::2], None, interleaved)
    right(q, k, cos[:, :0], sin[:, :0], None, interleaved)
    right(q, k, cos[:, :1], sin[:, :1], None, interleaved)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_positions(device, dtype):
    cos, sin = tables(16, 8, device)
    q, k = torch.randn(2, 5, 3, 16, device=device), torch.randn(2, 5, 1, 16, device=device)
    of_tokens = torch.tensor([3, 0, 15, 7, 7], dtype=dtype, device=device)
    got = right(q, k, cos, sin, of_tokens)
    for positions in (of_tokens.expand(2, 5), of_tokens.view(1, 5)):
        assert all(map(torch.equal, got, right(q, k, cos, sin, positions)))
    right(q, k, cos, sin, torch.randint(0, 16, (5, 2), device=device).to(dtype).T)
    right(q[0], k[0], cos, sin, of_tokens)
    plain = right(q, k, cos, sin, torch.arange(5, dtype=dtype, device=device))
    assert all(map(torch.equal, plain, rope(q, k, cos, sin)))


@pytest.mark.long
@each_device
def test_a_position_beyond_the_tables_gives_nan_unread(device):
    positions = torch.tensor([-1, 0, 4, 3, 2**40], device=device)
    q, k = torch.randn(5, 2, 12, device=device), torch.randn(5, 1, 12, device=device)
    for x in right(q, k, *tables(4, 4, device), positions):
        assert x[[0, 2, 4], :, :8].isnan().all() and not x[[1, 3]].isnan().any()
        assert not x[..., 8:].isnan().any()
    right(q, k, *tables(0, 4, device), positions)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@each_order
def test_in_place(device, dtype, interleaved):
    cos, sin = tables(9, 16, device)
    qkv = torch.randn(9, 6, 40, device=device).to(dtype)
    q, k, v = qkv[:, :3], qkv[:, 3:5], qkv[:, 5:].clone()
    want = rope(q, k, cos, sin, None, interleaved)
    rope_(q, k, cos, sin, None, interleaved)
    assert torch.equal(qkv, torch.cat([*want, v], 1))


@pytest.mark.long
@each_device
@each_order
def test_the_gradient_turns_back(device, interleaved):
    cos, sin = tables(5, 2, device, torch.float64)
    q = torch.randn(5, 2, 5, dtype=torch.float64, device=device, requires_grad=True)
    k = torch.randn(5, 1, 5, dtype=torch.float64, device=device, requires_grad=True)
    positions = torch.tensor([4, 0, 2, 2, 1], device=device)

    def call(q, k):
        return rope(q, k, cos, sin, positions, interleaved)

    assert torch.autograd.gradcheck(call, (q, k))
    assert torch.autograd.gradgradcheck(call, (q, k))
    back = rope(*call(q, k), cos, sin, positions, interleaved, inverse=True)
    torch.testing.assert_close(back, (q, k))
    (of_q,) = torch.autograd.grad(call(q, k)[0].sum(), q)  # with no gradient of k
    reference = rope.run_reference(q, k, cos, sin, positions, interleaved)
    torch.testing.assert_close(of_q, torch.autograd.grad(reference[0].sum(), q)[0])
    with pytest.raises(DeclarationError, match="`cos`, which has no gradient"):
        rope(q, k, cos.requires_grad_(), sin)[0].sum().backward()


def test_what_does_not_fit_is_refused():
    cos, sin = tables(8, 4)
    q, k = torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    for match, args in {
        "differ in heads alone": (q, k[:4], cos, sin),
        "of one dtype": (q, k.double(), cos, sin),
        r"\[positions, up to 4\]": (q, k, *tables(8, 5)),
        "must both be float32 or torch.float32": (q, k, cos.double(), sin.double()),
        "5 tokens, and cos and sin have 4 rows": (q, k, cos[:4], sin[:4]),
        "int32 or int64, got torch.float32": (q, k, cos, sin, torch.ones(5)),
        r"the shape \(5,\) or": (q, k, cos, sin, torch.ones(4, dtype=torch.int64)),
        r"got \(1, 5\)": (q, k, cos, sin, torch.ones(1, 5, dtype=torch.int64)),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            rope(*args)
    with pytest.raises(RuntimeError, match="must be dense"):
        rope_(torch.randn(5, 8, 2).mT, k, cos, sin)
    with pytest.raises(RuntimeError, match="share memory"):
        rope_(q[:, :1].expand(5, 2, 8), k, cos, sin)


@pytest.mark.gpu
def test_streams_graphs_and_repetition():
    cos, sin = tables(64, 64, "cuda")
    q, k = (torch.randn(64, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8))
    repeats(lambda: rope(q, k, cos, sin))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    needs_memory(40)
    tokens = (1 << 18) + 3
    cos, sin = tables(tokens, 64, "cuda")
    for start in (0, 1):  # of vectors, and of single elements: more threads than 2^31
        x = torch.zeros(tokens * 128 * 128 + 1, dtype=torch.bfloat16, device="cuda")[start:]
        q = x[: tokens * 128 * 128].view(tokens, 128, 128)
        q[-2:] = torch.randn(2, 128, 128, device="cuda")
        last = torch.arange(tokens - 2, tokens, device="cuda")
        got = rope(q, q[:, :1], cos, sin)
        want = rope(q[-2:], q[-2:, :1], cos, sin, last)
        assert torch.equal(got[0][-2:], want[0]) and torch.equal(got[1][-2:], want[1])
        assert not got[0][:-2].any()
        del x, q, got
