"""Work beside the calls: how much at once, what an error and a fork do to it."""

import os
import sys
import threading

import pytest
from helpers import LONGEST

from jitkern.config import background
from jitkern.config.background import WorkQueue


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(background, "QUEUES", [])
    return WorkQueue


def test_a_queue_has_no_more_threads_than_it_may(make):
    queue, gate, inside, most = make("queue", 3), threading.Event(), [], []

    def work():
        inside.append(1)
        most.append(len(inside))
        gate.wait(LONGEST)
        inside.pop()

    assert [queue.later(work) for _ in range(20)] == [True] * 20
    assert not queue.settle(0.05)
    gate.set()
    assert queue.settle(LONGEST)
    assert (max(most), len(most)) == (3, 20)
    assert "queue" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_error_is_logged_and_ends_no_other_work(make, caplog, error):
    queue, done = make("queue"), []

    def fail():
        raise error("oops")

    queue.later(fail)
    queue.later(lambda: done.append(1))
    assert queue.settle(LONGEST) and done == [1]
    assert "queue: work in the background failed" in caplog.text and "oops" in caplog.text


def test_without_threads_nothing_waits_for_ever(make, monkeypatch):
    queue = make("queue")

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert not queue.later(sys.exit)
        with background.overdue(0.0, sys.exit):
            pass
    assert queue.settle(LONGEST) and queue.later(lambda: None) and queue.settle(LONGEST)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_none_of_the_work_of_its_parent(make):
    queue, gate, done = make("queue"), threading.Event(), []
    queue.later(lambda: gate.wait(LONGEST))
    queue.later(lambda: done.append(1))
    child = os.fork()
    if not child:
        empty = queue.settle(0.0)
        queue.later(lambda: done.append(2))
        os._exit(0 if empty and queue.settle(LONGEST) and done == [2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    assert queue.settle(LONGEST) and done == [1]


@pytest.mark.long
def test_a_process_ends_after_kernels_in_the_background(run_python, tmp_path):
    code = (
        "import torch, jitkern.ops\nprint(jitkern.ops.vec_add(torch.ones(1), torch.ones(1)).item())"
    )
    done = run_python(code, JITKERN_COMPILE="background", JITKERN_CACHE_DIR=str(tmp_path / "cache"))
    assert done.stdout == "2.0\n" and "runs its PyTorch reference" in done.stderr
    assert [*tmp_path.glob("cache/v1/*/vec_add.*/*.so")]
