"""`.tune(inputs=, cold=)`: what configurations are measured with, and which are left out."""

import gc
import weakref

import pytest
import torch
from helpers import needs_runtime, served
from test_tune_explain import explained
from tuning import HERE, Clock, choices, double, op_of, ways

from jitkern import config, testing
from jitkern.declare import Cuda, Triton
from jitkern.errors import DeclarationError, LaunchError
from jitkern.launch import autotune, measure
from jitkern.launch.call import Call
from jitkern.launch.runner import Runner
from jitkern.target import Target


@pytest.fixture
def noted(declare, clock):
    """Return an op, and the arguments of each run of its launch function."""
    runs = []

    def declared(schema="(Tensor x) -> Tensor", **tuning):
        def launch(k, *args, **kwargs):
            runs.append((*args, *kwargs.values()))
            return double(k, args[0]) if "-> Tensor" in schema else add(k, args[0])

        op = declare(launch, None, schema=schema)
        op.tune("cpu", **tuning)(lambda *_, **__: ways(None))
        return op, runs

    return declared


def add(k, x):
    k.add[{"T": x.dtype, "WAY": k.config["WAY"]}](x, 1.0, x.numel())


# ------------------------------------------------------------------ without `inputs`


@pytest.mark.long
def test_arguments_that_are_only_read_are_not_copied(noted):
    op, runs = noted()
    x = torch.ones(4)
    op(x)
    assert [run[0].data_ptr() for run in runs] == [x.data_ptr()] * 4  # the call, and each way


@pytest.mark.long
def test_an_argument_that_is_changed_is_copied_and_its_alias_too(noted):
    op, runs = noted("(Tensor(a!) x, Tensor y, *, Tensor z) -> ()")
    x, z = torch.zeros(4), torch.zeros(4)
    op(x, x, z=z)
    call, *measured = runs
    assert x.tolist() == [1] * 4 and call[0] is call[1]
    for run in measured:
        assert run[0] is run[1] and run[0].data_ptr() != x.data_ptr()
        assert run[2].data_ptr() == z.data_ptr()


# ------------------------------------------------------------------ `inputs`


@pytest.mark.long
def test_inputs_are_measured_with_in_place_of_the_arguments(noted):
    def inputs(x, y, *, a, b):
        assert (a, b) == (2.0, 1.0)
        return torch.rand(7), [torch.ones(2)], 3.0, b

    op, runs = noted("(Tensor x, Tensor[] y, *, float b=1.0, float a) -> Tensor", inputs=inputs)
    torch.manual_seed(5)
    state, x = torch.get_rng_state(), torch.ones(4)
    assert op(x, [x], a=2.0).tolist() == [2] * 4
    assert torch.equal(torch.get_rng_state(), state)
    call, *measured = runs
    assert call[0].shape == (4,) and len(measured) == 3
    assert all(run[0].shape == (7,) and set(run[2:]) == {3.0, 1.0} for run in measured)
    assert len({run[0].data_ptr() for run in measured}) == 1  # made once


@pytest.mark.long
def test_a_single_tensor_is_enough_for_one_argument(noted):
    op, runs = noted("(Tensor(a!) x) -> ()", inputs=torch.zeros_like)
    x = torch.zeros(4)
    op(x)
    assert x.tolist() == [1] * 4
    assert runs[-1][0].tolist() == [3] * 4  # not a copy for each


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (lambda x, a: (x,), "got no a for"),
        (lambda x, a: (x, a, a), "got 3 arguments"),
        (lambda x, a: (x.double(), a), "`x` is a tensor of torch.float32 on cpu.*torch.float64"),
        (lambda x, a: (x.to("meta"), a), "on cpu in the call.*on meta"),
        (lambda x, a: (x, None), "`a` is a number in the call, and it returned a NoneType"),
    ],
    ids=["few", "many", "dtype", "device", "none"],
)
def test_inputs_that_do_not_fit_are_named(noted, inputs, says):
    op, _ = noted("(Tensor x, float a) -> Tensor", inputs=inputs)
    says = rf"test_tune_inputs\.py:\d+: .*as a tuple: .*{says}"
    with pytest.raises(DeclarationError, match=says):
        op(torch.ones(2), 1.0)


