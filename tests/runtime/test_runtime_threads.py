"""Threads and forks in the launch runtime."""

import random
import sys
import threading

import pytest
import torch
from calls_of_ops import WAYS, X, misses, through, warmed
from helpers import LONGEST, programs_of, run_threads

from jitkern.runtime import binding, specializer

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
def appended(monkeypatch):
    """The slots to which a program was appended, in order."""
    slots, append = [], binding.Runtime.append
    monkeypatch.setattr(
        binding.Runtime,
        "append",
        lambda self, slot, *rest: slots.append(slot) or append(self, slot, *rest),
    )
    return slots


@pytest.mark.long
def test_eight_threads_make_each_program_once(scale, square, appended):
    plain, differentiable = scale(), square()

    def work(seed):
        chance = random.Random(seed)
        for _ in range(40):
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
    specializer.settle()
    for op in (plain, differentiable):
        known = programs_of(op)
        assert 0 < appended.count(known.number) == len(known.known)
        assert not known.refused


def test_another_threads_program_has_rejected_no_earlier_call(scale):
    """A thread misses, and waits as it enters Python, while the program of another thread is appended."""
    op, in_python, appended = scale(), threading.Event(), threading.Event()
    builtin = torch._C._jit_get_operation(op.name)[0]

    def wait(frame, event, _):
        if event == "call" and frame.f_code.co_name == "_run_on":
            sys.setprofile(None)
            in_python.set()
            appended.wait(LONGEST)

    def early():
        sys.setprofile(wait)
        assert torch.equal(builtin(X, 2.0), 2 * X)

    def late():
        in_python.wait(LONGEST)
        op(X, 2.0)
        specializer.settle()
        appended.set()

    run_threads(early, late)
    specializer.settle()
    assert programs_of(op).known and not programs_of(op).refused
    before = misses(op)
    op(X, 3.0)
    assert misses(op) == before


@pytest.mark.long
def test_a_hit_runs_no_python(many):
    warmed(many, X, X, 4)
    builtin = torch._C._jit_get_operation(many.name)[0]
    called = []
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
    try:
        builtin(X, X, 4)
    finally:
        sys.setprofile(None)
    assert called == []


@pytest.mark.long
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
    run_threads(*(lambda result=result: call(result, entered, LONGEST) for result in results))
    assert misses(op) == before
    assert [result.item() for result in results] == [1, 1]


FORK = """
import os, signal, torch, jitkern.ops
from jitkern.runtime import binding, specializer, programs
assert binding.runtime()
vec_add = jitkern.ops.vec_add
known = vec_add.programs["cpu"]
def computes(*tensors):
    for x in tensors:
        assert torch.equal(vec_add(x, x), 2 * x), x
def serves(*tensors):
    computes(*tensors)
    specializer.settle()
    before = known.misses
    computes(*tensors)
    assert known.misses == before
old, new = torch.ones(3), torch.ones(2, 3, dtype=torch.float64)
{before}
pid = os.fork()
signal.alarm(250)  # what hangs is killed, and this test fails
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


@pytest.mark.long
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
