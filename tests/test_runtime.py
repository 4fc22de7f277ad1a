"""Calls through the launch runtime: errors, memory, threads, forks, modes, settings and damage."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import logging
import math
import random
import re
import shutil
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from conftest import slot_of
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern import config
from jitkern.declare import Cpp, kernel
from jitkern.errors import CompileError, LaunchError, NotCached
from jitkern.runtime import binding, linker, slot, trampoline
from jitkern.runtime.slot import Slot

pytestmark = pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")
_number = itertools.count()
X = torch.arange(6.0).reshape(2, 3)
CALLS = 20_000
SCALE = 'extern "C" void scale(T* out, const T* x, double alpha, long n) { for (long i = 0; i < n; i++) out[i] = T(alpha) * x[i]; }'
SQUARE = 'extern "C" void square(T* out, const T* x, long n) { for (long i = 0; i < n; i++) out[i] = x[i] * x[i]; }'
TWICE = 'extern "C" void twice(T* out, const T* grad, const T* x, long n) { for (long i = 0; i < n; i++) out[i] = 2 * grad[i] * x[i]; }'
INC = 'extern "C" void inc(float* x, long n) { for (long i = 0; i < n; i++) x[i] += 1; }'
MANY = (
    'extern "C" void many(float* out, const float* x, const float* b, double f, long k, long n)'
    " { for (long i = 0; i < n; i++) out[i] = x[i] * f + (b ? b[i] : 0) + k; }"
)
MEET = """
#include <time.h>
extern "C" void meet(long* together, long* entered, long seconds) {
  __atomic_fetch_add(entered, 1, __ATOMIC_SEQ_CST);
  for (time_t end = time(0) + seconds; __atomic_load_n(entered, __ATOMIC_SEQ_CST) < 2;)
    if (time(0) > end) return;
  *together = 1;
}
"""


@pytest.fixture
def declare(tmp_path):
    """A fresh op `jitkern_test::launchN` with this C++ source and launch function."""

    def make(signature, text, launch, reference=None):
        name = f"launch{next(_number)}"
        (tmp_path / f"{name}.cpp").write_text(text)
        op = kernel(f"jitkern_test::{name}{signature}", cpu=Cpp(str(tmp_path / f"{name}.cpp")))
        op.launch("cpu")(launch)
        if reference:
            op.reference(reference)
        return op

    return make


@pytest.fixture
def scale(declare):
    """`scale(Tensor x, float alpha=2.0) -> Tensor`, which refuses an alpha of 13."""

    def launch(k, x, alpha):
        torch._check(alpha != 13, lambda: f"scale: {alpha} is unlucky")
        x = x.contiguous()
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype}](out, x, alpha, x.numel())
        return out

    return lambda: declare(
        "(Tensor x, float alpha=2.0) -> Tensor", SCALE, launch, lambda x, alpha: alpha * x
    )


@pytest.fixture
def square(declare):
    """A differentiable `square(Tensor x) -> Tensor`; its backward is an op with no gradient."""

    def launch(k, x):
        torch._check(x.dim() != 5, lambda: "square: too many dimensions")
        x = x.contiguous()
        out = torch.empty_like(x)
        k.square[{"T": x.dtype}](out, x, x.numel())
        return out

    def launch_backward(k, grad, x):
        grad, x = grad.contiguous(), x.contiguous()
        out = torch.empty_like(x)
        k.twice[{"T": x.dtype}](out, grad, x, x.numel())
        return out

    def make():
        twice = declare(
            "(Tensor grad, Tensor x) -> Tensor", TWICE, launch_backward, lambda g, x: 2 * g * x
        )
        op = declare("(Tensor x) -> Tensor", SQUARE, launch, lambda x: x * x)
        op.backward(lambda grad, x: (twice(grad, x),))
        return op

    return make


@pytest.fixture
def many(declare):
    """An op with every kind of argument; a k of 13 is refused."""

    def launch(k, x, b, n, f, flag, k_, s):
        torch._check(k_ != 13, lambda: f"many: k is {k_}")
        out = torch.empty_like(x)
        offset = k_ + (n if n is not None else 0) + (1 if flag else 0)
        k.many(out, x, b, f * (s if s is not None else 1.0), offset, x.numel())
        return out

    return declare(
        "(Tensor x, Tensor? b=None, int? n=None, float f=1.0, bool? flag=None, int k=0, float? s=None) -> Tensor",
        MANY,
        launch,
    )


@pytest.fixture
def inc(declare):
    """An op that adds 1 in place, then allocates `n` floats that nobody may have."""

    def launch(k, x, n):
        k.inc(x, x.numel())
        return torch.empty(n)

    return declare("(Tensor(a!) x, int n) -> Tensor", INC, launch)


def misses(op):
    return slot_of(op).misses


def warmed(op, *args, **kwargs):
    """The op, once it serves such a call without Python."""
    op(*args, **kwargs)
    linker.settle()
    before = misses(op)
    op(*args, **kwargs)
    assert misses(op) == before, slot_of(op).refused
    return op


class Mallinfo(ctypes.Structure):
    _fields_ = [  # fmt: skip
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


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
    for _ in range(calls // 4):
        call()
    before = in_use()
    for _ in range(calls):
        call()
    grown = [after - start for after, start in zip(in_use(), before)]
    assert grown[0] < calls, grown
    assert grown[1] < calls / 50, grown


def failing(function, *args, **kwargs):
    def call():
        try:
            function(*args, **kwargs)
        except RuntimeError:
            return
        raise AssertionError("it did not fail")

    return call


def through(op, way):
    packet = getattr(torch.ops.jitkern_test, op.name.split("::")[1])
    return {"public": op, "torch.ops": packet, "overload": op.overload}[way]


WAYS = ("public", "torch.ops", "overload")


# ------------------------------------------------------------------ errors and memory


ARGUMENTS = {
    "no optional": (X, None, None, 1.0, None, 13, None),
    "every optional": (X, X, 4, 2.5, True, 13, 0.5),
    "defaults left out": (X,),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("args", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_failing_calls_leave_nothing_behind(many, way, args):
    warmed(many, *args[:5])
    call = through(many, way)
    assert_flat(failing(call, *args) if len(args) > 1 else failing(call, X, k=13))


@pytest.mark.parametrize("way", WAYS)
def test_failing_calls_of_an_op_with_no_variant_yet_leave_nothing_behind(many, way):
    assert_flat(failing(through(many, way), X, X, 4, 2.5, True, 13, 0.5))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_failing_calls_of_a_differentiable_op_leave_nothing_behind(square, way, needs_grad):
    op = warmed(square(), X)
    x = torch.ones(1, 1, 1, 1, 1, requires_grad=needs_grad)
    assert_flat(failing(through(op, way), x))


@pytest.mark.parametrize(
    "args", [ARGUMENTS["no optional"], ARGUMENTS["every optional"]], ids=list(ARGUMENTS)[:2]
)
def test_calls_that_hit_leave_nothing_behind(many, args):
    args = (*args[:5], 3, args[6])
    warmed(many, *args)
    assert_flat(lambda: many(*args))


def test_calls_that_python_serves_leave_nothing_behind(many, monkeypatch):
    monkeypatch.setattr(Slot, "wants_stub", lambda *_: False)
    assert_flat(lambda: many(X, X, 4, 2.5, True, 3, 0.5))
    assert misses(many) > CALLS


def test_recording_a_gradient_leaves_nothing_behind(square):
    op, x = square(), X.clone().requires_grad_()
    warmed(op, x).overload(x).sum().backward()
    assert_flat(lambda: op(x).sum().backward())


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
def test_an_inplace_launch_is_not_repeated_where_an_allocation_after_it_fails(inc, way, warm):
    if warm:
        warmed(inc, torch.zeros(1), 1)
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="allocat"):
        through(inc, way)(x, 2**46)
    assert x.tolist() == [1, 1, 1]


def test_an_error_after_a_launch_leaves_nothing_behind(inc):
    warmed(inc, torch.zeros(1), 1)
    assert_flat(failing(inc, torch.zeros(3), 2**46), 400)


def test_autograd_notices_an_inplace_launch_whose_call_failed_after_it(inc):
    warmed(inc, torch.zeros(1), 1)
    e = torch.ones(1, requires_grad=True).exp()
    saves = e.square()
    failing(inc, e, 2**46)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saves.backward()


# ------------------------------------------------------------------ typed errors


def test_the_public_op_raises_not_cached_with_its_attributes_and_torch_its_text(scale):
    op = scale()
    with config.using(compile="never"):
        with pytest.raises(NotCached) as typed:
            op(X)
        with pytest.raises(RuntimeError) as plain:
            op.overload(X)
    assert "scale.f32" in typed.value.path
    assert typed.value.variant.function == "scale"
    assert str(plain.value).splitlines()[0] == str(typed.value)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_the_public_op_raises_compile_error_with_its_attributes_and_torch_its_text(
    declare, needs_grad
):
    op = declare("(Tensor x) -> Tensor", "nonsense;", lambda k, x: k.scale(x) or x.clone())
    if needs_grad:
        op.backward(lambda grad: grad)
    x = torch.ones(3, requires_grad=needs_grad)
    with pytest.raises(CompileError) as typed:
        op(x)
    with pytest.raises(RuntimeError) as plain:
        op.overload(x)
    assert typed.value.op == op.name
    assert "nonsense" in typed.value.log
    assert typed.value.command.startswith("c++")
    assert str(typed.value).splitlines()[0] in str(plain.value)


def test_the_public_op_raises_launch_error_and_torch_its_text(declare):
    op = declare(
        "(Tensor x) -> ()", INC, lambda k, x: k.inc(x), lambda x: pytest.fail("no reference")
    )
    with pytest.raises(LaunchError, match="takes 2 arguments") as typed:
        op(X)
    with pytest.raises(RuntimeError) as plain:
        op.overload(X)
    assert str(typed.value) in str(plain.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError, KeyError, MemoryError])
@pytest.mark.parametrize("text", [(), ("a reason",)], ids=["bare", "said"])
def test_what_a_launch_function_raises_reaches_the_caller_of_the_public_op(declare, kind, text):
    def launch(k, x):
        raise kind(*text)

    op = declare("(Tensor x) -> Tensor", INC, launch)
    with pytest.raises(kind) as raised:
        op(X)
    assert raised.value.args == text
    if kind is not KeyboardInterrupt:  # of that one, see below
        with pytest.raises(RuntimeError, match=kind.__name__):
            op.overload(X)


def test_ctrl_c_in_an_op_that_torch_calls_passes_those_who_catch_errors(declare):
    def launch(k, x):
        raise KeyboardInterrupt

    op = declare("(Tensor x) -> Tensor", INC, launch)

    def swallow():
        with contextlib.suppress(Exception):
            op.overload(X)
        return sum(map(abs, range(10)))  # more code, in which Python sees what came meanwhile

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            swallow()
    finally:
        signal.signal(signal.SIGINT, before)


TEXTS = {
    "long": "x" * 10_000,
    "long and not ASCII": "a" + "é" * 5000,
    "of format signs": "%s %n %d",
    "with a NUL": "before\0after",
    "with a surrogate": "a\udc80b",
    "of several lines": "one\ntwo\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_an_error_of_any_text_keeps_its_type(declare, text):
    def launch(k, x):
        raise LaunchError(text)

    op = declare("(Tensor x) -> Tensor", INC, launch)
    with pytest.raises(RuntimeError):
        op.overload(X)
    with pytest.raises(RuntimeError) as raised:
        op(X)
    assert raised.type is LaunchError
    assert raised.value.args == (text,)


def test_an_error_in_a_backward_keeps_its_type(declare, square):
    def launch(k, x):
        raise LaunchError("in a backward")

    inner, op = declare("(Tensor x) -> Tensor", INC, launch), square()
    outer = declare("(Tensor x) -> Tensor", SQUARE, lambda k, x: op(x), lambda x: x * x)
    outer.backward(lambda grad: (inner(grad),))
    result = outer(X.clone().requires_grad_())
    with pytest.raises(LaunchError, match="in a backward"):
        result.sum().backward()


def test_an_error_of_torchs_own_is_not_mistaken_for_an_earlier_one(declare):
    def launch(k, x):
        raise ValueError

    op = declare("(Tensor x) -> Tensor", INC, launch)
    with pytest.raises(RuntimeError):
        op.overload(X)
    with pytest.raises(RuntimeError, match="argument"):
        op("not a tensor")


def test_an_error_that_a_launch_function_handles_is_forgotten(declare, scale):
    inner = scale()

    def launch(k, x):
        with pytest.raises(RuntimeError, match="unlucky"):
            inner(x, 13.0)
        return inner(x)

    op = declare("(Tensor x) -> Tensor", INC, launch)
    for _ in range(2):
        assert torch.equal(op(X), 2 * X)
        linker.settle()


# ------------------------------------------------------------------ threads and forks


def run_threads(*works):
    """Run these together; what they raise is raised here."""
    errors, barrier = [], threading.Barrier(len(works))

    def run(work):
        try:
            barrier.wait()
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def appended(monkeypatch):
    """The slots to which a variant was appended, in order."""
    slots, append = [], binding.Runtime.append
    monkeypatch.setattr(
        binding.Runtime,
        "append",
        lambda self, slot, *rest: slots.append(slot) or append(self, slot, *rest),
    )
    return slots


def test_eight_threads_from_cold_compute_right_and_make_each_variant_once(scale, square, appended):
    plain, differentiable = scale(), square()
    end = time.monotonic() + 2.5

    def work(seed):
        chance = random.Random(seed)
        while time.monotonic() < end:
            shape = [chance.choice([0, 1, 2, 3, 8]) for _ in range(chance.choice([1, 2, 2, 3, 4]))]
            x = torch.ones(shape, dtype=chance.choice([torch.float32, torch.float64])) * 3
            x = x.t() if x.dim() == 2 and chance.random() < 0.3 else x
            assert torch.equal(plain(x, 2.0), 2 * x)
            assert torch.equal(differentiable(x), x * x)
            with pytest.raises(RuntimeError, match="unlucky"):
                plain(x, 13.0)
            y = x.clone().requires_grad_()
            assert torch.equal(torch.autograd.grad(differentiable(y).sum(), y)[0], 2 * x)

    run_threads(*(lambda seed=seed: work(seed) for seed in range(8)))
    linker.settle()
    for op in (plain, differentiable):
        known = slot_of(op)
        assert 0 < appended.count(known.number) == len(known.known)
        assert not known.refused


def test_a_hit_runs_no_python(many):
    warmed(many, X, X, 4)
    called = []
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
    try:
        many._builtin(X, X, 4)
    finally:
        sys.setprofile(None)
    assert called == []


@pytest.mark.parametrize("way", WAYS)
def test_two_threads_are_inside_a_kernel_at_once(declare, way):
    def launch(k, together, entered, seconds):
        k.meet(together, entered, seconds)

    op = declare("(Tensor(a!) together, Tensor(b!) entered, int seconds) -> ()", MEET, launch)
    together, entered = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    warmed(op, together, entered, 0)
    before, call = misses(op), through(op, way)
    results = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    entered.zero_()
    run_threads(*(lambda result=result: call(result, entered, 20) for result in results))
    assert misses(op) == before
    assert [result.item() for result in results] == [1, 1]


FORK = """
import os, signal, torch, jitkern.ops
from jitkern.runtime import binding, linker, slot
assert binding.runtime()
vec_add = jitkern.ops.vec_add
known = vec_add.backends["cpu"].implementation.slot
def computes(*tensors):
    for x in tensors:
        assert torch.equal(vec_add(x, x), 2 * x), x
