"""`jitkern.ops.topk` beside a stable sort."""

import math

import pytest
import torch
from helpers import served
from row_calls import each_device, each_dtype, repeats

from jitkern import ops

pytestmark = pytest.mark.common_cache

inf, nan = math.inf, math.nan


def check(x, *ks):
    """Compare values and indices, which are those of a stable sort, bit by bit."""
    values, indices = x.cpu().sort(dim=-1, descending=True, stable=True)
    for k in ks:
        got, at = ops.topk(x, k)
        assert torch.equal(at.cpu(), indices[..., :k]), k
        torch.testing.assert_close(got.cpu(), values[..., :k], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.nan_to_num(), x.gather(-1, at).nan_to_num())


@pytest.mark.long
@each_device
@each_dtype
def test_equals_a_stable_sort(device, dtype):
    generator = torch.Generator().manual_seed(0)
    many = 20011 if device == "cuda" else 4001
    kept = {1: (1,), 33: (1, 32, 33), 1000: (3, 40, 999), many: (1, 64, 2048, 3000)}
    for columns, ks in kept.items():
        x = torch.randn(3, columns, generator=generator).to(dtype)
        for rows in (x, (2 * x).round(), torch.zeros_like(x), x.sort(-1).values):
            check(rows.to(device), *ks)


@pytest.mark.long
@each_device
@each_dtype
def test_nan_is_the_largest_and_zeros_are_equal(device, dtype):
    x = torch.tensor([[0.0, -0.0, nan, -inf, 1, inf, -nan, -1, 0.0, nan]] * 2).to(device, dtype)
    check(x, *range(11))
    for many in (100, 1500):  # the latter has more equal values than a GPU keeps
        check(x.repeat(1, many), 5, 600)


@pytest.mark.long
@each_device
def test_rows_may_lie_anywhere(device):
    flat = torch.randn(4 * 1001 + 1, device=device)
    wide = flat[1:].view(4, 1001)
    for x in (wide, wide.T, wide[:, 1:], wide[:, ::2], wide[:1].expand(3, -1), wide.view(2, 2, -1)):
        check(x, 1, 2)
    assert ops.topk(wide[:0], 3)[0].shape == (0, 3)
    assert [out.shape for out in ops.topk(wide, 0)] == [(4, 0)] * 2
    check(flat, 17)


@pytest.mark.long
@each_device
@pytest.mark.parametrize("k", [1, 7, 40])
def test_gradients_go_where_the_values_came_from(device, k):
    x = torch.randn(3, 40, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.topk(x, k)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.topk(x, k)[0].square(), (x,))
    values, indices = ops.topk(x, k)
    assert values.requires_grad
    assert not indices.requires_grad


@pytest.mark.gpu
def test_calls_are_served_from_c():
    served(ops.topk, torch.randn(3, 5000, device="cuda"), 40, device="cuda")


@pytest.mark.long
@each_device
def test_vmap_and_compile_find_the_same(device):
    x = torch.randn(3, 4, 50, device=device)
    values, indices = ops.topk(x, 5)
    for got in (
        torch.vmap(lambda y: ops.topk(y, 5))(x),
        torch.compile(lambda y: ops.topk(y, 5), fullgraph=True, backend="aot_eager")(x),
    ):
        assert torch.equal(got[0], values)
        assert torch.equal(got[1], indices)


@pytest.mark.gpu
def test_it_runs_in_a_graph_and_twice_the_same():
    x = torch.randn(5, 128256, device="cuda").bfloat16()
    repeats(lambda: ops.topk(x, 1000), waits=True)