@pytest.mark.long
@needs_runtime
def test_inputs_may_read_what_no_trace_follows(declare, clock):
    """They are not part of what a call computes, so they keep no call in Python."""
    op = declare(double, None)
    op.tune("cpu", inputs=lambda x: torch.full((int(x.sum().item()),), 1.0))(ways)
    assert served(op, torch.ones(4)).tolist() == [2] * 4
    assert len(clock.measured) == 3


# ------------------------------------------------------------------ `cold`


@pytest.mark.long
def test_cold_writes_other_memory_before_each_run_that_is_timed(declare, monkeypatch):
    events = []

    class Memory:
        def zero_(self):
            events.append("flush")

    def launch(k, x):
        events.append("run")
        return double(k, x)

    monkeypatch.setattr(measure, "larger_than_the_cache", lambda device: Memory())
    op = declare(launch, None)
    op.tune("cpu", cold=True)(lambda x: [{"WAY": 1}, {"WAY": 2}])
    op(torch.ones(4))
    each = ["run"] * measure.WARM_UPS + ["flush", "run"] * measure.REPEATS
    assert events == [*each, *each, "run"] or events == ["run", *each, *each]
    events.clear()
    warm = declare(launch, lambda x: [{"WAY": 1}, {"WAY": 2}])
    warm(torch.ones(4))
    assert set(events) == {"run"}


def test_the_memory_is_larger_than_the_cache():
    memory = measure.larger_than_the_cache(torch.device("cpu"))
    assert memory.numel() >= 2 << 20


@pytest.mark.long
def test_a_choice_for_a_cold_cache_is_another_choice(declare, clock, cli):
    op = declare(double, ways)
    op(torch.ones(4))
    op.tune("cpu", cold=True)(ways)
    op(torch.ones(4))
    assert len(clock.measured) == 6
    assert [c["situation"].get("cold") for c in choices(op)].count("True") == 1
    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    assert "cold=True, dtypes=('f32',): {'WAY': 3}" in explained(cli, op)[0]


# ------------------------------------------------------------------ what is left out


@pytest.mark.long
def test_a_configuration_without_memory_is_left_out_with_a_note(declare, clock, cli):
    kept = []

    class Large:
        pass

    def launch(k, x):
        large = Large()
        kept.append(weakref.ref(large))
        if k.config["WAY"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.\nMore.")
        gc.collect()
        before = [reference() for reference in kept[1:-1]]  # kept[0] is of the call
        assert before == [None] * len(before), "a failed run holds its memory"
        return double(k, x)

    op = declare(launch, lambda x: [{"WAY": 3}, {"WAY": 1}, {"WAY": 2}])
    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    with config.using(fallback="raise"):
        op(torch.ones(4))
    (choice,) = choices(op)
    assert choice["milliseconds"][0] is None
    assert choice["reasons"] == ["CUDA out of memory. Tried to allocate 1 TiB.", None, None]
    assert (
        "not {'WAY': 3} does not run: CUDA out of memory. Tried to "
        "allocate 1 TiB.; not {'WAY': 1} 1 ms" in explained(cli, op)[0]
    )


@pytest.mark.long
def test_a_choice_of_an_earlier_version_is_explained(declare, monkeypatch, cli):
    op = declare(double, lambda x: [{"WAY": 13}, {"WAY": 1}])
    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    Clock(monkeypatch, lambda config: 1.0)
    write = autotune.records.write

    def without_reasons(cache, key, content, maker):
        content.pop("reasons")
        return write(cache, key, content, maker)

    monkeypatch.setattr(autotune.records, "write", without_reasons)
    op(torch.ones(4))
    assert "{'WAY': 1} 1 ms; not {'WAY': 13} does not run\n" in explained(cli, op)[0]


def test_if_all_fail_the_error_is_that_of_the_first(declare, clock):
    def launch(k, x):
        raise torch.OutOfMemoryError(f"no memory for {k.config['WAY']}")

    op = declare(launch, ways)
    with pytest.raises(torch.OutOfMemoryError, match="^no memory for 1$"):
        op(torch.ones(4))

    def refused(k, x):
        raise LaunchError(f"no launch for {k.config['WAY']}")

    op = declare(refused, ways)
    with pytest.raises(LaunchError, match="none of the 3 configurations.*: no launch for 1"):
        op(torch.ones(4))


def test_copies_for_which_there_is_no_memory_ask_for_inputs(noted, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "copy_of", fail)
    op, _ = noted("(Tensor(a!) x) -> ()")
    with pytest.raises(LaunchError, match="no memory is left to copy.*inputs="):
        op(torch.ones(4))
    with pytest.raises(LaunchError, match=r"no memory is left to copy.*`\.tune`, with.*inputs="):
        measure.copies_for((torch.ones(4), 5))


def test_a_triton_kernel_is_measured_cold_and_on_copies(tmp_path, monkeypatch):
    source = Triton("t.py", folder=str(tmp_path))
    source.paths[0].write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.autotune([triton.Config({'B': b}) for b in (16, 32)], key=['n'])\n"
        "@triton.jit\ndef k(x, n, B: tl.constexpr):\n    pass\n"
    )
    runner, started = Runner("test::k", source, HERE, torch.device("cpu")), []
    testing.set_launch(monkeypatch, runner, started.append)

    def milliseconds(run, candidate, device, *, cold):
        run(candidate)()
        return float(dict(candidate.constexprs)["B"]) if cold else 0.0

    monkeypatch.setattr(measure, "milliseconds", milliseconds)
    x = torch.ones(4)
    complete = runner.expanded(Call("k", (), (x, 4), {"grid": 1}))
    assert dict(complete.template) == {"B": 16} and complete.args[0] is x
    assert [dict(call.template)["B"] for call in started] == [16, 32]
    assert all(torch.equal(call.args[0], x) and call.args[0] is not x for call in started)


