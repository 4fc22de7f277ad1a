"""Values that reach the host while the program goes on."""

import math

import pytest
import torch
from helpers import refusing_to_wait, served, waiting_gpu

import jitkern
from jitkern import ops
from jitkern.kernels_src.loss_meter.meter import LossStatistics


def test_a_tensor_on_the_cpu_is_there_at_once():
    scalar = jitkern.ops.AsyncScalar()
    assert (scalar.poll(), scalar.wait(), scalar.number) == (None, None, 0)
    x = torch.tensor(2.5, requires_grad=True)
    scalar.put(x)
    assert (scalar.poll(), scalar.poll(), scalar.wait(), scalar.number) == (2.5, 2.5, 2.5, 1)
    scalar.put(torch.tensor([[7]], dtype=torch.int32))
    assert (scalar.poll(), scalar.number) == (7, 2)
    values = torch.arange(3.0)
    scalar.put(values)
    values.zero_()
    assert (scalar.poll(), scalar.number) == ([0.0, 1.0, 2.0], 3)


class Slow:
    """An event that ends when the test says so."""

    ended: set[int] = set()
    made = 0

    def __init__(self):
        self.id = Slow.made = Slow.made + 1

    def record(self):
        pass

    def query(self):
        return self.id in Slow.ended

    def synchronize(self):
        Slow.ended.update(range(self.id + 1))


@pytest.fixture
def copying(monkeypatch):
    """AsyncScalars whose tensors on the CPU count as on a GPU, with copies that end on demand."""
    monkeypatch.setattr(torch.cuda, "Event", Slow)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(Slow, "ended", set())
    monkeypatch.setattr(Slow, "made", 0)
    plain_empty = torch.empty

    def empty(*args, pin_memory, **kwargs):
        assert pin_memory
        return plain_empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)

    class OnAGpu(torch.Tensor):
        is_cuda = True

    return lambda value: torch.tensor(value).as_subclass(OnAGpu)


def test_the_newest_ended_value_is_polled_older_ones_go(copying):
    scalar = jitkern.ops.AsyncScalar()
    for value in (1.0, 2.0, 3.0, 4.0):
        scalar.put(copying(value))
    assert (scalar.poll(), scalar.number) == (None, 0)
    Slow.ended.add(1)
    assert (scalar.poll(), scalar.number) == (1.0, 1)
    Slow.ended.add(3)  # of another stream, while the second is under way
    assert (scalar.poll(), scalar.number) == (3.0, 3)
    Slow.ended.add(2)  # older than what was polled
    assert (scalar.poll(), scalar.number) == (3.0, 3)
    assert (scalar.wait(), scalar.number) == (4.0, 4)
    assert not scalar.under_way


# ------------------------------------------------------------------ LossMeter


@pytest.mark.long
def test_a_meter_reads_what_was_put():
    meter = jitkern.ops.LossMeter("cpu")
    assert meter.poll() is None and meter.wait() is None
    meter.put()
    empty = meter.poll()
    assert (empty.finite, empty.bad, empty.sum) == (0, 0, 0.0) and math.isnan(empty.mean)
    for value in (3.0, 1.0, float("nan"), 5.0):
        meter.add(torch.tensor(value, requires_grad=True) * 1)
    assert meter.poll() == empty or math.isnan(meter.poll().mean)  # nothing was put since
    meter.put()
    assert meter.poll() == meter.wait() == LossStatistics(3, 1, 9.0, 3.0, 1.0, 5.0)
    assert meter.state.grad_fn is None  # the graphs of the losses are not kept
    assert meter.number == 2
    meter.reset()
    meter.put()
    assert meter.poll().finite == 0


@pytest.mark.long
def test_a_sum_of_many_losses_has_no_error_that_grows():
    meter = jitkern.ops.LossMeter("cpu")
    loss = torch.tensor(0.1, dtype=torch.float64)
    for _ in range(5000):
        meter.add(loss)
    meter.put()
    assert meter.poll().sum == math.fsum([0.1] * 5000)


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    meter, scalar = jitkern.ops.LossMeter("cuda"), jitkern.ops.AsyncScalar()
    flag = torch.zeros((), dtype=torch.int32, device="cuda")
    loss = torch.full((), 2.0, device="cuda")
    served(ops.nonfinite_flag_tensor_, loss, flag, device="cuda")  # which compiles
    served(ops.loss_meter_, loss, torch.zeros_like(meter.state), device="cuda")
    for tensor in (flag, meter.state):  # pinned memory, for which the first copies may wait
        earlier = jitkern.ops.AsyncScalar()
        for _ in range(4):
            earlier.put(tensor)
        earlier.wait()
    torch.cuda.synchronize()
    with waiting_gpu(), refusing_to_wait():
        ops.nonfinite_flag_tensor_(loss, flag)
        scalar.put(flag)
        meter.add(loss)
        meter.put()
        loss.fill_(float("nan"))
        ops.nonfinite_flag_tensor_(loss, flag)
        meter.add(loss)
        first = scalar.poll(), meter.poll()
        scalar.put(flag)
        meter.put()
    assert first == (None, None), "the GPU was waited for"
    assert (scalar.wait(), scalar.number) == (1, 2)
    assert meter.wait() == LossStatistics(1, 1, 2.0, 2.0, 2.0, 2.0)
    assert scalar.poll() == 1


@pytest.mark.gpu
def test_values_of_each_put_arrive_in_order():
    scalar, x = jitkern.ops.AsyncScalar(), torch.zeros((), device="cuda", dtype=torch.int64)
    seen = []
    for _ in range(300):
        x += 1
        scalar.put(x)
        seen.append(scalar.poll() or 0)
    assert seen == sorted(seen) and scalar.wait() == 300 == scalar.number
