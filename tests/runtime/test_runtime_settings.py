"""Settings, bounds and damage in the launch runtime."""

import asyncio
import logging
import math
import re
import threading

import pytest
import torch
from calls_of_ops import MANY, SCALE, X, misses, warmed
from helpers import programs_of, served

from jitkern import config
from jitkern.calls import record, signature
from jitkern.errors import CacheError, NotCached
from jitkern.runtime import binding, records, specializer


def test_a_block_that_prefers_another_kind_runs_in_python(scale):
    op = warmed(scale(), X)
    before = misses(op)
    with config.using(prefer="nvrtc"):
        for calls in (1, 2):
            assert torch.equal(op(X), 2 * X)
            specializer.settle()
            assert misses(op) == before + calls
        with config.using(prefer="cc"):
            assert torch.equal(op(X), 2 * X)
    with config.using(prefer=""):
        assert torch.equal(op(X), 2 * X)
    assert misses(op) == before + 3


def test_a_block_of_another_thread_sends_all_calls_to_python(scale):
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
    assert misses(op) == before + 1
    done.set()
    thread.join()
    before = misses(op)
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before


def test_a_block_that_ends_in_another_thread_is_over(scale):
    op = warmed(scale(), X)
    block = config.using(prefer="nvrtc")
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join()
    assert not config.c_may_serve()
    block.__exit__(None, None, None)
    assert config.c_may_serve()
    before = misses(op)
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before


@pytest.mark.long
def test_calls_of_programs_are_recorded_in_a_recording_block(scale, tmp_path):
    op = warmed(scale(), X)
    before = misses(op)
    with config.using(record=tmp_path / "calls"):
        for _ in range(3):
            assert torch.equal(op(X), 2 * X)
        specializer.settle()
    assert misses(op) == before + 3, "every call came to Python"
    assert [call.op for call in record.read(tmp_path / "calls")] == [op.name]
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before + 3


def test_tasks_of_one_thread_have_preferences_of_their_own(scale):
    op = warmed(scale(), X)

    async def prefers():
        with config.using(prefer="nvrtc"):
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
    before = misses(op)
    assert torch.equal(op(X), 2 * X)
    assert misses(op) == before


PROGRAMS = int(re.search(r"PROGRAMS = (\d+)", binding.variant().source.text)[1])


@pytest.mark.long
def test_past_the_bound_the_oldest_goes_with_one_warning(declare, caplog, monkeypatch):
    monkeypatch.setattr(records, "TRACES", 2 * PROGRAMS)

    def launch(k, x):
        hash(x.shape[0])  # a constant of each program
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype}](out, x, 2.0, x.numel())
        return out

    op = declare("(Tensor x) -> Tensor", SCALE, launch)
    xs = [torch.ones(n) for n in range(1, PROGRAMS + 6)]
    for x in (*xs, xs[0], xs[-1]):
        assert torch.equal(op(x), 2 * x)
        specializer.settle()
    before = misses(op)
    for x in (xs[0], xs[-1]):
        assert torch.equal(op(x), 2 * x)
    assert misses(op) == before
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "as many programs as it may have" in said[0]
    assert "size(0) of `x`" in said[0]


@pytest.mark.long
def test_what_was_refused_while_off_is_compiled_later(scale):
    op = scale()
    op(X.double())  # compiles both kernels
    other = scale()
    with config.using(compile="never"), pytest.raises(NotCached):
        other(X)
    op(X)
    specializer.settle()
    with config.using(compile="never"):
        op(torch.ones(1, 2, 3))  # its kernel is cached, and its stub is not
    specializer.settle()  # it was asked for where compiling was off
    warmed(op, torch.ones(1, 2, 3))


