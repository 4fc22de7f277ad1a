"""Facts of the device in a launch function: traced, prewarmed and faked without a GPU."""

import pytest
import torch
from fake_gpu import TARGET
from helpers import needs_nvrtc, needs_runtime, programs_of, served
from tuning import op_of

from jitkern import jit
from jitkern.calls import samples
from jitkern.calls.signature import class_of
from jitkern.compilers import parallelism
from jitkern.declare import Cpp, Cuda, kernel
from jitkern.errors import LaunchError
from jitkern.launch.resources.device_facts import ATTRIBUTES, FACTS
from jitkern.launch.resources.device_view import AbsentDevice, PresentDevice
from jitkern.loading import cuda_driver
from jitkern.op.needed_kernels import needs_of, units_of
from jitkern.prewarming.call_traces import traces_of
from jitkern.runtime import records
from jitkern.target import Target
from jitkern.trace.scope import scope_of

CU = """
__global__ void note(float *y, const float *x, int a, int b) {}
template <int N> __global__ void fixed(float *y, const float *x) {}
"""
CPP = 'extern "C" void note(long *y, long n) { *y = n; }\n'


def on_cuda(launch):
    return op_of(Cuda(text=CU), launch, sample=lambda device: torch.ones(1000, device=device))


def persistent(k, x):
    y = torch.empty_like(x)
    blocks = 2 * k.multiprocessors
    k.note(y, x, blocks, k.l2_cache_size // k.warp_size + k.capability[0], grid=blocks, block=256)
    return y


@pytest.mark.long
@needs_nvrtc
def test_a_program_asks_the_device_it_runs_on(gpu):
    text = gpu.learn(on_cuda(persistent), (torch.ones(1000, device="meta"),))
    assert "= attribute 16" in text and "132" not in text
    for count in (132, 132):
        assert gpu.call(torch.ones(7))[2:] == [2 * count, 1038 // 32 + 9]
    assert gpu.asked == 2  # each fact once in a process
    assert gpu.grid == 264


@pytest.mark.long
@needs_nvrtc
def test_a_device_of_another_model_is_served_by_the_same_program(gpu):
    gpu.tell("multiprocessors", 7)
    gpu.learn(on_cuda(persistent), (torch.ones(1000, device="meta"),))
    assert gpu.call(torch.ones(7))[2] == 14


@pytest.mark.long
@needs_nvrtc
def test_a_fact_as_a_template_argument_limits_the_devices(gpu):
    def launch(k, x):
        y = torch.empty_like(x)
        k.fixed[{"N": k.multiprocessors}](y, x, grid=1, block=32)
        return y

    op = on_cuda(launch)
    (variant,) = needs_of(op, op.sources["cuda"][0], "cuda", TARGET).variants
    assert dict(variant.template) == {"N": 132}
    gpu.tell("multiprocessors", 78)
    gpu.learn(op, (torch.ones(1000, device="meta"),))
    assert gpu.call(torch.ones(7)) is None


@needs_nvrtc
def test_a_plan_is_kept_without_a_gpu_and_names_no_model():
    op = on_cuda(persistent)
    source, function = op.sources["cuda"][0], persistent
    needs = needs_of(op, source, "cuda", TARGET)
    assert not needs.problems
    for variant in needs.variants:
        jit.ensure(variant, TARGET)
    traces = traces_of(op, source, TARGET, needs.calls, {}).traces
    ((_, new),) = [records.keep(one.calls, one.trace, records.reader()) for one in traces]
    call = class_of([torch.ones(2)])
    calls = records.CallClass(op.signature, function, source, TARGET, torch.device("cuda"), call)
    assert new and len(records.found(calls, scope_of((function,)), "", records.reader())) == 1


@pytest.mark.long
@needs_runtime
def test_the_cpu_has_the_processors_of_this_process():
    def launch(k, x):
        y = torch.empty(1, dtype=torch.int64, device=x.device)
        k.note(y, k.multiprocessors)
        return y

    op, x = op_of(Cpp(text=CPP), launch), torch.ones(3)
    assert served(op, x).item() == op(x).item() == parallelism.processors()
    assert programs_of(op).misses == 1
    assert op(x.to("meta")).shape == (1,)


def test_a_fact_of_gpus_is_refused_on_the_cpu():
    op = op_of(Cpp(text=CPP), lambda k, x: torch.empty(k.l2_cache_size))
    with pytest.raises(LaunchError, match=r"`k.l2_cache_size` is a fact of GPUs.*if x.is_cuda"):
        op(torch.ones(3))


def test_prewarm_takes_the_branch_of_the_device_that_it_is_for():
    schema = "jitkern_facts::branches(Tensor x) -> Tensor"
    op = kernel(schema, cuda=Cuda(text=CPP), cpu=Cpp(text=CPP))

    @op.launch("cuda", "cpu")
    def _(k, x):
        assert x.is_cuda != x.is_cpu
        y = torch.empty(1, dtype=torch.int64)
        if x.is_cuda:
            k.on_gpu(y, k.l2_cache_size, grid=1, block=1)
        else:
            k.note(y, 1)
        return y

    calls = [samples.Sample("", (torch.empty(3, device="meta"),))]
    for device, function in (("cuda", "on_gpu"), ("cpu", "note")):
        ((unit,), problems) = units_of(op, op.sources[device][0], device, calls)
        assert ([v.function for v in unit.variants], problems) == ([function], [])


@pytest.mark.long
def test_every_fact_is_known_for_every_target(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for arch in ("sm_70", "sm_80", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_999"):
        absent = AbsentDevice(TARGET._replace(arch=arch))
        assert all(absent.fact(name) for name in FACTS)
    assert AbsentDevice(TARGET._replace(arch="sm_100a")).fact("capability") == (10, 0)
    assert AbsentDevice(TARGET).fact("shared_memory_per_block") == 227 << 10
    present = PresentDevice(TARGET, torch.device("cuda:0"))
    assert [present.fact(name) for name in ATTRIBUTES] == [132, 1039, 1097, 1081, 1038]
    assert (present.fact("warp_size"), present.fact("capability")) == (32, (9, 0))
    assert cuda_driver.device_attribute.cache_info().currsize == len(ATTRIBUTES)


@needs_nvrtc
def test_the_fake_takes_usual_numbers():
    assert on_cuda(persistent)(torch.ones(5, device="meta")).shape == (5,)
    usual = AbsentDevice(Target.parse("cuda-sm_90-cu130-torch2.11.0"))
    assert all(AbsentDevice().fact(name) == usual.fact(name) for name in FACTS)
