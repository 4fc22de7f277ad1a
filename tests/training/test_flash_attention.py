"""`jitkern.ops.BlockSparseMask` beside masks of all elements, and `jitkern.ops.flash_attention`."""

import inspect

import pytest
import torch
from helpers import refusing_to_wait
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from jitkern.ops import BlockSparseMask, flash_attention

pytestmark = pytest.mark.common_cache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)
SIZES = [(70, 45, 32), (64, 64, 32), (200, 333, (64, 32)), (5, 300, 128), (0, 7, 32), (7, 0, 32)]
each_size = pytest.mark.parametrize(("q_len", "k_len", "block"), SIZES, ids=str)


def positions(q_len, k_len, device):
    return torch.arange(q_len, device=device)[:, None], torch.arange(k_len, device=device)


@each_device
@each_size
def test_masks_say_what_they_were_made_of(device, q_len, k_len, block):
    i, j = positions(q_len, k_len, device)
    mask = BlockSparseMask.causal(q_len, k_len, block=block, device=device)
    assert torch.equal(mask.to_dense()[0, 0], j <= i)
    for left, right in ((20, 3), (0, 0), (None, 5), (1000, None)):
        mask = BlockSparseMask.sliding_window(
            q_len, k_len, left=left, right=right, block=block, device=device
        )
        first = i - (q_len + 1000 if left is None else left)
        last = i + (k_len if right is None else right)
        assert torch.equal(mask.to_dense()[0, 0], (first <= j) & (j <= last))
        assert mask.bits is None
    seen = torch.rand(2, 3, q_len, k_len, device=device) < 0.3
    seen[:, 1, : q_len // 2] = False
    assert torch.equal(BlockSparseMask.from_dense(seen, block=block).to_dense(), seen)
    assert torch.equal(BlockSparseMask.from_dense(seen[0], block=block).to_dense(), seen[:1])
    block_q, block_k = block if isinstance(block, tuple) else (block, block)
    blocks = torch.rand(2, 1, -(-q_len // block_q), -(-k_len // block_k), device=device) < 0.5
    wide = blocks.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)[..., :q_len, :k_len]
    for causal in (False, True):
        mask = BlockSparseMask.from_blocks(blocks, q_len, k_len, block=block, causal=causal)
        assert torch.equal(mask.to_dense(), wide & (j <= i) if causal else wide)
    assert mask.density <= blocks.float().mean() or not blocks.numel()


def test_full_blocks_have_no_elements():
    mask = BlockSparseMask.causal(512)
    full, partial = mask.starts.diff().view(4, 2).T
    assert full.tolist() == [0, 1, 2, 3] and partial.tolist() == [1, 1, 1, 1]
    assert mask.columns.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert mask.key_columns.tolist() == [1, 2, 3, 0, 2, 3, 1, 3, 2, 3]
    assert mask.density == 10 / 16
    seen = torch.ones(300, 300).tril().bool()
    assert BlockSparseMask.from_dense(seen).bits.shape == (3, 128, 4)


@pytest.mark.long
@each_device
def test_masks_of_flex_attention(device):
    document = torch.randint(0, 3, (300,), device=device).sort()[0]

    def mod(batch, head, q, k):
        return (document[q] == document[k]) & (q >= k) & ((head + batch + q + k) % 3 != 0)

    # Without full blocks only since Torch 2.12.
    known = "separate_full_blocks" in inspect.signature(create_block_mask).parameters
    for batch, heads in ((2, 2), (None, 2), (None, None)):
        for more in ({}, {"separate_full_blocks": False}) if known else ({},):
            flex = create_block_mask(mod, batch, heads, 300, 280, device, (64, 128), **more)
            mask = BlockSparseMask.from_flex(flex)
            assert torch.equal(
                mask.to_dense(), create_mask(mod, batch, heads, 300, 280, device=device)
            )
    # All blocks full or empty; and empty alone.
    for mod in (lambda b, h, q, k: q // 128 == k // 128, lambda b, h, q, k: q < 0):
        flex = create_block_mask(mod, None, None, 256, 256, device)
        want = create_mask(mod, None, None, 256, 256, device=device)
        assert torch.equal(BlockSparseMask.from_flex(flex).to_dense(), want)
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device)
    assert BlockSparseMask.from_flex(flex).bits.shape[0] == 8, "only partial blocks have elements"
    counts = torch.tensor([[[2, 0]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32, device=device)
    flex = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)
    mask = BlockSparseMask.from_flex(flex)
    assert (
        mask.bits is None and mask.to_dense()[0, 0].all(1).tolist() == [True] * 128 + [False] * 128
    )


@pytest.mark.long
@each_device
def test_attention_with_a_mask_is_that_of_pytorch(device):
    q = torch.randn(2, 4, 200, 32, device=device, requires_grad=True)
    k, v = (torch.randn(2, 2, 150, 32, device=device, requires_grad=True) for _ in range(2))
    i, j = positions(200, 150, device)
    seen = (j <= i) & (i - j < 60)
    seen[170:] = seen[100]  # PyTorch gives NaN where nothing is seen
    mask = BlockSparseMask.from_dense(seen)
    results = [
        flash_attention(q, k, v, mask, scale=0.3),
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True
        ),
        torch.compile(flash_attention, fullgraph=True, backend="aot_eager")(
            q, k, v, mask, scale=0.3
        ),
    ]
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in results]
    for out, each in zip(results, grads):
        torch.testing.assert_close(out, results[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(each, grads[1], rtol=1e-4, atol=1e-4)


@each_device
def test_attention_without_a_mask_is_that_of_pytorch(device):
    q, k, v = (torch.randn(2, h, 100, 32, device=device) for h in (4, 2, 2))
    causal = BlockSparseMask.causal(100, device=device)
    torch.testing.assert_close(
        flash_attention(q, k, v, causal=True),
        flash_attention(q, k, v, causal),
        rtol=1e-4,
        atol=1e-5,
    )
    assert flash_attention(q[:, :2], k, v).shape == (2, 2, 100, 32)
    assert flash_attention(q[:0], k[:0], v[:0], causal).shape == (0, 4, 100, 32)


def test_mistakes_are_named():
    q = torch.randn(1, 1, 64, 32)
    mask = BlockSparseMask.causal(64)
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu")
    with pytest.raises(ValueError, match=r"for 64 queries and 64 keys on cpu, and q and k have 60"):
        flash_attention(q[:, :, :60], q, q, mask)
    with pytest.raises(ValueError, match="causal=True is for calls without a mask"):
        flash_attention(q, q, q, mask, causal=True)
    with pytest.raises(TypeError, match="got BlockMask: make one by BlockSparseMask.from_flex"):
        flash_attention(q, q, q, flex)
    with pytest.raises(ValueError, match="multiples of 32, got 48 queries and 48 keys"):
        BlockSparseMask.causal(64, block=48)
    with pytest.raises(ValueError, match="are at least 0, got q_len=64, k_len=64, left=-1"):
        BlockSparseMask.sliding_window(64, left=-1)
    with pytest.raises(
        ValueError, match=r"need bool \[batch, heads, 2, 1\], got torch.bool \(1, 1\)"
    ):
        BlockSparseMask.from_blocks(torch.ones(1, 1) > 0, 256, 128)
    with pytest.raises(ValueError, match="seen must be bool"):
        BlockSparseMask.from_dense(torch.ones(4, 4))


@pytest.mark.gpu
def test_masks_of_lengths_do_not_wait_for_the_gpu():
    BlockSparseMask.causal(1000, device="cuda")
    with refusing_to_wait():
        BlockSparseMask.causal(1000, device="cuda")
        BlockSparseMask.sliding_window(1000, left=99, device="cuda")


@each_device
def test_it_follows_autocast(device):
    q, k, v = torch.randn(3, 1, 2, 100, 32, device=device)
    for mask in (None, BlockSparseMask.causal(100, device=device)):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = flash_attention(q, k, v, mask, causal=mask is None)
        assert out.dtype == torch.bfloat16
        want = flash_attention(q, k, v, mask, causal=mask is None)
        torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)
