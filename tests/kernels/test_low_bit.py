"""Linear layers with weights of 4 and 8 bits, and rows as numbers of 8 bits, against float64."""

from types import SimpleNamespace

import pytest
import torch
from helpers import refusing_to_wait, served
from row_calls import each_device, elsewhere

from benches.kernels.checks import poison
from jitkern import ops
from jitkern.kernels_src import int4, low_bit

HALVES = (torch.bfloat16, torch.float16)
KINDS = (int4.SYMMETRIC, int4.WHOLE_ZEROS, int4.ADDED_ZEROS)
# Both sides of each number of tokens at which another form begins, and of each tile of 8.
TOKENS = {"cpu": (1, 7, 8, 9, 40), "cuda": (1, 2, 4, 5, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 200)}


def int4_weight(rows, columns, group, dtype, kind, device="cpu"):
    """A weight whose results have the magnitude of x, about."""
    generator = torch.Generator().manual_seed(rows + columns + kind)
    q = torch.randint(0, 16, (rows, columns), generator=generator)
    scale, zero = int4_scales(rows, columns, group, dtype, kind, device, generator)
    return int4.pack(q).to(device), scale, zero


def int4_scales(rows, columns, group, dtype, kind, device, generator=None):
    """The scales of such a weight, and its zeros."""
    shape = columns // group, rows
    scale = (0.1 + torch.rand(shape, generator=generator)) * 0.3 / columns**0.5
    zero = None
    if kind == int4.WHOLE_ZEROS:
        zero = torch.randint(0, 17, shape, generator=generator).to(torch.uint8).to(device)
    elif kind == int4.ADDED_ZEROS:
        zero = (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)
    return scale.to(dtype).to(device), zero


def random_int4_weight(rows, columns, group, dtype, kind, device):
    """The same, made at once where it shall lie; rows are whole tiles."""
    shape = rows // 16, columns // 64, 32, 4
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    return words, *int4_scales(rows, columns, group, dtype, kind, device)


def int8_weight(rows, columns, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(rows + columns)
    q = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    scale = (0.1 + torch.rand(rows, generator=generator)) * 0.02 / columns**0.5
    return q.to(device), scale.to(dtype).to(device)


def numbers(*shape, dtype, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def right(op, x, *weight):
    """Check a call against float64, and that another gives the same bits; return the result."""
    poison([x, *(t for t in weight if t is not None)], x.device)
    got = op(x, *weight)
    wide = (t.double() if t is not None and t.is_floating_point() else t for t in weight)
    exact = op.run_reference(x.double(), *wide)
    error = (got.double() - exact).norm() / exact.norm()
    assert error <= (2e-6 if x.dtype == torch.float32 else 0.6 * torch.finfo(x.dtype).eps), error
    # Above the crossover the weight is rounded, too: an error in units of all results.
    worst = ((got.double() - exact).abs() / (exact.abs() + exact.square().mean().sqrt())).max()
    assert worst <= (1e-5 if x.dtype == torch.float32 else 2 * torch.finfo(x.dtype).eps), worst
    assert torch.equal(got, op(x, *weight))
    return got


@pytest.mark.long
@each_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(48, 384, 128), (37, 320, 64), (1, 64, 64), (700, 1024, 128)]
)
def test_weights_of_4_bits(device, kind, rows, columns, group):
    for dtype in HALVES if device == "cuda" else (torch.bfloat16,):
        weight = int4_weight(rows, columns, group, dtype, kind, device)
        bias = numbers(rows, dtype=dtype, device=device)
        for tokens in TOKENS[device]:
            x = numbers(tokens, columns, dtype=dtype, device=device)
            right(ops.w4a16_linear, x, *weight, bias if tokens % 2 else None)
    weight = int4_weight(rows, columns, group, torch.float32, kind, device)
    right(ops.w4a16_linear, numbers(3, columns, dtype=torch.float32, device=device), *weight, None)


