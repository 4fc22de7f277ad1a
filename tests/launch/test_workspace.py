"""`k.workspace`: memory that stays from call to call, by Python and by stubs."""

import os
import resource
import weakref
from ctypes import c_longlong, c_void_p
from pathlib import Path

import pytest
import torch
from helpers import needs_nvrtc, needs_runtime, programs_of, run_threads, served
from tuning import op_of

from jitkern import testing
from jitkern.declare import Cpp, Cuda
from jitkern.errors import LaunchError
from jitkern.launch.resources import workspaces
from jitkern.runtime import binding, specializer

CPP = """
// Adds up to the workspace, and leaves zeros behind.
extern "C" void sum(double *y, double *w, const double *x, long n, long columns) {
  for (long i = 0; i < n; i++) w[i % columns] += x[i];
  *y = 0;
  for (long j = 0; j < columns; j++) *y += w[j], w[j] = 0;
}
extern "C" void apart(long *y, char *a, char *b, char *c) { y[0] = b - a, y[1] = c - a, y[2] = (long)a; }
"""
CU = "__global__ void count(float *y, int *w, float *z, long long n) {}\n"


def on_cpu(launch):
    return op_of(Cpp(text=CPP), launch, schema="(Tensor x, int columns=4) -> Tensor")


def summed(k, x, columns):
    y = torch.empty(1, dtype=torch.float64, device=x.device)
    k.sum(y, k.workspace(8 * columns, dtype=torch.float64), x, x.numel(), columns)
    return y


@pytest.mark.long
@needs_runtime
def test_a_thread_of_the_cpu_has_a_workspace_that_stays_zeroed():
    op, x = on_cpu(summed), torch.arange(100.0).double()
    assert served(op, x).item() == 4950
    for columns in (1, 7, 5000, 3, 100_000):  # it grows
        assert op(x, columns).item() == 4950
    assert programs_of(op).misses == 1
    assert op(x.to("meta")).shape == (1,)


