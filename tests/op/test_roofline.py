"""`jitkern.roofline`: the cost of an op, its floor on a device, and what is said of mistakes."""

import shutil

import pytest
import torch
from helpers import H100, declared, needs_nvrtc, one_in_four

import jitkern
from jitkern import jit
from jitkern.calls.signature import tensors_in
from jitkern.declare import discover, kernel
from jitkern.devtools import roofline as module, timing
from jitkern.devtools.roofline import Bandwidth, quantity, roofline
from jitkern.errors import DeclarationError
from jitkern.launch.call import Call, variant_of
from jitkern.target import Target

SHIPPED = discover("jitkern.kernels_src")


@pytest.fixture
def machine(monkeypatch):
    """A device of 100 GB/s and 1 Tflop/s."""
    monkeypatch.setattr(module, "bandwidth", lambda device: Bandwidth(100e9, 120e9))
    monkeypatch.setattr(module, "arithmetic", lambda device, dtype: 1e12)


def test_the_numbers_of_a_known_op_without_a_time_on_meta(machine):
    x = torch.empty(1000, 1000, dtype=torch.bfloat16, device="meta")
    line = roofline(jitkern.ops.softmax, x)
    assert line.bytes == 4_000_000 and line.flops == 5_000_000
    assert line.intensity == 1.25
    assert line.floor == pytest.approx(40e-6)
    assert line.bound == "memory"
    assert line.time is None and line.share is None
    assert str(line) == "4 MB, 5 Mflop, 1.2 flop/B: at least 40 µs (memory)"


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_call_on_a_device_has_a_time_and_a_share(machine):
    line = roofline(jitkern.ops.softmax, torch.randn(64, 100))
    assert line.time > 0
    assert line.share == line.floor / line.time
    assert "took " in str(line) and line.bytes == 2 * 64 * 100 * 4


def test_what_is_computed_may_be_the_limit(machine):
    op = kernel("roof::heavy(Tensor x, int n=3) -> Tensor")
    op.cost(lambda x, n: (x.nbytes, 1e3 * n * x.numel()))
    line = roofline(op, torch.empty(1000, device="meta"))
    assert line.flops == 3e6 and line.floor == pytest.approx(3e-6)
    assert line.bound == "arithmetic"
    assert roofline(op, torch.empty(1000, device="meta"), n=6).flops == 6e6


@pytest.mark.long
def test_arguments_are_copied_before_a_call(machine, tmp_path):
    def launch(k, x):
        k.add_one(x, x.numel())

    op = declared(
        "roof::add_one_(Tensor(a!) x) -> ()",
        tmp_path / "add_one.cpp",
        '#include <cstdint>\nextern "C" void add_one(float* x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] += 1; }\n',
        launch,
    )
    op.cost(lambda x: (2 * x.nbytes, x.numel()))
    x = torch.zeros(10)
    assert roofline(op, x).time > 0
    assert not x.any()


def test_a_function_with_an_op_stands_for_it(machine):
    class Composed:
        op = jitkern.ops.vec_add

    x = torch.empty(10, device="meta")
    assert roofline(Composed(), x, x) == roofline(jitkern.ops.vec_add, x, x)


def test_an_op_without_a_cost_says_what_to_add(machine):
    op = kernel("roof::plain(Tensor x, float alpha) -> Tensor")
    with pytest.raises(DeclarationError) as e:
        roofline(op, torch.zeros(3), 2.0)
    assert "roof::plain" in str(e.value) and "test_roofline.py:" in str(e.value)
    assert "add `@plain.cost` on a function `f(x, alpha)` that returns (bytes, flops)" in str(e.value)  # fmt: skip


@pytest.mark.parametrize("result", [None, 3, (1, 2, 3), (1, "2"), (-1, 0)], ids=str)
def test_a_cost_that_is_no_two_numbers_is_refused(machine, result):
    op = kernel(f"roof::wrong{len(str(result))}(Tensor x) -> Tensor")
    op.cost(lambda x: result)
    with pytest.raises(DeclarationError, match=r"test_roofline.py:\d+: its cost returned"):
        roofline(op, torch.zeros(3))


def test_what_is_no_op_is_refused(machine):
    with pytest.raises(DeclarationError, match="is not an op of jitkern: pass what `kernel"):
        roofline(torch.softmax, torch.zeros(3))