@pytest.mark.long
@each_device
@pytest.mark.parametrize(("rows", "group"), [(128, 128), (131, 64)])
def test_whole_zeros_of_all_eight_bits(device, rows, group):
    """With one 1 in each row of x, results are whole numbers from -255 to 15, and exact."""
    for dtype in HALVES if device == "cuda" else (torch.bfloat16,):
        q, _, _ = int4_weight(rows, 256, group, dtype, int4.WHOLE_ZEROS)
        zero = torch.arange(256 // group * rows).view(-1, rows).to(torch.uint8).flip(1)
        scale = torch.ones(zero.shape, dtype=dtype)
        weight = int4.values(q, scale, zero, torch.float32)
        q, scale, zero = (tensor.to(device) for tensor in (q, scale, zero))
        for tokens in TOKENS[device]:
            at = 37 * torch.arange(tokens) % 256
            x = torch.eye(256, dtype=dtype)[at].to(device)
            got = ops.w4a16_linear(x, q, scale, zero)
            assert torch.equal(got.float().cpu(), weight.T[at]), (dtype, tokens)


@pytest.mark.long
@each_device
@pytest.mark.parametrize(("rows", "columns"), [(48, 384), (37, 320), (1, 64), (700, 1024)])
def test_weights_of_8_bits(device, rows, columns):
    for dtype in HALVES if device == "cuda" else (torch.bfloat16,):
        for of_scale in (dtype, torch.float32):
            weight = int8_weight(rows, columns, of_scale, device)
            bias = numbers(rows, dtype=dtype, device=device)
            for tokens in TOKENS[device]:
                x = numbers(tokens, columns, dtype=dtype, device=device)
                right(ops.w8a16_linear, x, *weight, bias if tokens % 2 else None)


@pytest.mark.long
@each_device
@pytest.mark.parametrize(("rows", "columns"), [(48, 384), (37, 320), (1, 64), (700, 1024)])
def test_both_factors_of_8_bits(device, rows, columns):
    for dtype in (*HALVES, torch.float32) if device == "cuda" else (torch.bfloat16,):
        weight = int8_weight(rows, columns, torch.float32, device)
        bias = numbers(rows, dtype=dtype, device=device)
        for tokens in TOKENS[device]:
            # Whole numbers whose largest is 127 are their own 8 bits: nothing is left to roundings.
            x = (20 * numbers(tokens, columns, dtype=torch.float32)).round().clamp(-100, 100)
            x[:, 5] = 127
            x = x.to(device, dtype)
            right(ops.int8_linear, x, *weight, bias if tokens % 2 else None)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_rows_that_begin_another_size_of_block(tiles):
    rows = 16 * tiles * torch.cuda.get_device_properties("cuda").multi_processor_count
    for more in (0, 5):
        dtype = torch.bfloat16
        of_4_bits = int4_weight(rows + more, 256, 128, dtype, int4.SYMMETRIC, "cuda")
        of_8_bits = int8_weight(rows + more, 256, dtype, "cuda")
        for tokens in (1, 8, 9, 40):
            x = numbers(tokens, 256, dtype=dtype, device="cuda")
            right(ops.w4a16_linear, x, *of_4_bits, None)
            right(ops.w8a16_linear, x, *of_8_bits, None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (720, 1280), (4112, 4096), (16528, 4096)])
def test_blocks_that_begin_and_end_within_rows(rows, columns, kind):
    for dtype in HALVES:
        weight = random_int4_weight(rows, columns, 128, dtype, kind, "cuda")
        bias = numbers(rows, dtype=dtype, device="cuda")
        for tokens in (9, 16, 17, 30, 32, 33, 61, 64):
            x = numbers(tokens, columns, dtype=dtype, device="cuda")
            want = right(ops.w4a16_linear, x, *weight, bias if tokens % 2 else None)
            x[1] = float("nan")
            got = ops.w4a16_linear(x, *weight, bias if tokens % 2 else None)
            others = torch.arange(tokens, device="cuda") != 1
            assert torch.equal(got[others], want[others])
            assert got[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "group"), [(8192, 128), (4096, 64), (5632, 128)])
def test_weights_of_which_a_multiprocessor_reads_much(kind, columns, group):
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    rows = (low_bit.LEAST * multiprocessors // columns // 16 + 3) * 16
    for dtype in HALVES:
        weight = random_int4_weight(rows, columns, group, dtype, kind, "cuda")
        bias = numbers(rows, dtype=dtype, device="cuda")
        for tokens in (1, 3, 8):
            x = numbers(tokens, columns, dtype=dtype, device="cuda")
            right(ops.w4a16_linear, x, *weight, bias if tokens % 2 else None)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [4096, 6144])
def test_tiles_that_two_blocks_stream(columns, monkeypatch):
    monkeypatch.setattr(low_bit, "LEAST", 0)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    dtype = torch.bfloat16
    for tiles in (multiprocessors, multiprocessors + 1, 2 * multiprocessors - 1):
        weight = random_int4_weight(16 * tiles, columns, 128, dtype, int4.WHOLE_ZEROS, "cuda")
        given = [numbers(tokens, columns, dtype=dtype, device="cuda") for tokens in (1, 8, 3)]
        wanted = [right(ops.w4a16_linear, x, *weight, None) for x in given]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [ops.w4a16_linear(x, *weight) for x in given * 5]
        for _ in range(10):
            graph.replay()
        in_a_row = [ops.w4a16_linear(x, *weight) for x in given * 20]  # launches overlap
        for got, want in zip(captured + in_a_row, wanted * 25, strict=True):
            assert torch.equal(got, want)


