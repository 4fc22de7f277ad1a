"""`jitkern.ops.paged_decode` beside dense attention of one sequence after another, in float64."""

import math

import pytest
import torch
from row_calls import each_device, needs_memory, repeats

from jitkern.launch.kernels import Kernels
from jitkern.ops import kv_cache_append, paged_decode

pytestmark = pytest.mark.common_cache

FLOAT8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative, L2


def made(lens, *, q_len=1, kv_heads=2, group=4, d=64, page=16, columns=6, dtype=torch.float32, kind=None, layout="NHD", device="cpu"):  # fmt: skip
    """Arguments of a call: NaN behind each sequence, pages in random order, no table behind it."""
    g = torch.Generator().manual_seed(len(lens) * d + group)
    pages = len(lens) * columns + 2
    caches = torch.randn(2, pages, page, kv_heads, d, generator=g)
    table = torch.randperm(pages, generator=g)[: len(lens) * columns].view(len(lens), columns)
    used = torch.zeros(pages, page, dtype=torch.bool)
    for row, n in zip(table, lens):
        for t in range(n):
            used[row[t // page], t % page] = True
        row[math.ceil(n / page) :] = -1
    caches[:, ~used] = torch.nan
    if layout == "HND":
        caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
    q = torch.randn(len(lens), q_len, kv_heads * group + 1, d, generator=g).to(dtype)
    keys, values = caches.to(kind or dtype).to(device)
    table, lens = table.to(torch.int32), torch.tensor(lens, dtype=torch.int32)
    return q.to(device)[:, :, 1:], keys, values, table.to(device), lens.to(device)


def dense(q, keys, values, table, lens, scale=None, softcap=0.0, window=0, alibi_slopes=None, k_scale=None, v_scale=None):  # fmt: skip
    """Attention of one new token after another, over tokens that are gathered one by one."""
    q, table, lens = q.cpu().double(), table.cpu(), lens.tolist()
    keys, values = keys.cpu().double(), values.cpu().double()
    page, kv_heads, d = keys.shape[1:]
    outs, sums = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    for b, n in enumerate(lens):
        for i in range(q.shape[1]):
            p = n - q.shape[1] + i
            first = max(0, p + 1 - window) if window else 0
            if p < 0:
                continue
            at = torch.arange(first, p + 1)
            k, v = (c[table[b, at // page].long(), at % page] for c in (keys, values))
            for h in range(q.shape[2]):
                of = h * kv_heads // q.shape[2]
                s = k[:, of] @ q[b, i, h] * (scale or d**-0.5)
                if k_scale is not None:
                    s = s * k_scale.cpu().double().expand(kv_heads)[of]
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                if alibi_slopes is not None:
                    s = s + alibi_slopes.cpu().double()[h] * (at - p)
                sums[b, i, h] = s.logsumexp(0)
                outs[b, i, h] = s.softmax(0) @ v[:, of]
                if v_scale is not None:
                    outs[b, i, h] *= v_scale.cpu().double().expand(kv_heads)[of]
    return outs, sums


def right(args, *options, **keywords):
    out, lse = paged_decode(*args, *options, **keywords)
    want, sums = dense(*args, *options, **keywords)
    q = args[0]
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    error = (out.cpu().double() - want).norm() / want.norm().clamp(min=1e-9)
    assert error <= TOLERANCE[q.dtype], error
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=3e-6, atol=3e-6)
    assert not out.cpu()[sums == -math.inf].any()
    again = paged_decode(*args, *options, **keywords)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_kernels_for_gpus_get_rows_that_begin_at_16_bytes():
    """Also of a tensor that is contiguous, and begins elsewhere."""
    q, *rest = made([40, 17], dtype=torch.bfloat16, d=128)
    for start in (None, 0, 1, 4):
        memory, calls = torch.empty(q.numel() + 8, dtype=q.dtype), []
        apart = q if start is None else memory[start:][: q.numel()].view(q.shape).copy_(q)
        args, named = paged_decode.signature.complete((apart, *rest), {})
        launch = paged_decode.declaration.launchers["cuda"]
        launch(Kernels(calls.append), *args, **named)
        passed = calls[0].args[4]
        assert torch.equal(passed, q) and passed.data_ptr() % 16 == 0
        assert all(step % 8 == 0 for step in passed.stride()[:-1])


# On a GPU each line is some kernels to compile, and so are the rows that heads and new tokens make.
FORMS = [
    (torch.float32, None, 64), (torch.bfloat16, None, 128), (torch.float16, None, 256),
    (torch.bfloat16, FLOAT8, 128),
]  # fmt: skip
each_form = pytest.mark.parametrize(("dtype", "kind", "d"), FORMS, ids=str)


@pytest.mark.long
@each_device
@each_form
def test_groups_layouts_and_ragged_lengths(device, dtype, kind, d):
    for group in (1, 4, 5, 8, 16):
        lens, layout = [0, 1, 15, 16, 17, 96], "HND" if group % 4 else "NHD"
        form = {"dtype": dtype, "kind": kind, "d": d, "layout": layout, "device": device}
        right(made(lens, group=group, **form))


@pytest.mark.long
@each_device
@each_form
@pytest.mark.parametrize("q_len", [2, 5, 8])
def test_new_tokens_see_each_other_from_the_left(device, dtype, kind, d, q_len):
    form = {"dtype": dtype, "kind": kind, "d": d, "device": device}
    for group in (1, 4, 8):
        right(made([q_len, q_len - 1, 0, 50], q_len=q_len, group=group, **form))


@pytest.mark.long
@each_device
@each_form
def test_what_changes_scores(device, dtype, kind, d):
    args = made(
        [90, 33, 7, 1], q_len=3, page=32, columns=3, dtype=dtype, kind=kind, d=d, device=device
    )
    slopes = 0.5 ** torch.arange(8, device=device)
    for options in (
        {"scale": 0.3}, {"softcap": 2.0}, {"alibi_slopes": slopes},
        *({"window": n} for n in (1, 15, 16, 17, 200)),
        {"scale": 0.3, "softcap": 5.0, "window": 20, "alibi_slopes": slopes},
    ):  # fmt: skip
        right(args, **options)


@pytest.mark.long
@each_device
def test_scales_of_float8(device):
    args = made([40, 17], dtype=torch.bfloat16, kind=FLOAT8, d=128, device=device)
    each, one = torch.tensor([0.5, 3.0], device=device), torch.tensor([0.25], device=device)
    right(args, k_scale=each, v_scale=one)
    right(args, k_scale=one, v_scale=each)


@pytest.mark.long
@each_device
def test_what_was_appended_is_seen(device):
    """A float8 cache that is written and read with a scale equals a cache of the scaled numbers."""
    q, keys, values, table, lens = made([20, 5], dtype=torch.bfloat16, d=128, device=device)
    slots = table[:, 0].long() * 16 + lens.clamp(max=15)
    slots[0] = table[0, 1] * 16 + 4
    lens = lens + 1
    k, v = torch.randn(2, 2, 2, 128, dtype=torch.bfloat16, device=device)
    scale = torch.tensor([0.5], device=device)
    exact = [x.to(FLOAT8).float() * 0.5 for x in (k / 0.5, v / 0.5)]
    eighths = [c.to(FLOAT8) for c in (keys, values)]
    kv_cache_append(k, v, *eighths, slots, scale, scale)
    wide = [c.float().to(torch.bfloat16) * 0.5 for c in eighths]
    kv_cache_append(*(x.to(torch.bfloat16) for x in exact), *wide, slots)
    got = paged_decode(q, *eighths, table, lens, k_scale=scale, v_scale=scale)
    want = paged_decode(q, *wide, table, lens)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.long
@each_device
def test_a_length_beyond_the_table_ends_with_it(device):
    *args, full = made([96], device=device)
    long = torch.full_like(full, 1000)
    assert torch.equal(paged_decode(*args, long)[0], paged_decode(*args, full)[0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_that_there_is_not_gives_nan(dtype):
    """On the CPU, in its sequence alone, and only where its tokens are seen."""
    q, keys, values, table, lens = made([40, 40, 40, 40], dtype=dtype)
    want, sums = paged_decode(q, keys, values, table, lens)
    for row, page in enumerate([-1, keys.shape[0], 2**31 - 1]):
        table[row, row] = page
    out, lse = paged_decode(q, keys, values, table, lens)
    assert out[:3].isnan().all() and lse[:3].isnan().all()
    assert torch.equal(out[3], want[3]) and torch.equal(lse[3], sums[3])
    table[:3, :2] = table[3, :2]
    table[2] = table[3]
    windowed = paged_decode(q, keys, values, table, lens, window=8)
    table[:, 0] = -1
    for got, one in zip(paged_decode(q, keys, values, table, lens, window=8), windowed):
        assert torch.equal(got, one) and not got.isnan().any()


@each_device
def test_nothing_gives_nothing(device):
    args = made([7, 9], device=device)
    q, keys, values, table, lens = args
    out, lse = paged_decode(q[:0], keys, values, table[:0], lens[:0])
    assert out.shape == (0, 1, 8, 64) and lse.shape == (0, 1, 8)
    for empty in ((q, keys, values, table[:, :0], lens), (q, keys, values, table, lens * 0)):
        out, lse = paged_decode(*empty)
        assert not out.any() and (lse == -math.inf).all()


@pytest.mark.long
@each_device
def test_q_has_three_dimensions_or_four(device):
    q, *rest = made([30, 20], dtype=torch.bfloat16, d=128, device=device)
    for x, y in zip(paged_decode(q, *rest), paged_decode(q[:, 0], *rest)):
        assert torch.equal(x[:, 0], y)


@each_device
def test_what_does_not_fit_is_refused(device):
    q, kc, vc, table, lens = made([30, 20], device=device)
    one = torch.ones(1, device=device)
    for match, args in {
        "q_len up to 8": (q.expand(-1, 9, -1, -1), kc, vc, table, lens),
        r"with d of \(64, 128, 256\)": (q[..., :32], kc[..., :32], vc[..., :32], table, lens),
        "a multiple of 16": (q, kc[:, :15], vc[:, :15], table, lens),
        "7 heads of q are not a multiple of 2": (q[:, :, :7], kc, vc, table, lens),
        "both of that dtype or float8_e4m3fn": (q, kc.half(), vc.half(), table, lens),
        "the same strides": (q, kc, vc.transpose(1, 2).contiguous().transpose(1, 2), table, lens),
        r"int32 of the shapes \(2, columns\) and \(2,\)": (q, kc, vc, table.long(), lens),
        "got torch.int32 of shape": (q, kc, vc, table[:1], lens),
        "window must be at least 0": (q, kc, vc, table, lens, None, 0.0, -1),
        r"alibi_slopes must be float32 of shape \(8,\)": (q, kc, vc, table, lens, None, 0.0, 0, one),
        "k_scale is for float8 caches": (q, kc, vc, table, lens, None, 0.0, 0, None, one),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            paged_decode(*args)


@pytest.mark.gpu
def test_splits_streams_graphs_and_repetition():
    form = {"dtype": torch.bfloat16, "d": 128, "group": 8, "device": "cuda"}
    right(made([5000], kv_heads=1, columns=400, **form))  # many splits
    args = made([700, 30, 0], columns=64, **form)
    right(args)
    repeats(lambda: paged_decode(*args))


@pytest.mark.gpu
def test_a_replay_reads_lengths_and_tables_of_now():
    args = made([700, 30], columns=64, dtype=torch.bfloat16, d=128, group=8, device="cuda")
    paged_decode(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_decode(*args)
    args[3].copy_(args[3].roll(1, 0)), args[4].copy_(args[4].roll(1, 0))
    graph.replay()
    assert all(map(torch.equal, got, paged_decode(*args)))


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_32_bits_count():
    needs_memory(40)
    pages = (1 << 31) // (16 * 8 * 128) + 4
    for layout in ("NHD", "HND"):
        shape = (16, 8) if layout == "NHD" else (8, 16)
        cache = torch.zeros(pages, *shape, 128, dtype=torch.bfloat16, device="cuda")
        view = cache if layout == "NHD" else cache.transpose(1, 2)
        view[-3:].normal_()
        q = torch.randn(1, 64, 128, dtype=torch.bfloat16, device="cuda")
        table = torch.tensor([[pages - 1, pages - 3, pages - 2]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([45], dtype=torch.int32, device="cuda")
        got = paged_decode(q, view, view, table, lens)
        few = view[-3:].clone()
        want = paged_decode(q, few, few, table - (pages - 3), lens)
        assert all(map(torch.equal, got, want))
        del cache, view
