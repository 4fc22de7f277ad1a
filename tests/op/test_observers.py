"""Who watches calls of Torch sees those of our ops, whether C or Python serves them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from jitkern.runtime import specializer

KERNELS = "template <typename T> void twice(T* out, const T* x, long n) { for (; n--;) out[n] = 2 * x[n]; }"
SERVED_BY = {"c": "(Tensor x) -> Tensor", "python": "(Tensor x) -> Tensor[]"}  # C makes no list
X = torch.arange(4.0)


def twice(k, x):
    out = torch.empty_like(x)
    k.twice[{"T": x.dtype}](out, x, x.numel())
    return out


@pytest.fixture(params=SERVED_BY)
def op(request, declare):
    """A warm op."""
    one = request.param == "c"
    op = declare(SERVED_BY[request.param], lambda k, x: twice(k, x) if one else [twice(k, x)])
    op.reference(lambda x: 2 * x if one else [2 * x])
    for _ in range(3):
        op(X)
        specializer.settle()
    return op


@pytest.fixture
def called(op):
    """A function that calls the op, and does more."""
    return lambda x: (op(x)[0] if op.schema.endswith("[]") else op(x)) + 1


def jit_traced(f, x=X):
    return torch.jit.trace(f, (x,), check_trace=False)


TRACES = {
    "jit": jit_traced,
    "jit in inference mode": torch.inference_mode()(jit_traced),
    "jit with gradients": lambda f: jit_traced(f, X.clone().requires_grad_()),
    "make_fx": lambda f: make_fx(f)(X),
    "make_fx before dispatch": lambda f: make_fx(f, pre_dispatch=True)(X),
    "functionalize": lambda f: make_fx(torch.func.functionalize(f))(X),
    "symbolic": torch.fx.symbolic_trace,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("trace", TRACES)
def test_a_traced_graph_holds_the_call(op, called, trace):
    traced = TRACES[trace](called)
    assert op.__name__ in str(traced.graph)
    assert torch.equal(traced(X + 5), 2 * (X + 5) + 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_the_graph_for_the_exporter_of_onnx_holds_the_call(op, called):
    module = type("Module", (torch.nn.Module,), {"forward": lambda self, x: called(x)})()
    assert op.__name__ in str(torch.jit._get_trace_graph(module, (X,))[0])


def test_a_mode_sees_the_call(op, called):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        called(X)
    assert seen == [f"jitkern_test.{op.__name__}.default", "aten.add.Tensor"]


def test_the_flops_of_the_call_are_counted(op, called):
    packet = getattr(torch.ops.jitkern_test, op.__name__)
    with FlopCounterMode(display=False, custom_mapping={packet: lambda *_, **__: 7}) as counter:
        called(X)
    assert counter.get_total_flops() == 7


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # Torch 2.11
def test_the_profiler_sees_the_call(op, called):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        called(X)
    assert op.name in {event.key for event in profile.key_averages()}
