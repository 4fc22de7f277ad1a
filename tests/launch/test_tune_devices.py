"""`.tune` for other devices: without a GPU, per model, and on one."""

import pytest
import torch
from helpers import needs_nvrtc, programs_of, served
from tuning import GPU, HERE, ROWS, Clock, double, length, op_of, ways

from jitkern import jit
from jitkern.calls.signature import class_of
from jitkern.declare import Cuda, Triton
from jitkern.launch import autotune, tuned
from jitkern.launch.tuned import parts_of
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.call_traces import traces_of
from jitkern.runtime import binding, records, specializer
from jitkern.target import Target
from jitkern.trace.scope import scope_of

CUDA = """
template <typename T, int WAY> __global__ void scale(T* y, const T* x, double a, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = T(a) * x[i];
}
"""


def blocks(x):
    return [{"block": 128, "WAY": 1}, {"block": 256, "WAY": 2}, {"block": 2048, "WAY": 1}]


def cuda_double(k, x):
    y = torch.empty_like(x)
    n, block = x.numel(), k.config["block"]
    k.scale[{"T": x.dtype, "WAY": k.config["WAY"]}](
        y, x, 2.0, n, grid=(n + block - 1) // block, block=block
    )
    return y


@pytest.fixture
def on_cuda():
    sample = lambda device: torch.ones(1000, device=device)
    op = op_of(Cuda(text=CUDA), cuda_double, sample=sample)
    op.tune("cuda", key=length)(blocks)
    op.reference(lambda x: x * 2)
    return op


@pytest.mark.long
@needs_nvrtc
def test_a_builder_without_a_gpu_uses_the_choices_of_each_model(on_cuda, monkeypatch):
    op, source = on_cuda, on_cuda.sources["cuda"][0]
    variants, calls, _ = needs_of(op, source, "cuda")
    assert [v.label for v in variants] == ["scale.f32.WAY1", "scale.f32.WAY2"]
    for variant in variants:
        jit.ensure(variant, GPU)
    traces, reasons, _ = traces_of(op, source, GPU, calls, {})
    assert not traces and "chooses among its 3 configurations" in reasons[0]
    for number, model in enumerate(("One GPU", "Another GPU")):
        monkeypatch.setattr(autotune, "model_of", lambda _, model=model: model)
        Clock(monkeypatch, lambda c, wanted=128 * 2**number: abs(c["block"] - wanted))
        autotune.choose(
            op.name, source, GPU, torch.device("cuda"),
            autotune.Question("", blocks(None), (("dtypes", ("f32",)), ("key", 1000))),
            lambda config: lambda: None,
        )  # fmt: skip
    traces, reasons, _ = traces_of(op, source, GPU, calls, {})
    assert not reasons
    assert {t.trace.model: dict(t.trace.kernels[0].variant.template)["WAY"] for t in traces} == {
        "One GPU": 1, "Another GPU": 2
    }  # fmt: skip
    for one in traces:
        records.keep(one.calls, one.trace, records.reader())
    monkeypatch.setattr(tuned, "model_of", lambda _: "Another GPU")
    assert len(found(op, source, GPU)) == 1
    monkeypatch.setattr(tuned, "model_of", lambda _: "A third GPU")
    assert not found(op, source, GPU)


def test_a_triton_kernel_takes_constexprs_and_options(tmp_path):
    (tmp_path / "t.py").write_text(ROWS.format(plain=""))

    def launch(k, x):
        y = torch.empty_like(x)
        k.rows[{"B": k.config["B"]}](y, x, 3, 5, grid=1, num_warps=k.config["num_warps"])
        return y

    sample = lambda device: torch.ones(4, device=device)
    op = op_of(Triton(str(tmp_path / "t.py")), launch, sample=sample)
    op.tune("triton")(lambda x: [{"B": b, "num_warps": w} for b in (16, 32) for w in (4, 8)])
    variants = needs_of(op, op.sources["cuda"][0], "cuda").variants
    assert [(dict(v.template)["B"], dict(v.options)["num_warps"]) for v in variants] == [
        (16, 4), (16, 8), (32, 4), (32, 8)
    ]  # fmt: skip
    assert op(torch.empty(4, device="meta")).shape == (4,)


def found(op, source, target):
    """The records that serve a call with a vector."""
    function = op.launch_function(source, target.device)
    device, call = torch.device(target.device), class_of([torch.ones(2)])
    calls = records.CallClass(op.signature, function, source, target, device, call)
    return records.found(calls, scope_of(parts_of(function)), "", records.reader())


@pytest.mark.long
def test_a_choice_is_for_one_model_and_its_record_too(declare, clock, monkeypatch):
    op = declare(double, ways)
    source = op.sources["cpu"][0]
    served(op, torch.ones(2))
    assert len(found(op, source, HERE)) == 1
    monkeypatch.setattr(tuned, "model_of", lambda _: "another CPU")
    assert not found(op, source, HERE)


@pytest.mark.gpu
def test_cuda_kernels_are_tuned_and_served_by_stub(on_cuda):
    x = torch.randn(1000, device="cuda")
    on_cuda(x)
    specializer.settle()
    slot = programs_of(on_cuda, "cuda")
    before = slot.misses
    assert torch.equal(on_cuda(x), 2 * x)
    assert not binding.runtime() or slot.misses == before, slot.refused
    source = on_cuda.sources["cuda"][0]
    ((_, choice),) = autotune.choices_of(on_cuda.name, source, Target.current("cuda"))
    assert choice["milliseconds"][2] is None  # no block has 2048 threads
    assert choice["choice"] in (0, 1) and choice["model"] == torch.cuda.get_device_name()
    assert all(time > 0 for time in choice["milliseconds"][:2])
    torch.library.opcheck(on_cuda.overload, (x,))


@pytest.mark.gpu
def test_nothing_is_measured_in_a_capture(on_cuda, caplog):
    x = torch.randn(1000, device="cuda")
    source, here = on_cuda.sources["cuda"][0], Target.current("cuda")
    on_cuda(x[:500])  # another key: its kernels are loaded then
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = on_cuda(x)
    graph.replay()
    assert torch.equal(y, 2 * x)
    assert "no tuned configuration of" in caplog.text
    assert len(list(autotune.choices_of(on_cuda.name, source, here))) == 1
    assert torch.equal(on_cuda(x), 2 * x)
    assert len(list(autotune.choices_of(on_cuda.name, source, here))) == 2