@pytest.mark.long
def test_rounding_x_to_8_bits_is_all_that_int8_linear_loses():
    q, scale = int8_weight(64, 1024, torch.float32)
    x = numbers(5, 1024, dtype=torch.float32)
    exact = x.double() @ (q.double() * scale[:, None].double()).T
    got = ops.int8_linear(x, q, scale)
    assert 0.001 < (got - exact).norm() / exact.norm() < 0.02


@pytest.mark.long
@each_device
def test_rows_as_numbers_of_8_bits(device):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 1000), (2, 5, 17), (4, 4096)):
            x = numbers(*shape, dtype=dtype, device=device)
            x[0] *= 1e-3
            for kind, most in (("int8", 127), ("float8_e4m3fn", 448)):
                q, scale = ops.quantize_rowwise(x, kind)
                assert scale.shape == (*shape[:-1], 1)
                top = x.abs().amax(-1, keepdim=True).float()
                assert torch.equal(scale, top / torch.full_like(top, most))  # not top * (1 / most)
                assert q.float().abs().amax(-1).eq(most).all()
                error = (q.float() * scale - x.float()).abs()
                step = scale * 0.501 if kind == "int8" else scale * 2**-9 + x.abs() / 15.9
                assert (error <= step).all()


@pytest.mark.long
@each_device
def test_rows_of_zeros_nan_and_infinity_as_numbers_of_8_bits(device):
    x = torch.zeros(4, 70, device=device)
    x[1, 3], x[2, 69], x[3, 0] = float("nan"), float("inf"), 2
    for kind in ("int8", "float8_e4m3fn"):
        q, scale = ops.quantize_rowwise(x, kind)
        assert q[0].float().abs().max() == 0 == scale[0]
        assert scale[1].isnan()
        assert not scale[2].isfinite()
        assert q[3, 0].float() * scale[3] == 2


@pytest.mark.long
@each_device
def test_rows_of_the_smallest_numbers_as_numbers_of_8_bits(device):
    x = torch.tensor([[1.0, -0.5, 0, 0.2]], device=device)
    x = x * torch.tensor([3e-36, 1e-36, 1e-37, 1e-38, 3e-39], device=device)[:, None]
    normed = x.repeat(1, 2), None, 1.0  # an epsilon of 1, so the rows stay as small
    for kind in ("int8", "float8_e4m3fn"):
        for op, args in ((ops.quantize_rowwise, (x,)), (ops.rms_norm_quantized, normed)):
            q, scale = op(*args, dtype=kind)
            want, units = op.run_reference(*args, dtype=kind)
            assert torch.equal(q.float(), want.float()) and torch.equal(scale, units)
            error = (q.double() * scale - args[0].double()).abs()
            step = scale * 0.501 if kind == "int8" else scale * 2**-9 + args[0].abs() / 15.9
            assert (error <= step).all()


def calls(device, dtype=torch.bfloat16):
    """(op, x, arguments after it) of each linear layer, for 3 tokens."""
    x = numbers(3, 256, dtype=dtype, device=device)
    yield ops.w4a16_linear, x, int4_weight(40, 256, 128, dtype, int4.WHOLE_ZEROS, device)
    yield ops.w8a16_linear, x, int8_weight(40, 256, dtype, device)
    yield ops.int8_linear, x, int8_weight(40, 256, dtype, device)


@pytest.mark.long
@each_device
def test_a_token_does_not_see_others(device):
    for op, _, weight in calls(device):
        for tokens in (3, 13):
            x = numbers(tokens, 256, dtype=torch.bfloat16, device=device)
            clean = op(x, *weight)
            x[1] = float("nan")
            got = op(x, *weight)
            others = torch.arange(tokens, device=device) != 1
            assert torch.equal(got[others], clean[others])
            if op is not ops.int8_linear:
                assert got[1].isnan().all()


@pytest.mark.long
@each_device
def test_tensors_may_lie_anywhere(device):
    for op, x, weight in calls(device):
        want = op(x, *weight)
        wide = torch.zeros(3, 259, dtype=x.dtype, device=device)
        wide[:, 1:257] = x
        assert torch.equal(op(wide[:, 1:257], *weight), want)
        assert torch.equal(op(x.T.contiguous().T, *weight), want)
        assert torch.equal(op(x[None, :, None], *weight), want[None, :, None])
        assert op(x[:0], *weight).shape == (0, 40)
        apart = [None if t is None else torch.cat([t.flatten()[:1], t.flatten()]) for t in weight]
        moved = [p if p is None else p[1:].view(t.shape) for p, t in zip(apart, weight)]
        assert torch.equal(op(x, *moved), want)


