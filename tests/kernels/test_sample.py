"""`jitkern.ops.sample` and `sample_filter` beside a sort in float64, and the numbers of Philox."""

import math

import pytest
import torch
from helpers import refusing_to_wait
from row_calls import each_device, elsewhere

from jitkern import ops
from jitkern.kernels_src.sample.kernel import random_bits, weights

pytestmark = pytest.mark.common_cache

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
inf, nan = math.inf, math.nan
LONG = {"cpu": 1201, "cuda": 5003}  # more equal values than a GPU keeps for one search
FILTERS = {
    "none": (1.0, 0, 1.0), "top_k": (0.7, 40, 1.0), "top_p": (1.3, 0, 0.9),
    "both": (0.8, 50, 0.5), "wide": (1.0, 3000, 0.99), "first": (1.0, 0, 1e-9),
    "greedy": (0.0, 7, 0.9), "hot": (1e6, 300, 0.999), "cold": (1e-3, 9, 0.9),
    "more": (1.0, 10**9, 0.8),
}  # fmt: skip
each_filter = pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)


def rows_of(kind, columns, dtype=torch.float32):
    """Two rows of one kind."""
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(columns))
    if kind == "peaked":
        x = 4 * x
    elif kind == "ties":
        x = (2 * x).round()
    elif kind == "constant":
        x = torch.zeros_like(x)
    elif kind == "masked":
        x[:, 1::3] = -inf
    elif kind == "all masked":
        x[:] = -inf
    elif kind == "one-hot":
        x[:] = -inf
        x[:, columns // 2] = 3.0
    elif kind == "nan":
        x[:, columns // 3] = nan
        x[0, -1] = nan
    elif kind == "infinite":
        x[:, :: columns // 2 + 1] = inf
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "descending":
        x = x.sort(-1, descending=True).values
    return x.to(dtype)


KINDS = (
    "plain", "peaked", "ties", "constant", "masked", "all masked", "one-hot", "nan", "infinite",
    "zeros", "descending",
)  # fmt: skip


def state(device, seed=5, offset=0):
    return torch.tensor([seed], device=device), torch.tensor([offset], device=device)


def sorted_set(row, temperature, top_k, top_p):
    """Return the indices in descending order, how many are kept at least and at most, and their p.

    In float64. The two numbers differ where a cumulative probability is within 1e-6 of top_p.
    """
    values, order = row.double().cpu().sort(descending=True, stable=True)
    if temperature == 0:
        return order, 1, 1, torch.ones(1, dtype=torch.float64)
    k = min(top_k, len(row)) if top_k > 0 else len(row)
    if not math.isfinite(values[0]):  # what equals the largest is equally likely, and nothing else
        p = ((values == values[0]) | (values.isnan() & values[0].isnan()))[:k].double()
    else:
        p = ((values - values[0]) / temperature).exp()[:k]
    p = p / p.sum()
    before = p.cumsum(0) - p
    least, most = (int((before < top_p + e).sum()) for e in (-1e-6, 1e-6))
    return order, (k if top_p >= 1 else max(least, 1)), (k if top_p >= 1 else max(most, 1)), p


@pytest.mark.long
@each_device
@each_dtype
@each_filter
def test_what_is_kept_is_what_a_sort_keeps(device, dtype, filters):
    exact = total = 0
    for columns in (LONG[device], 257, 1):
        for kind in KINDS:
            x = rows_of(kind, columns, dtype).to(device)
            got = ops.sample_filter(x, *filters)
            for row, out in zip(x.cpu(), got.cpu(), strict=True):
                order, least, most, _ = sorted_set(row, *filters)
                kept = ~out.isneginf()
                possible = ~row[order].isneginf()
                count = int(kept.sum())
                expected = torch.zeros(columns, dtype=torch.bool)
                expected[order[possible][:count]] = True
                assert torch.equal(kept, expected), kind
                assert possible[:least].sum() <= count <= possible[:most].sum(), kind
                assert torch.equal(out[kept].nan_to_num(7.0), row[kept].nan_to_num(7.0))
                if kind in ("plain", "peaked", "masked", "descending"):  # not k equal weights
                    exact, total = exact + (least == most), total + 1
    assert exact >= 0.9 * total  # few rows have a sum that near to top_p


@pytest.mark.long
@each_device
@each_filter
def test_the_token_is_the_one_of_the_rule(device, filters):
    for columns in (LONG[device], 100):
        for kind in KINDS:
            x = rows_of(kind, columns).to(device)
            args = (x, *state(device, 11, 1 << 33), *filters)
            token = ops.sample(*args)
            assert torch.equal(token, ops.sample(*args))
            assert torch.equal(token, ops.sample.run_reference(*args, None, None, None)), kind
            _, _, most, _ = sorted_set(x[0], *filters)
            order = x[0].cpu().sort(descending=True, stable=True).indices
            assert token[0].item() in order[:most]


@pytest.mark.gpu
@each_dtype
@each_filter
def test_a_gpu_draws_the_token_of_the_cpu(dtype, filters):
    for columns, kinds in ((128256, ("plain", "ties", "descending")), (20011, KINDS)):
        for kind in kinds:
            x = rows_of(kind, columns, dtype)
            on_the_cpu = ops.sample(x, *state("cpu"), *filters)
            on_the_gpu = ops.sample(x.cuda(), *state("cuda"), *filters)
            assert torch.equal(on_the_cpu, on_the_gpu.cpu()), kind
            kept = (ops.sample_filter(y, *filters).isneginf() for y in (x, x.cuda()))
            assert torch.equal(next(kept), next(kept).cpu()), kind


def chi_square(tokens, p):
    """Return (x - df) / sqrt(2 df): of the standard normal distribution, about."""
    likely = p * len(tokens) >= 5
    counts = torch.bincount(tokens.cpu(), minlength=len(p)).double()
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([p[likely], p[~likely].sum()[None]]) * len(tokens)
    seen, expected = seen[expected > 0], expected[expected > 0]
    degrees = len(seen) - 1
    return (((seen - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * max(degrees, 1))


@each_device
@pytest.mark.parametrize(
    "filters", [(1.0, 0, 1.0), (0.7, 20, 1.0), (1.5, 0, 0.8), (1.0, 30, 0.9)], ids=str
)
@pytest.mark.long
def test_tokens_have_the_probabilities_of_the_kept(device, filters):
    row = 2 * torch.randn(100, generator=torch.Generator().manual_seed(1))
    order, count, most, p = sorted_set(row, *filters)
    assert count == most
    exact = torch.zeros(100, dtype=torch.float64)
    exact[order[:count]] = p[:count] / p[:count].sum()
    x = row.to(device).expand(5000, -1)
    tokens = torch.cat([ops.sample(x, *state(device, 3, i), *filters) for i in range(8)])
    assert exact[tokens.cpu()].min() > 0
    assert chi_square(tokens, exact) < 4
    assert len(set(map(tuple, tokens.view(8, -1).tolist()))) == 8  # an offset, other numbers


def test_random_numbers_are_those_of_philox():
    # Known answers of Random123: two of the four words that a counter has.
    most = -1  # all bits
    for seed, offset, row, first in (
        (0, 0, 0, 0xE169C58D6627E8D5),
        (most, most, most, 0x41C83B0E408F276D),
        (
            0x299F31D0A4093822, 0x85A308D3243F6A88 - (1 << 64), 0x0370734413198A2E,
            0x94FDCCEBD16CFE09,
        ),
    ):  # fmt: skip
        got = random_bits(*(torch.tensor(n) for n in (seed, offset, row))).item()
        assert got & (1 << 64) - 1 == first


@pytest.mark.long
@each_device
def test_numbers_of_rows_are_as_one_number_for_all(device):
    x = torch.randn(6, 900, generator=torch.Generator().manual_seed(0)).to(device)
    temperature = torch.tensor([0.0, 0.3, 1.0, 1.0, 2.0, 5.0], device=device)
    top_k = torch.tensor([0, 5, 0, -1, 900, 2000], device=device)
    top_p = torch.tensor([0.5, 1.0, 0.25, 1.0, 0.999, 0.0], device=device)
    by_row = {"row_temperature": temperature, "row_top_k": top_k, "row_top_p": top_p}
    got = ops.sample_filter(x, **by_row)
    for i in range(6):
        one = ops.sample_filter(x[i : i + 1], *(v[i].item() for v in by_row.values()))
        assert torch.equal(got[i : i + 1], one)
    small = {**by_row, "row_top_k": top_k.to(torch.int32), "row_top_p": top_p.double()}
    assert torch.equal(ops.sample_filter(x, **small), got)


@each_device
@pytest.mark.long
def test_a_seed_for_each_row_goes_with_the_row(device):
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).to(device)
    seed, offset = torch.arange(5, device=device), torch.arange(5, device=device) * 7
    tokens = ops.sample(x, seed, offset)
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    assert torch.equal(ops.sample(x[order], seed[order], offset[order]), tokens[order])
    same = x[:1].expand(5, -1)
    assert len(set(ops.sample(same, seed, offset[:1]).tolist())) > 1
    assert len(set(ops.sample(same, *state(device)).tolist())) > 1  # rows have their own numbers


@each_device
@pytest.mark.long
def test_rows_may_lie_anywhere(device):
    wide = torch.randn(4, 1003, generator=torch.Generator().manual_seed(3)).to(device)
    for x in (wide[:, 1:-1], wide.T.contiguous().T, wide[::2], wide[1:2], wide[:1].expand(3, -1)):
        dense = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
        args = *state(device), 1.0, 20, 0.9
        assert torch.equal(ops.sample(x, *args), ops.sample(dense, *args))
        assert torch.equal(ops.sample_filter(x, *args[2:]), ops.sample_filter(dense, *args[2:]))


@each_device
@pytest.mark.long
def test_vmap_draws_as_a_loop_does(device):
    x = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(4)).to(device)
    seed, offset = state(device)
    got = torch.vmap(lambda logits: ops.sample(logits, seed, offset, 0.9, 10, 0.8))(x)
    assert torch.equal(got, torch.stack([ops.sample(y, seed, offset, 0.9, 10, 0.8) for y in x]))


@pytest.mark.gpu
def test_a_graph_that_advances_the_offset_draws_anew():
    x = torch.randn(4, 3000, device="cuda")
    seed, offset = state("cuda")
    args = 1.0, 0, 0.95
    eager = [ops.sample(x, seed, offset + i, *args) for i in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = ops.sample(x, seed, offset, *args)
        offset += 1
    for wanted in eager:
        graph.replay()
        assert torch.equal(tokens, wanted)
    with refusing_to_wait():
        ops.sample(x, seed, offset, *args)
    with elsewhere():
        again = ops.sample(x, seed, offset - 4, *args)
    assert torch.equal(again, eager[0])


def test_weights_of_the_reference_are_those_of_rule_h():
    """The weights are those that the kernel for the CPU computed while there was one."""
    t = torch.tensor([0, -1e-3, -0.5, -0.75, -1.25, -7.3, -20.6, -39.9, -40, -40.1, -inf, nan])
    assert weights(t).tolist() == [
        1 << 40, 1098749771776, 777472049152, 653773504512, 462287667200, 6977193472, 691802, 1, 1,
        0, 0, 0,
    ]  # fmt: skip


@pytest.mark.long
@each_device
def test_nan_as_a_filter_keeps_the_largest_or_is_refused(device):
    for columns in (9, LONG[device]):
        logits = torch.cat([rows_of(kind, columns) for kind in ("peaked", "nan", "masked")])
        logits, none = logits.to(device), torch.full((6,), nan, device=device)
        for top_k in (0, 3):
            kept = ops.sample_filter(logits, top_k=top_k, row_top_p=none)
            alone = ops.sample_filter(logits, top_k=1)
            assert torch.equal(kept.nan_to_num(7), alone.nan_to_num(7))
            wanted = ops.sample_filter.run_reference(logits, 1.0, top_k, 1.0, None, None, none)
            assert torch.equal(kept.nan_to_num(7), wanted.nan_to_num(7))
            assert torch.equal(ops.sample(logits, *state(device), top_k=top_k, row_top_p=none),
                               ops.sample(logits, *state(device), top_k=1))  # fmt: skip
    assert ops.sample_filter(logits, 1.0, 0, 0.5).shape == logits.shape
    for name in ("top_p", "temperature"):
        with pytest.raises(RuntimeError, match=f"{name} must be .* got (nan|NaN)"):
            ops.sample_filter(logits, **{name: nan})
