"""Calls through the launch runtime, failed ones too, leave no memory behind."""

import ctypes
import gc
import sys
import weakref

import pytest
import torch
from calls_of_ops import INC, SUM, WAYS, X, misses, through, warmed

from jitkern.runtime.records import CallClass

CALLS = 16_000  # many, beside the few hundred objects that Torch keeps sooner or later


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def in_use():
    """Bytes that malloc has given out, and blocks that Python has."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = Mallinfo
    gc.collect()
    now = function()
    return now.uordblks + now.hblkhd, sys.getallocatedblocks()


def assert_flat(call, calls=CALLS):
    """`calls` calls take less than a byte of memory each, and a Python object in fifty."""
    in_use()
    for _ in range(calls // 2):
        call()
    for last in (False, False, True):  # other threads take memory, too, but once
        before = in_use()
        for _ in range(calls):
            call()
        grown = [after - start for after, start in zip(in_use(), before)]
        if not last and (grown[0] >= calls or grown[1] >= calls / 50):
            continue
        assert grown[0] < calls, grown
        assert grown[1] < calls / 50, grown
        return


def failing(function, *args, **kwargs):
    def call():
        try:
            function(*args, **kwargs)
        except RuntimeError:
            return
        raise AssertionError("it did not fail")

    return call


ARGUMENTS = {
    "no optional": (X, None, None, 1.0, None, 13, None),
    "every optional": (X, X, 4, 2.5, True, 13, 0.5),
    "defaults left out": (X,),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("args", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_failing_calls_leave_nothing_behind(many, way, args):
    warmed(many, *args[:5])
    call = through(many, way)
    assert_flat(failing(call, *args) if len(args) > 1 else failing(call, X, k=13))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_failing_calls_without_a_program_leave_nothing(many, way):
    assert_flat(failing(through(many, way), X, X, 4, 2.5, True, 13, 0.5))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_failing_calls_of_a_differentiable_op_leave_nothing(square, way, needs_grad):
    op = warmed(square(), X)
    x = torch.ones(1, 1, 1, 1, 1, requires_grad=needs_grad)
    assert_flat(failing(through(op, way), x))


@pytest.mark.long
@pytest.mark.parametrize(
    "args", [ARGUMENTS["no optional"], ARGUMENTS["every optional"]], ids=list(ARGUMENTS)[:2]
)
def test_calls_that_hit_leave_nothing_behind(many, args):
    args = (*args[:5], 3, args[6])
    warmed(many, *args)
    assert_flat(lambda: many(*args))


@pytest.mark.long
def test_calls_that_python_serves_leave_nothing_behind(many, monkeypatch):
    monkeypatch.setattr(CallClass, "is_due", lambda _: False)
    assert_flat(lambda: many(X, X, 4, 2.5, True, 3, 0.5))
    assert misses(many) > CALLS


@pytest.mark.long
def test_recording_a_gradient_leaves_nothing_behind(square):
    op, x = square(), X.clone().requires_grad_()
    warmed(op, x).overload(x).sum().backward()
    assert_flat(lambda: op(x).sum().backward())


@pytest.mark.long
def test_an_inplace_op_leaves_nothing_behind(inc):
    x = torch.zeros(3)
    warmed(inc, x, 2)
    assert_flat(lambda: inc(x, 2))


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_call_frees_its_arguments_at_once(scale, way):
    call = through(scale(), way)
    x = torch.ones(3)
    alive = weakref.ref(x)
    gc.disable()
    try:
        failing(call, x, 13.0)()
        del x
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_an_allocation_that_fails_raises_torchs_own_error(declare, way):
    def launch(k, x, n):
        out = torch.empty(n)
        k.inc(x, x.numel())
        return out

    op = warmed(declare("(Tensor(a!) x, int n) -> Tensor", INC, launch), torch.zeros(1), 1)
    with pytest.raises(RuntimeError) as expected:
        torch.empty(2**46)
    x = torch.zeros(1)
    with pytest.raises(RuntimeError) as raised:
        through(op, way)(x, 2**46)
    assert str(expected.value).splitlines()[0] in str(raised.value)
    assert x.item() == 0
    assert op(x, 5).numel() == 5


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("way", WAYS)
def test_an_inplace_launch_is_not_repeated_after_a_failure(inc, way, warm):
    if warm:
        warmed(inc, torch.zeros(1), 1)
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="allocat"):
        through(inc, way)(x, 2**46)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.long
def test_an_error_after_a_launch_leaves_nothing_behind(inc):
    warmed(inc, torch.zeros(1), 1)
    assert_flat(failing(inc, torch.zeros(3), 2**46), 400)


def test_autograd_notices_a_failed_calls_inplace_launch(inc):
    warmed(inc, torch.zeros(1), 1)
    e = torch.ones(1, requires_grad=True).exp()
    saves = e.square()
    failing(inc, e, 2**46)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saves.backward()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sum", "bad"], ids=["served", "refused"])
def test_lists_strings_and_optional_results_leave_nothing(declare, mode):
    def launch(k, xs, mode, more, want):
        out = torch.zeros((), dtype=torch.float64)
        torch._check(mode != "bad", lambda: "bad mode")
        for table in k.tables(xs):
            k.total[{"T": table.dtype}](out, table, float(more[0]))
        return out, torch.empty(1) if want else None

    schema = "(Tensor[] xs, str? mode, int[]? more, bool want) -> (Tensor, Tensor?)"
    op = declare(schema, SUM, launch)
    xs = [torch.ones(3) for _ in range(3)]
    for want in (True, False):
        warmed(op, xs, "sum", [2], want)

    def call():
        for want in (True, False):
            if mode == "sum":
                op(xs, mode, [2], want)
                continue
            with pytest.raises(RuntimeError, match="bad mode"):
                op(xs, mode, [2], want)

    assert_flat(call, CALLS // 4)