def test_ops_on_pages_move_the_tokens_that_they_are_given():
    k, q = torch.ones(6, 2, 64), torch.ones(3, 8, 64)
    cache, slots = torch.ones(100, 16, 2, 64), torch.zeros(6, dtype=torch.int64)
    args = k, k, cache, cache, slots
    cost = module.cost_of(jitkern.ops.kv_cache_append, args, {})
    assert cost.bytes == 4 * k.nbytes + slots.nbytes, "both are read and written"
    table, lens = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    cost = module.cost_of(jitkern.ops.paged_decode, (q, cache, cache, table, lens), {})
    pages = 2 * 3 * 5 * cache[0].nbytes
    assert cost.bytes == pages + 2 * q.nbytes + 4 * 3 * 8
    none = module.cost_of(jitkern.ops.paged_decode, (q[:0], cache, cache, table[:0], lens[:0]), {})
    assert (none.bytes, none.flops) == (0, 0)


IN_PAGES = ("kv_cache_append", "paged_decode")  # which need a part of their caches


@pytest.mark.parametrize(
    "op", one_in_four((op for op in SHIPPED if op.__name__ not in IN_PAGES), lambda op: op.__name__)
)
def test_shipped_ops_move_arguments_and_results_once(op):
    for args in op.sample_inputs("cpu"):
        results = op.run_reference(*args)
        changed = [args[position] for position, _ in op.signature.changed]
        moved = sum(tensor.nbytes for tensor in tensors_in([*args, results, *changed]))
        if isinstance(args[0], torch.Tensor) and not args[0].numel():
            continue
        # Of tables and parameters an op may need a part: the rows of its positions, a shape.
        assert 0.8 * moved - 64 <= module.cost_of(op, args, {}).bytes <= moved


def test_a_device_is_measured_once_a_process(monkeypatch):
    monkeypatch.setattr(timing, "CPU_BYTES", 1 << 16)
    monkeypatch.setattr(module, "MATRIX", {"cpu": 32})
    monkeypatch.setattr(module, "SECONDS", 0.01)
    module.bandwidth.cache_clear(), module.arithmetic.cache_clear()
    try:
        cpu = torch.device("cpu")
        assert module.bandwidth(cpu) is module.bandwidth(cpu)
        assert module.bandwidth(cpu).copy > 0 and module.bandwidth(cpu).read > 0
        assert module.arithmetic(cpu, torch.float32) > 0
    finally:
        module.bandwidth.cache_clear(), module.arithmetic.cache_clear()


@needs_nvrtc
@pytest.mark.parametrize("function", ["copy16", "read16"])
def test_what_measures_a_gpu_compiles(function):
    variant = variant_of("jitkern::ceilings", module.SOURCE, Call(function, (), (), {}))[0]
    entry = jit.ensure(variant, Target.parse(H100))
    assert entry.manifest.meta["parameters"] == ["*f32", "*f32", "i64"]


def test_quantities_have_three_digits_and_a_prefix():
    assert quantity(8_388_608, "B") == "8.39 MB"
    assert quantity(2.5e-6, "s") == "2.5 µs"
    assert quantity(0, "flop") == "0 flop" and quantity(12, "B") == "12 B"


def test_arguments_rotate_through_more_than_the_caches_hold():
    cpu = torch.device("cpu")
    large = torch.empty(timing.past_caches(cpu) // 4 // 2 + 1)
    assert timing.rotation((large,), cpu) == 2
    assert timing.rotation((large, [large]), cpu) == 1
    assert timing.rotation((3,), cpu) == timing.COPIES
    first, *others = timing.rotated((torch.ones(3, 4).T, 2.0), cpu)
    assert len(others) == timing.COPIES - 1 and first[1] == 2.0
    assert first[0].stride() == (1, 4) and first[0].data_ptr() != others[0][0].data_ptr()


def test_samplers_take_turns_and_a_first_round_is_thrown_away():
    order = []
    samplers = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    found = timing.interleaved(samplers, seconds=0, most=3)
    assert order == ["a", "b"] * 4
    assert found == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}
    assert len(timing.interleaved(samplers, seconds=0)["a"]) == timing.LEAST


@pytest.mark.gpu
def test_a_gpu_has_a_bandwidth_and_a_call_a_share():
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    line = roofline(jitkern.ops.softmax, x)
    given = module.bandwidth(x.device)
    assert given.copy > 0 and given.read > 0
    assert line.floor == pytest.approx(line.bytes / given.copy) and line.bound == "memory"
    assert line.time > 0 and line.share > 0
    assert roofline(jitkern.ops.softmax, x.to("meta")).floor == line.floor


@pytest.mark.gpu
def test_what_measures_a_gpu_copies_and_reads():
    x, y = torch.rand(4096 * 1024 + 4, device="cuda"), torch.zeros(4096 * 1024 + 4, device="cuda")
    module.launch("copy16", 1024, y, x)()
    assert torch.equal(x, y)
    module.launch("read16", 2048, y, x)()
    assert torch.equal(x, y)