# ------------------------------------------------------------------ on a GPU

COPY = """
__global__ void copy(float* y, const float* x, long long n) {
  extern __shared__ float unused[];
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = x[i];
}
"""


@pytest.fixture
def on_cuda():
    def launch(k, x):
        y = torch.empty_like(x)
        scratch = torch.empty(k.config["scratch"], dtype=torch.uint8, device=x.device)
        k.copy(y, x, x.numel(), grid=64, block=256, smem=k.config["smem"])
        return y if scratch.numel() else y

    return op_of(Cuda(text=COPY), launch)


@pytest.mark.gpu
def test_too_much_memory_is_left_out_on_a_gpu(on_cuda):
    total = torch.cuda.get_device_properties(0).total_memory
    on_cuda.tune("cuda", cold=True)(
        lambda x: [
            {"smem": 1 << 20, "scratch": 1}, {"smem": 0, "scratch": 2 * total},
            {"smem": 0, "scratch": 1},
        ]
    )  # fmt: skip
    x = torch.randn(1 << 20, device="cuda")
    assert torch.equal(on_cuda(x), x)
    source = on_cuda.sources["cuda"][0]
    ((_, choice),) = autotune.choices_of(on_cuda.name, source, Target.current("cuda"))
    assert choice["choice"] == 2 and choice["milliseconds"][:2] == [None, None]
    assert "shared memory" in choice["reasons"][0] and "out of memory" in choice["reasons"][1]
    assert choice["milliseconds"][2] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [None, lambda x: torch.zeros(1 << 10, device=x.device)])
def test_a_large_argument_is_not_copied_on_a_gpu(on_cuda, inputs):
    on_cuda.tune("cuda", inputs=inputs)(
        lambda x: [{"smem": 0, "scratch": 1}, {"smem": 1024, "scratch": 1}]
    )
    x = torch.randn(64 << 20, device="cuda")
    size = x.numel() * 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert torch.equal(on_cuda(x), x)
    # The results of the call and of one run that is measured; a copy would be one more.
    assert torch.cuda.max_memory_allocated() - before < 2.5 * size
    memory = measure.larger_than_the_cache(x.device)
    assert memory.numel() > torch.cuda.get_device_properties(x.device).L2_cache_size > 0
