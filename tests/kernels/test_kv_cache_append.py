"""`jitkern.ops.kv_cache_append`: layouts, slots that there are not, float8, large caches."""

import pytest
import torch
from helpers import refusing_to_wait
from row_calls import bits, each_device, needs_memory

from jitkern.ops import kv_cache_append

pytestmark = pytest.mark.common_cache

FLOAT8 = torch.float8_e4m3fn


def caches(layout, pages, page_size, heads, d, dtype, device):
    """Two caches [pages, page_size, heads, d] of random bytes: what was there before."""
    shape = (page_size, heads) if layout == "NHD" else (heads, page_size)
    pair = torch.randint(0, 60, (2, pages, *shape, d), device=device).to(dtype)
    return [x if layout == "NHD" else x.transpose(1, 2) for x in pair]


@pytest.mark.long
@each_device
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["the same", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tokens_go_to_their_slots_and_nothing_else_changes(device, layout, kind, dtype):
    kind = FLOAT8 if kind == "float8" else dtype
    k, v = 20 * torch.randn(2, 6, 3, 64, device=device)
    k[0, 0, :4] = torch.tensor([1e4, -1e4, torch.nan, 1e-9])  # beyond float8, and NaN
    k, v = k.to(dtype), v.to(dtype)
    slots = torch.tensor([15, 16, -1, 47, 0, 48], device=device)  # -1 and 48 are none
    scales = (torch.tensor([0.5, 3.0, 0.07], device=device), torch.tensor([2.0], device=device))
    for some in ((None, None), scales) if kind == FLOAT8 else ((None, None),):
        pair = caches(layout, 3, 16, 3, 64, kind, device)
        want = [x.clone() for x in pair]
        kv_cache_append(k, v, *pair, slots, *some)
        for x, cache, scale in zip((k, v), want, some):
            for token in (0, 1, 3, 4):
                number = x[token]
                if kind == FLOAT8:
                    number = number.float() if scale is None else number.float() / scale.view(-1, 1)
                    number = number.clamp(-448, 448)
                page, at = divmod(slots[token].item(), 16)
                cache.view(torch.uint8)[page, at] = number.to(kind).view(torch.uint8)
        for got, expected in zip(pair, want):
            assert torch.equal(bits(got), bits(expected))


@pytest.mark.long
@each_device
def test_parts_of_a_packed_qkv_are_read_where_they_lie(device):
    qkv = torch.randn(5, 6, 16, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([3, 1, 4, 0, 5], dtype=torch.int32, device=device)
    for d in (16, 9):  # vectors, and single numbers
        parts = (qkv[:, 2:4, :d], qkv[:, 4:, :d])
        for rows in (parts, (qkv[..., 1 : d + 1],) * 2, (qkv.mT[:, :d],) * 2):
            pair = caches("NHD", 2, 3, rows[0].shape[1], rows[0].shape[2], torch.bfloat16, device)
            kv_cache_append(*rows, *pair, slots)
            for x, cache in zip(rows, pair):
                assert torch.equal(cache.flatten(0, 1)[slots.long()], x)


@each_device
def test_what_does_not_fit_is_refused(device):
    k, v = torch.randn(2, 4, 2, 8, device=device)
    kc, vc = torch.zeros(2, 3, 16, 2, 8, device=device)
    slots, one = torch.arange(4, device=device), torch.ones(1, device=device)
    for match, args in {
        r"must be \[tokens, heads, d\]": (k[0], v[0], kc, vc, slots),
        r"must be \[pages, page_size, 2, 8\], got \(3, 16, 1, 8\)": (k, v, kc[:, :, :1], vc[:, :, :1], slots),
        "of one dtype, got torch.float32 and torch.float64": (k, v.double(), kc, vc, slots),
        "must both be torch.float32 or float8_e4m3fn": (k, v, kc.half(), vc.half(), slots),
        r"int32 or int64 of shape \(4,\), got torch.int64 of shape \(3,\)": (k, v, kc, vc, slots[:3]),
        "got torch.float32 of shape": (k, v, kc, vc, slots.float()),
        "k_scale is for float8 caches": (k, v, kc, vc, slots, one),
        "v_scale must be float32, one number or one for each of 2 heads": (k, v, kc.to(FLOAT8), vc.to(FLOAT8), slots, one, one.expand(3)),
        "is expanded": (k, v, kc[:1].expand(3, -1, -1, -1), vc, slots),
        "must be dense": (k, v, kc.mT.contiguous().mT, vc, slots),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            kv_cache_append(*args)


@pytest.mark.gpu
def test_it_runs_in_graphs_and_nothing_waits():
    k, v = torch.randn(2, 7, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(7, device="cuda") * 5
    eager, captured = (caches("NHD", 3, 16, 8, 128, FLOAT8, "cuda") for _ in range(2))
    for x, y in zip(eager, captured):
        y.copy_(x)
    with refusing_to_wait():
        kv_cache_append(k, v, *eager, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_cache_append(k, v, *captured, slots)
    graph.replay()
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(eager, captured))


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_32_bits_count():
    needs_memory(40)
    pages = (1 << 31) // (16 * 8 * 128) + 2
    for layout in ("NHD", "HND"):
        shape = (16, 8) if layout == "NHD" else (8, 16)
        cache = torch.zeros(pages, *shape, 128, dtype=torch.bfloat16, device="cuda")
        view = cache if layout == "NHD" else cache.transpose(1, 2)
        k = torch.randn(2, 8, 128, dtype=torch.bfloat16, device="cuda")
        kv_cache_append(k, k, view, view, torch.tensor([pages * 16 - 1, 5], device="cuda"))
        assert torch.equal(view[-1, 15], k[0]) and torch.equal(view[0, 5], k[1])
        del view, cache