def resident():
    """The bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.long
@needs_runtime
def test_a_workspace_takes_no_memory_where_nobody_writes():
    def launch(k, x, columns):
        y, w = torch.empty(3, dtype=torch.int64), k.workspace(columns, dtype=torch.uint8)
        k.apart(y, w, w, w)
        return y

    op, x = on_cpu(launch), torch.ones(1)
    served(op, x)
    before = programs_of(op).misses, resident()
    assert op(x, 1 << 30)[2] % 64 == 0
    assert programs_of(op).misses == before[0]
    assert resident() < before[1] + (1 << 28)


@pytest.mark.long
@needs_runtime
def test_threads_share_no_workspace():
    op, x, wrong = on_cpu(summed), torch.arange(20_000.0).double(), []
    served(op, x)

    def work():
        wrong.extend(n for n in range(1, 60) if op(x, 37 * n).item() != 199_990_000)

    run_threads(*[work] * 6)
    assert not wrong and programs_of(op).misses == 1


@pytest.mark.long
@needs_runtime
def test_requests_of_one_call_lie_apart_and_each_kind_by_itself():
    def launch(k, x, columns):
        y = torch.empty(3, dtype=torch.int64)
        k.apart(y, k.workspace(columns), k.workspace(10), k.workspace(20, zeroed=False))
        return y

    op = on_cpu(launch)
    for columns, gap in ((300, 512), (256, 256), (1, 256), (4096, 4096)):
        for _ in range(2):
            first, other, address = op(torch.ones(1), columns).tolist()
            assert first == gap and other != 0 and address % 64 == 0
            specializer.settle()
    assert programs_of(op).misses == 1


@pytest.mark.long
def test_a_forked_child_has_a_workspace_too():
    op, x = on_cpu(summed), torch.arange(100.0).double()
    op(x)
    torch.zeros(1 << 20)  # starts the threads of OpenMP, which the child does not have
    child = os.fork()
    if not child:
        os._exit(0 if op(x, 9000).item() == 4950 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("size", "dtype", "says"),
    [
        (-8, torch.uint8, "not below 0"),
        (2.5, torch.uint8, "whole number"),
        (10, torch.float64, "a multiple of an element's 8"),
    ],
    ids=["negative", "float", "no_multiple"],
)
def test_a_size_that_is_none_is_refused(size, dtype, says):
    op = on_cpu(lambda k, x, columns: k.workspace(size, dtype=dtype))
    with pytest.raises(LaunchError, match=says):
        op(torch.ones(1))


def test_a_workspace_is_no_result_of_a_stub():
    def launch(k, x, columns):
        return k.workspace(8).zero_().clone()

    op = on_cpu(launch)
    op(torch.ones(1))
    specializer.settle()
    (reason,) = programs_of(op).refused.values()
    assert "a workspace other than as an argument of a kernel" in reason


def counted(k, x):
    y = torch.empty_like(x)
    n = x.numel()
    k.count(
        y, k.workspace(4 * n, dtype=torch.int32), k.workspace(400, zeroed=False, dtype=torch.float32), n,
        grid=1, block=32,
    )  # fmt: skip
    return y


@pytest.fixture
def on_cuda():
    return op_of(Cuda(text=CU), counted, sample=lambda device: torch.ones(1000, device=device))


def share(gpu, stream, address, size, *, zeroed=True, index=0):
    return gpu.runtime.jitkern_workspace(
        index, c_void_p(stream), int(zeroed), c_void_p(address), c_longlong(size)
    )


@pytest.mark.long
@needs_nvrtc
def test_a_program_asks_python_for_a_workspace_that_is_missing(on_cuda, gpu):
    gpu.learn(on_cuda, (torch.ones(1000, device="meta"),))
    x = torch.ones(10)
    assert gpu.call(x) is None  # there is none yet
    assert share(gpu, 77, 0x1000, 40) and share(gpu, 77, 0x2000, 400, zeroed=False)
    assert not share(gpu, 77, 0x1000, 40)  # told again
    assert gpu.call(x)[1:] == [0x1000, 0x2000, 10]
    assert gpu.call(torch.ones(11)) is None  # too small
    assert share(gpu, 77, 0x3000, 4096)
    assert gpu.call(torch.ones(11))[1] == gpu.call(x)[1] == 0x3000
    c_longlong.in_dll(gpu.driver, "stream").value = 78
    assert gpu.call(x) is None  # another stream
    share(gpu, 78, 0x4000, 4096, index=1), share(gpu, 78, 0x6000, 4096, zeroed=False)
    assert gpu.call(x) is None  # of another GPU
    share(gpu, 78, 0x5000, 4096)
    assert gpu.call(x)[1:3] == [0x5000, 0x6000]


@pytest.mark.long
@needs_nvrtc
def test_a_captured_call_is_left_to_python(on_cuda, gpu):
    gpu.learn(on_cuda, (torch.ones(1000, device="meta"),))
    share(gpu, 77, 0x1000, 4096), share(gpu, 77, 0x2000, 4096, zeroed=False)
    gpu.tell("capturing", 1)
    assert gpu.call(torch.ones(10)) is None
    gpu.tell("capturing", 0)
    assert gpu.call(torch.ones(10))


def test_python_keeps_a_workspace_for_each_stream_and_each_graph(monkeypatch):
    """By stand-ins for streams and captures: the memory itself lies on the CPU here."""
    now = {"stream": 1, "graph": 0}
    testing.forget_workspaces(monkeypatch)
    ask = lambda index: now["stream"]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", ask, raising=False)
    monkeypatch.setattr(workspaces.loading.cuda_driver, "capture_of", lambda *_: now["graph"])
    made = []

    def make(_, size, *, is_captured):
        made.append((size, is_captured))
        return torch.zeros(size)

    monkeypatch.setattr(workspaces, "new_memory", make)
    gpu = torch.device("cuda:0")

    def memory(size, **state):
        now.update(state)
        return workspaces.memory_of(gpu, size, zeroed=True)

    first = memory(100)
    assert memory(4096) is first and memory(1) is first
    assert memory(100, stream=2) is not first
    assert memory(5000, stream=1) is not first
    assert made == [(4096, False), (4096, False), (8192, False)]
    assert [block.memory.numel() for block in workspaces.shared(gpu)] == [8192]
    captured = memory(10, graph=5)
    assert memory(20, graph=5) is captured is not memory(20, graph=6)
    assert made[3:] == [(4096, True), (4096, True)]
    assert memory(10, graph=0).numel() == 8192
    kept = weakref.ref(first)
    del first
    assert kept() is not None  # nothing is freed: a thread may hold its address


def test_the_driver_is_asked_which_graph_is_captured(gpu):
    driver = workspaces.loading.cuda_driver
    assert driver.capture_of(2**40, 0) == 0
    gpu.tell("capturing", 1)
    assert driver.capture_of(2**40, 0) == 2**40 + 1
    gpu.tell("without_context", 1)
    assert driver.capture_of(2**40, 0) == 2**40 + 1 and not gpu.without_context
    assert gpu.mode == 1
    with driver.outside_of_capture():
        assert gpu.mode == 2
    assert gpu.mode == 1


@needs_runtime
def test_the_runtime_is_told_of_a_workspace_once():
    block = workspaces.Block(63, 1, zeroed=True, memory=torch.zeros(8, dtype=torch.uint8))
    assert binding.runtime().share(block) and not binding.runtime().share(block)
