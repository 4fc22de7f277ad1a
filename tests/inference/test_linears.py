"""Weights of 4 and 8 bits: packing, converters from other layouts, and layers in a model."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import jitkern
from jitkern.kernels_src import int4_weight as int4
from jitkern.ops import Int4Linear, Int8Linear, converters

SHIFTS = 4 * torch.arange(8)


def numbers(rows, columns, top=16):
    return torch.randint(0, top, (rows, columns), generator=torch.Generator().manual_seed(rows))


def words(eights):
    """int32 of eight numbers along the last dimension, the first in the lowest bits."""
    total = (eights.long() << SHIFTS).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def gptq(q, zeros, less):
    """The layout of GPTQ, written down as its own packing does it: row by row of eight k."""
    packed = torch.stack([words(q.T[k : k + 8].T) for k in range(0, q.shape[1], 8)])
    return packed, words((zeros - less).view(zeros.shape[0], -1, 8) % 16)


def awq(q, zeros):
    """The layout of AWQ: eight columns in a word, in the order 0 2 4 6 1 3 5 7."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return tuple(words(t.reshape(t.shape[0], -1, 8)[..., order]) for t in (q.T, zeros))


def tiles(q):
    """The layout of `aten._convert_weight_to_int4pack`, lane by lane, with 8 inner steps."""
    rows, columns = q.shape
    out = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for pair in range(4):
            k = 32 * pair + 2 * (lane % 4) + torch.tensor([0, 8, 16, 24, 1, 9, 17, 25])
            mine = q.view(rows // 8, 8, columns // 128, 128)[:, lane // 4][..., k]
            out[:, :, lane, pair] = (mine.long() << SHIFTS).sum(-1)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_numbers_that_are_packed_come_back(rows):
    q = numbers(rows, 192)
    packed = int4.pack(q)
    assert packed.shape == ((rows + 15) // 16, 3, 32, 4)
    assert packed.dtype == torch.int32
    assert torch.equal(int4.unpack(packed, rows), q.to(torch.uint8))


def test_the_layout_is_the_documented_one():
    q = numbers(32, 128)
    packed = int4.pack(q)
    for tile, piece, lane, word in ((0, 0, 0, 0), (1, 1, 13, 3), (0, 1, 31, 2), (1, 0, 6, 1)):
        g, t, i, h = lane // 4, lane % 4, word // 2, word % 2
        k = 64 * piece + 32 * i + 8 * t + torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        assert packed[tile, piece, lane, word] == words(q[16 * tile + 2 * g + h, k])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [64, 128])
def test_rounding_is_to_the_nearest(group, symmetric):
    weight = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] = weight[4].abs() + 1
    weight[5, :group] = -0.25
    found = int4.quantize(weight, group, symmetric=symmetric)
    assert (found.zero is None) == symmetric
    units = found.scale.T.repeat_interleave(group, 1)
    assert ((found.values() - weight).abs() <= units * (0.5 if symmetric else 1.001)).all()
    assert torch.equal(found.values()[3], weight[3])


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("group", [64, 128])
def test_gptq(group, v2):
    q, scales = numbers(48, 256), torch.rand(256 // group, 48)
    zeros = numbers(48, 256 // group).T  # of which 0 less 1 is 15
    qweight, qzeros = gptq(q, zeros, 0 if v2 else 1)
    order = torch.arange(256) // group
    found = converters.from_gptq(qweight, qzeros, scales, order.int(), v2=v2)
    zeros, units = (t.T.repeat_interleave(group, 1) for t in (zeros, scales))
    assert torch.equal(found.values(), (q - zeros) * units)
    with pytest.raises(ValueError, match="desc_act"):
        converters.from_gptq(qweight, qzeros, scales, order.flip(0), v2=v2)


@pytest.mark.long
def test_gptq_whose_groups_are_not_neighbours():
    q, scales, zeros = numbers(48, 256), torch.rand(4, 48), numbers(48, 4, 15).T + 1
    g_idx = (torch.arange(256) // 64)[torch.randperm(256)].int()
    packed = (*gptq(q, zeros, 1), scales)
    weight, order = converters.from_gptq_reordered(*packed, g_idx)
    values = (q - zeros.T[:, g_idx]) * scales.T[:, g_idx]
    assert torch.equal(weight.values(), values[:, order])
    x, bias = torch.randn(2, 3, 256), torch.randn(48)
    layer = Int4Linear(weight, bias, order)
    wanted = torch.nn.functional.linear(x.double(), values.double(), bias.double())
    assert torch.allclose(layer(x).double(), wanted, rtol=1e-4, atol=1e-3)
    assert [*layer.state_dict()] == ["qweight", "scale", "zero", "bias", "order"]
    wrong = g_idx.clone()
    wrong[g_idx == 0] = 1
    with pytest.raises(ValueError, match="each of 4 groups 64 times"):
        converters.from_gptq_reordered(*packed, wrong)


@pytest.mark.parametrize("group", [64, 128])
def test_awq(group):
    q, scales = numbers(48, 256), torch.rand(256 // group, 48)
    zeros = numbers(48, 256 // group).T
    found = converters.from_awq(*awq(q, zeros), scales)
    zeros, units = (t.T.repeat_interleave(group, 1) for t in (zeros, scales))
    assert torch.equal(found.values(), (q - zeros) * units)


def test_zeros_of_8_are_none():
    q, scales, zeros = numbers(16, 128), torch.rand(1, 16), torch.full((1, 16), 8)
    assert converters.from_awq(*awq(q, zeros), scales).zero is None
    found = converters.from_gptq(*gptq(q, zeros, 1), scales, dtype=torch.bfloat16)
    assert found.zero is None
    assert found.scale.dtype == torch.bfloat16


def torchao_weights(q, scale, zero, group):
    """The same weight in the three layouts of torchao, [N, K]."""
    shape, block_size = q.shape, (1, group)
    pairs, signed = torch.stack([scale, zero], -1), (q - 8) & 15
    plain = (signed[:, ::2] | signed[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    padded = torch.zeros(q.shape[0] + 8, q.shape[1] + 128, dtype=q.dtype)
    padded[: shape[0], : shape[1]] = q
    widest = torch.ones(padded.shape[1] // group, padded.shape[0], 2)
    widest[: scale.shape[0], : shape[0]] = pairs
    older = SimpleNamespace(packed_weight=tiles(padded), scale_and_zero=widest)
    return (
        SimpleNamespace(
            qdata=plain, scale=scale, zero_point=zero, shape=shape, block_size=block_size
        ),
        SimpleNamespace(
            qdata=tiles(padded), scale_and_zero=widest, shape=shape, block_size=block_size
        ),
        SimpleNamespace(tensor_impl=older, shape=shape, block_size=block_size),
    )


def test_torchao():
    q, scale, zero = numbers(24, 128), torch.rand(2, 24), torch.randn(2, 24)
    of_each = [t.T.repeat_interleave(64, 1) for t in (scale, zero)]
    for weight in torchao_weights(q, scale, zero, 64):
        found = converters.from_torchao(weight)
        assert torch.equal(found.values(), (q - 8) * of_each[0] + of_each[1])
    weight.act_pre_scale = scale
    with pytest.raises(ValueError, match="act_pre_scale"):
        converters.from_torchao(weight)
    with pytest.raises(ValueError, match="SimpleNamespace is not of a layout that is known"):
        converters.from_torchao(SimpleNamespace(shape=(16, 64), block_size=(1, 64)))


@pytest.mark.gpu
def test_torchao_packs_on_a_gpu_as_documented():
    q = numbers(64, 1024).to(torch.int32)
    halves = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8).cuda()
    packed = torch.ops.aten._convert_weight_to_int4pack(halves, 8)
    assert torch.equal(packed.cpu(), tiles(q))


def test_errors_of_weights():
    for call, message in (
        (lambda: int4.pack(torch.zeros(4, 100)), "K a multiple of 64"),
        (lambda: int4.quantize(torch.zeros(4, 128), 32), "64 or 128 numbers, not 32"),
        (lambda: int4.quantize(torch.zeros(4, 192)), r"multiple of the group of 128, got \(4, 192\)"),
        (lambda: converters.from_awq(*awq(numbers(16, 128), numbers(16, 1).T), torch.ones(1, 24)), "scales must be"),
        (lambda: converters.from_awq(*awq(numbers(16, 128), numbers(16, 4).T), torch.ones(4, 16)), "64 or 128 numbers, not 32"),
        (lambda: converters.from_gptq(torch.zeros(4), torch.zeros(4), torch.ones(4)), "int32 of 2 dimensions"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64, bias=False))
        self.same = self.blocks[2]
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.same(self.blocks[:2](x)))


def quantized(scheme, device="cpu", **options):
    with torch.device(device):
        torch.manual_seed(0)
        model = Model()
    return jitkern.ops.quantize_linears(model, scheme, **options)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["int4", "int8", "int8_dynamic"])
def test_layers_are_replaced_and_their_state_comes_back(scheme, tmp_path):
    options = {"group": 64, "symmetric": False} if scheme == "int4" else {}
    torch.manual_seed(0)
    plain = Model()
    model = jitkern.ops.quantize_linears(copy.deepcopy(plain), scheme, **options)
    kind = Int4Linear if scheme == "int4" else Int8Linear
    assert [type(m) for m in (model.blocks[0], model.blocks[2], model.head)] == [kind] * 3
    assert model.same is model.blocks[2]
    x = torch.randn(3, 5, 128)
    want, got = plain(x), model(x)
    assert (got - want).norm() / want.norm() < (0.2 if scheme == "int4" else 0.02)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    for device, assign in (("cpu", False), ("meta", True)):
        other = quantized(scheme, device, **options)
        for tensor in other.state_dict().values():
            if device == "cpu":
                tensor.zero_()
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(x), got)
    half = model.to(torch.bfloat16)
    assert (half(x.bfloat16()).float() - want).norm() / want.norm() < 0.2


def test_a_weight_is_freed_before_the_next_is_quantized(monkeypatch):
    model = nn.Sequential(*(nn.Linear(128, 16) for _ in range(4)))
    weights, alive = [weakref.ref(layer.weight) for layer in model], []

    def quantize(weight, group, **keywords):
        alive.append(sum(ref() is not None for ref in weights))
        return of_weight(weight, group, **keywords)

    of_weight = int4.quantize
    monkeypatch.setattr(int4, "quantize", quantize)
    jitkern.ops.quantize_linears(model)
    assert alive == [4, 3, 2, 1]


def test_a_layer_in_two_places_stays_one():
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    model.append(model[0])
    jitkern.ops.quantize_linears(model)
    assert isinstance(model[0], Int4Linear) and model[2] is model[0]


def test_what_is_left_as_it_is():
    model = quantized("int4", only=lambda name, _: name != "head", group=128)
    assert type(model.head) is nn.Linear
    assert "group=128, symmetric=True, bias=True" in repr(model.blocks[0])
    assert isinstance(jitkern.ops.quantize_linears(nn.Linear(64, 3), "int8_dynamic"), Int8Linear)
    with pytest.raises(ValueError, match=r"layer 'head': .* multiple of the group of 128.*only="):
        quantized("int4")
    with pytest.raises(ValueError, match="scheme must be one of .*got 'int2'"):
        quantized("int2")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attention.transpose(1, 2).flatten(2))


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["int4", "int8", "int8_dynamic"])
def test_layers_follow_autocast_as_those_that_they_replace(scheme):
    torch.manual_seed(0)
    plain = Attention()
    model = jitkern.ops.quantize_linears(copy.deepcopy(plain), scheme)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for tokens in (3, 20):
            x = torch.randn(2, tokens, 128)
            want, got = plain(x), model(x)
            assert got.dtype == want.dtype == torch.bfloat16
            assert (got - want).float().norm() / want.float().norm() < 0.3
            assert torch.equal(compiled(x), got)
    assert model(x).dtype == torch.float32


@pytest.mark.long
def test_ops_have_the_dtype_of_x_under_autocast():
    weight = int4.quantize(torch.randn(48, 256))
    for tokens in (3, 20):  # by a kernel, and by PyTorch
        x = torch.randn(tokens, 256)
        want = jitkern.ops.w4a16_linear(x, *weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(jitkern.ops.w4a16_linear(x, *weight), want)


def test_an_encoder_layer_that_reads_its_weights_keeps_them():
    model = jitkern.ops.quantize_linears(nn.TransformerEncoderLayer(128, 4, 128, batch_first=True))
    assert type(model.linear1) is type(model.linear2) is nn.Linear
    assert model.eval()(torch.randn(2, 3, 128)).shape == (2, 3, 128)


@pytest.mark.long
def test_a_layer_without_outputs_is_replaced():
    plain = nn.Linear(128, 1)
    plain.weight, plain.bias = (nn.Parameter(p[:0].detach()) for p in plain.parameters())
    for scheme in ("int4", "int8", "int8_dynamic"):
        layer = jitkern.ops.quantize_linears(plain, scheme)
        assert layer(torch.randn(3, 128)).shape == (3, 0)
        assert layer(torch.randn(2, 70, 128)).shape == (2, 70, 0)


def test_the_upper_bits_of_packed_numbers_are_lost():
    q = numbers(16, 64)
    q[0, 0], q[3, 5] = -1, 19
    want = (q & 15).to(torch.uint8)
    assert torch.equal(int4.unpack(int4.pack(q), 16), want)


def test_another_default_device_changes_no_conversion():
    arguments = torch.zeros(8, 64, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    want = converters.from_gptq(*arguments, torch.ones(1, 64))
    with torch.device("meta"):
        got = converters.from_gptq(*arguments, want.scale)
        converters.from_awq(arguments[0].T, arguments[1], want.scale)
    assert torch.equal(got.qweight, want.qweight)
