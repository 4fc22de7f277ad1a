"""How many compilers run at once."""

import threading

import pytest

from jitkern import config
from jitkern.compilers import jobs


@pytest.mark.parametrize(
    ("settings", "named", "expected"),
    [({"jobs": 3}, {}, 3), ({"jobs": 3}, {"MAX_JOBS": "5"}, 3), ({}, {"MAX_JOBS": "5"}, 5)],
    ids=["setting", "setting first", "MAX_JOBS"],
)
def test_what_is_asked_for_goes_before_what_the_machine_has(settings, named, expected):
    with config.using(environment=named, **settings):
        assert jobs.limit() == expected


@pytest.mark.parametrize(("gigabytes", "expected"), [(1, 1), (5, 2), (1000, 4), (0, 4)])
def test_memory_and_cores_are_the_limit(monkeypatch, gigabytes, expected):
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(jobs, "free_memory", lambda: gigabytes << 30)
    with config.using(environment={"MAX_JOBS": "many"}):
        assert jobs.limit() == expected


@pytest.mark.parametrize(
    ("available", "share", "expected"),
    [("MemAvailable: 8 kB", "", 8192), ("MemAvailable: 8 kB", "max\n", 8192), ("MemAvailable: 8 kB", "4096\n", 4096), ("", "", 0)],
)  # fmt: skip
def test_a_containers_share_of_the_memory_counts(monkeypatch, available, share, expected):
    texts = {"/proc/meminfo": available, "/sys/fs/cgroup/memory.max": share}
    monkeypatch.setattr(jobs, "_text", texts.__getitem__)
    assert jobs.free_memory() == expected


def test_a_build_that_is_over_waits_for_no_place():
    over = threading.Event()
    with config.using(jobs=1), jobs.place(over) as first:
        over.set()
        with jobs.place(over) as second:
            assert (first, second) == (1, 0)


def test_a_fork_holds_no_place(run_python):
    code = """
import os, threading
from jitkern import config
from jitkern.compilers import jobs
with config.using(jobs=1), jobs.place(threading.Event()):
    pid = os.fork()
    if not pid:
        with jobs.place(threading.Event()) as taken:
            os._exit(taken)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