@pytest.mark.long
def test_the_most_arguments_and_results_are_served(declare):
    def launch(k, *xs):
        outs = [torch.empty_like(x) for x in xs[: signature.MAX_RETURNS]]
        for i, out in enumerate(outs):
            k.many(out, xs[i], xs[-1 - i], 1.0, 0, out.numel())
        return tuple(outs)

    parameters = ", ".join(f"Tensor x{i}" for i in range(signature.MAX_ARGUMENTS))
    returns = ", ".join(["Tensor"] * signature.MAX_RETURNS)
    op = declare(f"({parameters}) -> ({returns})", MANY, launch)
    xs = [torch.full((3,), float(i)) for i in range(signature.MAX_ARGUMENTS)]
    warmed(op, *xs)
    assert [out.tolist() for out in op(*xs)] == [[31.0] * 3] * signature.MAX_RETURNS


@pytest.mark.long
def test_numbers_at_the_edge_of_their_types_are_passed_whole(many):
    warmed(many, X, f=2.0, k=1)
    for k in (-(2**62), 2**62, 0, -1):
        assert torch.equal(many(X, k=k), X + torch.tensor(float(k)))
    for f in (math.inf, -0.0, 1e-45):
        torch.testing.assert_close(many(X + 1, f=f), (X + 1) * f, equal_nan=True)
    assert many(X, f=math.nan).isnan().all()


CALL = """
import torch, jitkern, jitkern.ops
from jitkern.runtime import binding, specializer, programs
assert jitkern.ops.vec_add(torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
specializer.settle()
before = [known.misses for known in programs.SLOTS]
assert jitkern.ops.vec_add(torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
after = [known.misses for known in programs.SLOTS]
stats = jitkern.stats()
served = any(known.known and known.number is not None for known in programs.SLOTS) and after == before
print(binding.runtime() is not None, served, stats["compiles"], stats["runtimes"])
"""
PYTHON, LINKED = "False False", "True True"  # who served the second call


@pytest.mark.long
@pytest.mark.parametrize("environment", [{"CC": "/nonexistent"}, {"JITKERN_COMPILE": "never"}])
def test_a_cached_runtime_serves_calls_that_nobody_prepared(with_runtime, environment):
    done = with_runtime(CALL, **environment)
    assert (done.stdout, done.stderr) == (f"{LINKED} 0 0\n", "")


@pytest.mark.long
def test_without_runtime_and_compiling_off_python_launches(run_python):
    assert run_python(CALL, CC="/nonexistent").returncode == 0
    done = run_python(CALL, JITKERN_COMPILE="never")
    assert (done.stdout, done.stderr) == (f"{PYTHON} 0 0\n", "")


def branching(k, x):
    out = torch.empty_like(x)
    if x.numel() > 64:
        return x + x  # which cannot be traced
    k.scale[{"T": x.dtype}](out, x, 2.0, x.numel())
    return out


@pytest.mark.long
def test_calls_that_no_program_serves_keep_none_from_others(declare):
    op = declare("(Tensor x) -> Tensor", SCALE, branching)
    for size in range(100, 110):
        op(torch.ones(size))
        specializer.settle()
    assert programs_of(op).refused
    served(op, torch.ones(3))
    assert not programs_of(op).refused


def test_traces_that_fail_are_tried_ever_less_often(declare, monkeypatch):
    op = declare("(Tensor x, int n) -> Tensor", SCALE, lambda k, x, n: x + x)
    tried = []
    trace = specializer.trace
    monkeypatch.setattr(specializer, "trace", lambda *args: tried.append(args) or trace(*args))
    for n in range(1000):
        op(X, n)
    assert 5 < len(tried) <= 10


@pytest.mark.long
@pytest.mark.parametrize(
    "error", [CacheError("no space is left"), OSError(28, "No space left on device")], ids=repr
)
def test_a_trace_that_failed_for_another_reason_is_tried_again(scale, monkeypatch, error):
    def fails(*_):
        raise error

    op = scale()
    with monkeypatch.context() as full:
        full.setattr(specializer, "trace", fails)
        for _ in range(10):
            assert torch.equal(op(X), 2 * X)
    assert not programs_of(op).known
    served(op, X)
    assert not programs_of(op).refused