def serves(*tensors):
    computes(*tensors)
    linker.settle()
    before = known.misses
    computes(*tensors)
    assert known.misses == before
old, new = torch.ones(3), torch.ones(2, 3, dtype=torch.float64)
{before}
pid = os.fork()
signal.alarm(60)  # what hangs is killed, and this test fails
if not pid:
    try:
        {child}
        serves(old, new)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
serves(old, new)
"""


@pytest.fixture
def with_runtime(run_python, cache_dir):
    """A cache that has the launch runtime and a kernel, and nothing to launch it with."""
    done = run_python(
        "import torch, jitkern.ops; jitkern.ops.vec_add(torch.ones(1), torch.ones(1))"
    )
    assert done.returncode == 0, done.stderr
    for pattern in ("stub", "plan"):
        for entry in cache_dir.glob(f"v1/*/*.{pattern}.*"):
            shutil.rmtree(entry)
    return run_python


@pytest.mark.parametrize(
    ("before", "child"),
    [
        ("pass", "pass"),
        ("serves(old)", "b = known.misses; computes(old); assert known.misses == b"),
        ("computes(old, new)", "pass"),
    ],
    ids=["after import", "after first calls", "while stubs are in the making"],
)  # fmt: skip
def test_a_fork_leaves_a_child_and_a_parent_that_serve(with_runtime, before, child):
    done = with_runtime(FORK.format(before=before, child=child))
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


# ------------------------------------------------------------------ grad modes and dispatch


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_warm_op_computes_in_every_grad_mode(scale, square, mode):
    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        warmed(op, X)
        before = misses(op)
        with mode():
            result = op(X)
        assert torch.equal(result, expected)
        assert result.is_inference() == (mode is torch.inference_mode)
        assert misses(op) == before


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_call_that_records_nothing_has_no_graph(square, mode):
    op = warmed(square(), X)
    with mode():
        assert not op(X.clone().requires_grad_()).requires_grad


def test_a_tensor_made_in_inference_mode_is_taken_outside(scale, square):
    with torch.inference_mode():
        x = X.clone()
    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        for _ in range(2):
            assert torch.equal(op(x), expected)
            linker.settle()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_an_inplace_op_changes_an_inference_tensor(inc, inside):
    with torch.inference_mode():
        x = torch.zeros(3)
    for _ in range(3):
        with torch.inference_mode(inside):
            inc(x, 1)
        linker.settle()
    assert x.tolist() == [3, 3, 3]


def test_an_inplace_op_counts_one_version_cold_and_warm(inc):
    x = torch.zeros(3)
    for calls in (1, 2, 3):
        inc(x, 1)
        linker.settle()
        assert x._version == calls
    assert misses(inc) == 1


def test_autograd_notices_what_a_warm_inplace_op_changed(inc):
    warmed(inc, torch.zeros(1), 1)
    e = torch.ones(1, requires_grad=True).exp()
    saves = e.square()
    inc(e, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saves.backward()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_a_dispatch_mode_sees_exactly_the_op(scale, square, warm, needs_grad):
    for op in (scale(), square()):
        if warm:
            warmed(op, X)
        x = X.clone().requires_grad_(needs_grad)
        with Seen() as seen:
            op(x)
        assert seen.ops == [op.overload]


def test_a_dispatch_mode_sees_the_backwards_op(square):
    op = warmed(square(), X)
    result = op(X.clone().requires_grad_())
    with Seen() as seen:
        result.backward(torch.ones_like(X))
    names = [str(function) for function in seen.ops]
    assert sum(name.startswith("jitkern_test.") for name in names) == 1, names
    assert not any("jitkern_python" in name for name in names)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_a_tensor_subclass_sees_the_op_and_its_parts_are_computed(scale, square, needs_grad):
    from torch.testing._internal.two_tensor import TwoTensor

    for op, reference in ((scale(), lambda x: 2 * x), (square(), lambda x: x * x)):
        warmed(op, X)
        result = op(TwoTensor(X, X + 1).requires_grad_(needs_grad)).detach()
        assert type(result) is TwoTensor
        assert torch.equal(result.a, reference(X))
        assert torch.equal(result.b, reference(X + 1))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_fake_tensors_launch_nothing(scale, square, warm):
    for op in (scale(), square()):
        if warm:
            warmed(op, X)
        before = misses(op)
        with torch._subclasses.FakeTensorMode():
            result = op(torch.empty(2, 3, requires_grad=True))
        assert type(result) is torch._subclasses.FakeTensor
        assert result.shape == (2, 3)
        assert misses(op) == before


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_traces_the_op_whole(scale, square, tracing):
    from torch.fx.experimental.proxy_tensor import make_fx

    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        warmed(op, X)
        graph = make_fx(op.__call__, tracing_mode=tracing)(X)
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert calls == [op.overload]
        assert torch.equal(graph(X), expected)


@pytest.mark.parametrize("way", WAYS)
def test_backward_computes_the_gradient_cold_and_warm(square, way):
    op = square()
    for _ in range(3):
        x = X.clone().requires_grad_()
        through(op, way)(x).sum().backward()
        assert torch.equal(x.grad, 2 * X)
        linker.settle()


TRANSFORMS = {
    "grad": (lambda f: torch.func.grad(lambda x: f(x).sum())(X), 2 * X),
    "vmap": (lambda f: torch.func.vmap(f)(X), X * X),
    "vmap over columns": (lambda f: torch.func.vmap(f, in_dims=1, out_dims=1)(X), X * X),
    "vmap of grad": (lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X), 2 * X),
    "grad of vmap": (lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(X), 2 * X),
    "grad of grad": (
        lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x).sum())(X),
        torch.full_like(X, 2),
    ),
    "jvp": (lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),))[1], 2 * X),
    "jvp of grad": (
        lambda f: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (X,), (X,))[1], 2 * X,
    ),
    "vjp": (lambda f: torch.func.vjp(f, X)[1](torch.ones_like(X))[0], 2 * X),
    "jacrev": (lambda f: torch.func.jacrev(f)(X[1]), torch.diag(2 * X[1])),
    "jacfwd": (lambda f: torch.func.jacfwd(f)(X[1]), torch.diag(2 * X[1])),
    "hessian": (lambda f: torch.func.hessian(lambda x: f(x).sum())(X[1]), 2 * torch.eye(3)),
    "functionalize": (lambda f: torch.func.functionalize(f)(X), X * X),
}  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("transform", "expected"), TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_give_right_results(square, transform, expected, warm):
    op = square()
    if warm:
        warmed(op, X)
        warmed(op, X[1])
    assert torch.equal(transform(op), expected)


def test_vmap_of_an_op_with_no_gradient_gives_the_right_result(scale):
    op = warmed(scale(), X)
    assert torch.equal(torch.func.vmap(op)(X), 2 * X)


def test_forward_mode_on_a_warm_op_has_the_tangent(square):
    op = warmed(square(), X)
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(op(forward_ad.make_dual(X, torch.ones_like(X))))
    assert torch.equal(result.primal, X * X)
    assert torch.equal(result.tangent, 2 * X)


def test_a_backward_that_calls_another_op_is_differentiated_twice(square):
    op = square()
    warmed(op, X.double())
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, (x,))


@pytest.mark.parametrize(
    "odd", [torch._neg_view, lambda x: x.expand(2, 2, 3), lambda x: x[:, ::2], torch.nn.Parameter]
)
def test_odd_tensors_on_a_warm_op_are_read_right(scale, square, odd):
    for op, reference in ((scale(), lambda x: 2 * x), (square(), lambda x: x * x)):
        warmed(op, X)
        assert torch.equal(op(odd(X.clone())), reference(odd(X.clone())))


def test_autocast_on_a_warm_op_changes_nothing(scale, square):
    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        warmed(op, X)
        before = misses(op)
        with torch.autocast("cpu"):
            assert torch.equal(op(X), expected)
        assert misses(op) == before


def test_the_profiler_shows_the_ops_name(scale, square):
    ops = [warmed(scale(), X), warmed(square(), X)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for op in ops:
            op(X)
    names = {event.name for event in profile.events()}
    assert {op.name for op in ops} <= names
    assert not any("jitkern_python" in name for name in names)


# ------------------------------------------------------------------ settings, bounds, damage


def test_a_variant_serves_only_under_the_preference_it_was_traced_under(scale):
    op = warmed(scale(), X)
    before = misses(op)
    with config.using(prefer="nvrtc"):
        assert torch.equal(op(X), 2 * X)
        assert misses(op) == before + 1
        linker.settle()
        assert torch.equal(op(X), 2 * X)
        assert misses(op) == before + 1
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before + 1


def test_a_preference_counts_in_its_own_thread_alone(scale):
    op = warmed(scale(), X)
    inside, done = threading.Event(), threading.Event()

    def block():
        with config.using(prefer="nvrtc"):
            inside.set()
            done.wait()

    thread = threading.Thread(target=block)
    thread.start()
    inside.wait()
    before = misses(op)
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before + 1, "which source a thread prefers is not told by C meanwhile"
    with config.using(prefer="cc"):
        op(X)
        linker.settle()
        before = misses(op)
        assert torch.equal(op(X), 2 * X)
        assert misses(op) == before, "but in a block of its own"
    done.set()
    thread.join()
    before = misses(op)
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before


def test_tasks_of_one_thread_have_preferences_of_their_own(scale):
    op = warmed(scale(), X)
    with config.using(prefer="cc"):
        op(X)
    linker.settle()

    async def prefers():
        with config.using(prefer="cc"):
            await asyncio.sleep(0.01)

    async def none(task):
        await asyncio.sleep(0)
        before = misses(op)
        assert torch.equal(op(X), 2 * X)
        await task
        return misses(op) - before

    async def both():
        return await none(asyncio.create_task(prefers()))

    assert asyncio.run(both()) == 1, "Python was asked"


VARIANTS = int(
    re.search(r"VARIANTS = (\d+)", Path(binding.__file__).with_name("runtime.c").read_text()).group(
        1
    )
)


def test_past_the_bound_the_oldest_makes_room_and_one_warning_says_what_changes(
    declare, caplog, monkeypatch
):
    monkeypatch.setattr(slot, "_PATIENCE", ())
    monkeypatch.setattr(slot, "_OFTEN", 1)

    def launch(k, x):
        hash(x.shape[0])  # a constant of each variant
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype}](out, x, 2.0, x.numel())
        return out

    op = declare("(Tensor x) -> Tensor", SCALE, launch)
    xs = [torch.ones(n) for n in range(1, VARIANTS + 6)]
    for x in (*xs, xs[0], xs[-1]):
        assert torch.equal(op(x), 2 * x)
        linker.settle()
    before = misses(op)
    for x in (xs[0], xs[-1]):
        assert torch.equal(op(x), 2 * x)
    assert misses(op) == before
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "as many compiled variants as it may have" in said[0]
    assert "size(0) of `x`" in said[0]


def test_what_was_not_compiled_while_compiling_was_off_is_compiled_later(scale):
    op = scale()
    op(X.double())  # compiles both kernels
    other = scale()
    with config.using(compile="never"), pytest.raises(NotCached):
        other(X)
    op(X)
    linker.settle()
    with config.using(compile="never"):
        op(torch.ones(1, 2, 3))  # its kernel is cached, and its stub is not
    linker.settle()  # it was asked for where compiling was off
    warmed(op, torch.ones(1, 2, 3))


def test_as_many_arguments_and_returns_as_there_may_be_are_served(declare):
    def launch(k, *xs):
        outs = [torch.empty_like(x) for x in xs[: trampoline.MAX_RETURNS]]
        for i, out in enumerate(outs):
            k.many(out, xs[i], xs[-1 - i], 1.0, 0, out.numel())
        return tuple(outs)

    parameters = ", ".join(f"Tensor x{i}" for i in range(trampoline.MAX_ARGUMENTS))
    returns = ", ".join(["Tensor"] * trampoline.MAX_RETURNS)
    op = declare(f"({parameters}) -> ({returns})", MANY, launch)
    xs = [torch.full((3,), float(i)) for i in range(trampoline.MAX_ARGUMENTS)]
    warmed(op, *xs)
    assert [out.tolist() for out in op(*xs)] == [[31.0] * 3] * trampoline.MAX_RETURNS


def test_numbers_at_the_edge_of_their_types_are_passed_whole(many):
    warmed(many, X, f=2.0, k=1)
    for k in (-(2**62), 2**62, 0, -1):
        assert torch.equal(many(X, k=k), X + torch.tensor(float(k)))
    for f in (math.inf, -0.0, 1e-45):
        torch.testing.assert_close(many(X + 1, f=f), (X + 1) * f, equal_nan=True)
    assert many(X, f=math.nan).isnan().all()


CALL = """
import torch, jitkern, jitkern.ops
from jitkern.runtime import binding, linker, slot
assert jitkern.ops.vec_add(torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
linker.settle()
before = [known.misses for known in slot.SLOTS]
assert jitkern.ops.vec_add(torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
after = [known.misses for known in slot.SLOTS]
stats = jitkern.stats()
served = any(known.known and known.number is not None for known in slot.SLOTS) and after == before
print(binding.runtime() is not None, served, stats["compiles"], stats["stubs"])
"""
PYTHON, LINKED = "False False", "True True"  # who served the second call


def test_a_process_that_starts_before_the_runtime_exists_builds_it_for_itself_and_the_next(
    run_python,
):
    first, second, third = (run_python(CALL) for _ in range(3))
    assert first.stdout.startswith(f"{LINKED} 1 "), first.stderr
    assert second.stdout == f"{LINKED} 0 0\n", second.stderr
    assert third.stdout == f"{LINKED} 0 0\n", third.stderr
    assert first.stderr + second.stderr + third.stderr == ""


def test_without_a_c_compiler_the_python_launcher_serves_and_says_so_once(run_python):
    assert run_python(CALL, CC="/nonexistent").returncode == 0  # c++ compiles the kernel
    done = run_python(CALL, CC="/nonexistent")
    assert done.stdout == f"{PYTHON} 0 0\n"
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "no C compiler" in done.stderr


def test_a_runtime_without_a_c_compiler_for_stubs_says_so_once(with_runtime):
    code = CALL + "jitkern.ops.vec_add(torch.ones(2, 2), torch.ones(2, 2)); linker.settle()\n"
    done = with_runtime(code, CC="/nonexistent")
    assert done.stdout == "True False 0 0\n", done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "no C compiler" in done.stderr


def test_compiling_off_and_no_stub_cached_the_python_launcher_serves(with_runtime):
    done = with_runtime(CALL, JITKERN_COMPILE="never")
    assert (done.stdout, done.stderr) == ("True False 0 0\n", "")


def test_compiling_off_and_no_runtime_cached_the_python_launcher_serves(run_python):
    assert run_python(CALL, CC="/nonexistent").returncode == 0
    done = run_python(CALL, JITKERN_COMPILE="never")
    assert (done.stdout, done.stderr) == (f"{PYTHON} 0 0\n", "")


def damage(cache_dir, pattern, how):
    (found,) = cache_dir.glob(f"v1/cpu-*/{pattern}/*.so")
    found.chmod(0o600)
    found.write_bytes(how(found.read_bytes()))


def overwritten(data):
    return data[:64] + bytes(len(data) - 64)


DAMAGE = pytest.mark.parametrize(
    ("how", "verify"),
    [(lambda data: data[:100], "always"), (lambda data: b"", "size"), (overwritten, "always"), (overwritten, "size")],
    ids=["cut short", "empty", "overwritten", "overwritten and not verified"],
)  # fmt: skip


@DAMAGE
def test_a_damaged_stub_is_a_miss_and_is_rebuilt(with_runtime, cache_dir, how, verify):
    assert with_runtime(CALL).stdout == f"{LINKED} 0 1\n"
    damage(cache_dir, "vec_add.stub.*", how)
    done = with_runtime(CALL, JITKERN_VERIFY=verify)
    assert done.stdout == f"{LINKED} 0 1\n", done.stderr
    assert with_runtime(CALL).stdout == f"{LINKED} 0 0\n"


@DAMAGE
def test_a_damaged_runtime_is_a_miss_and_is_rebuilt(with_runtime, cache_dir, how, verify):
    damage(cache_dir, "runtime-*", how)
    done = with_runtime(CALL, JITKERN_VERIFY=verify)
    assert done.stdout.startswith(LINKED), done.stderr
    assert with_runtime(CALL).stdout.startswith(LINKED)