@pytest.mark.gpu
def test_calls_are_served_from_c():
    for op, x, weight in calls("cuda"):
        for tokens in (3, 8, 16, 32, 64):
            args = x[:1].repeat(tokens, 1), *weight
            op(*args)  # may make the workspace larger: no reason to build a stub
            served(op, *args, device="cuda")
    served(ops.quantize_rowwise, x, device="cuda")


@pytest.mark.gpu
def test_tokens_are_put_in_order_from_c():
    weight = random_int4_weight(8192, 8192, 128, torch.bfloat16, int4.SYMMETRIC, "cuda")
    for tokens in (17, 64):
        x = numbers(tokens, 8192, dtype=torch.bfloat16, device="cuda")
        ops.w4a16_linear(x, *weight)  # makes the workspace larger: no reason to build a stub
        served(ops.w4a16_linear, x, *weight, device="cuda")


@pytest.mark.gpu
def test_parts_of_long_rows_are_added_in_one_order():
    for op, weight in (
        (ops.w4a16_linear, int4_weight(512, 8192, 128, torch.bfloat16, 1, "cuda")),
        (ops.w8a16_linear, int8_weight(512, 8192, torch.bfloat16, "cuda")),
    ):
        for tokens in (3, 8, 16, 32, 64):
            x = numbers(tokens, 8192, dtype=torch.bfloat16, device="cuda")
            want = right(op, x, *weight, None)
            assert all(torch.equal(op(x, *weight), want) for _ in range(20))


@pytest.mark.gpu
def test_graphs_and_side_streams():
    for op, _, weight in calls("cuda"):
        for tokens in (1, 32):
            x = numbers(tokens, 256, dtype=torch.bfloat16, device="cuda")
            want = op(x, *weight)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = op(x, *weight)
                z = op(y.repeat(1, 7)[:, :256], *weight)
            expected = op(want.repeat(1, 7)[:, :256], *weight)
            for _ in range(3):
                y.fill_(float("nan"))
                graph.replay()
                assert torch.equal(y, want)
                assert torch.equal(z, expected)
            with elsewhere(), refusing_to_wait():
                again = op(x, *weight)
            assert torch.equal(again, want)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 100])
def test_more_than_2_to_the_31_numbers(tokens):
    rows, columns = 16400, 131072
    x = numbers(tokens, columns, dtype=torch.bfloat16, device="cuda")
    last = torch.arange(rows - 16, rows, device="cuda")
    shape = rows // 16, columns // 64, 32, 4
    qweight = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    scale = torch.rand(columns // 128, rows, device="cuda").bfloat16() * 1e-3
    got = ops.w4a16_linear(x, qweight, scale)[:, last]
    want = ops.w4a16_linear.run_reference(x, qweight[-1:], scale[:, last], None, None)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    del qweight
    q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device="cuda")
    got = ops.w8a16_linear(x, q, scale[0])[:, last]
    want = ops.w8a16_linear.run_reference(x, q[last], scale[0, last], None)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.3)


def test_large_weights_of_4_bits_are_streamed_where_they_fit():
    def warps(rows, columns, tokens=1, **others):
        k = {"capability": (9, 0), "multiprocessors": 132, "shared_memory_per_block": 227 << 10}
        sizes = {"weight_bytes": 1024, "step_bytes": 1152, "x_bytes": 2 * columns + 64}
        k = SimpleNamespace(**k | others)
        return low_bit.streamed_warps(k, tokens, rows, columns, **sizes)[0]

    assert warps(28672, 8192) == 12
    assert warps(28672, 8192, 8) == warps(28672, 4096) == 8  # x takes room, rows are short
    assert warps(8192, 8192) == warps(28672, 8192 - 128) == warps(1 << 20, 2048) == 0
    assert warps(28672, 8192, capability=(8, 0)) == 0
    assert warps(28672, 8192, shared_memory_per_block=99 << 10) == 8
    assert warps(28672, 28672, 8) == 0
    assert warps(16 * 132, 57344) == 12
    assert warps(16 * 131, 57344) == 0  # a tile would be more than two blocks'


def test_forms_follow_the_number_of_tokens():
    assert 0 < low_bit.FEW <= 8 < low_bit.MOST <= 64
