"""How many compilers run at once."""

import pytest

from jitkern import config
from jitkern.compilers import parallelism


@pytest.mark.parametrize(
    ("settings", "named", "expected"),
    [({"jobs": 3}, {}, 3), ({"jobs": 3}, {"MAX_JOBS": "5"}, 3), ({}, {"MAX_JOBS": "5"}, 5)],
    ids=["setting", "setting first", "MAX_JOBS"],
)
def test_what_is_asked_for_goes_before_what_the_machine_has(settings, named, expected):
    with config.using(environment=named, **settings):
        assert parallelism.limit() == expected


@pytest.mark.parametrize(("gigabytes", "expected"), [(1, 1), (5, 2), (1000, 4), (0, 1), (None, 4)])
def test_memory_and_cores_are_the_limit(monkeypatch, gigabytes, expected):
    monkeypatch.setattr(parallelism, "cores", lambda: 4)
    monkeypatch.setattr(parallelism, "free_memory", lambda: gigabytes and gigabytes << 30)
    with config.using(environment={"MAX_JOBS": "many"}):
        assert parallelism.limit() == expected


V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
MACHINE = {"/proc/meminfo": "MemAvailable: 8 kB"}


@pytest.fixture
def system(monkeypatch):
    """Have the system's files hold this, and no others be there."""

    def have(texts):
        monkeypatch.setattr(parallelism, "text_of", lambda path: texts.get(path, ""))

    return have


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, None),
        (MACHINE, 8192),
        ({**MACHINE, f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5\n"}, 8192),
        ({**MACHINE, f"{V2}/memory.max": "4096\n"}, 4096),
        ({**MACHINE, f"{V2}/memory.max": "4096\n", f"{V2}/memory.current": "4000\n"}, 96),
        ({**MACHINE, f"{V2}/memory.max": "4096\n", f"{V2}/memory.current": "5000\n"}, 0),
        ({f"{V2}/memory.max": "4096\n", f"{V2}/memory.current": "4000\n",
          f"{V2}/memory.stat": "anon 1\ninactive_file 904\n"}, 1000),
        ({**MACHINE, f"{V1}/memory.limit_in_bytes": "4096\n", f"{V1}/memory.usage_in_bytes": "96\n"}, 4000),
        ({**MACHINE, f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, 8192),
    ],
)  # fmt: skip
def test_what_is_left_to_a_container_counts(system, texts, expected):
    system(texts)
    assert parallelism.free_memory() == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, 8),
        ({f"{V2}/cpu.max": "max 100000\n"}, 8),
        ({f"{V2}/cpu.max": "200000 100000\n"}, 2),
        ({f"{V2}/cpu.max": "150000 100000\n"}, 2),
        ({f"{V2}/cpu.max": "10000 100000\n"}, 1),
        ({f"{V2}/cpu.max": "6400000 100000\n"}, 8),
        ({f"{V2}/cpu/cpu.cfs_quota_us": "300000\n", f"{V2}/cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({f"{V2}/cpu/cpu.cfs_quota_us": "-1\n", f"{V2}/cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_the_time_that_a_container_may_use_counts(system, monkeypatch, texts, expected):
    system(texts)
    monkeypatch.setattr(parallelism.os, "sched_getaffinity", lambda _: range(8))
    assert parallelism.cores() == expected


def test_a_build_takes_the_places_that_are_free():
    with config.using(jobs=3), parallelism.places(2) as first, parallelism.places(2) as second:
        assert (first, second) == (2, 1)


def test_a_fork_holds_no_place(run_python):
    code = """
import os
from jitkern import config
from jitkern.compilers import parallelism
with config.using(jobs=1), parallelism.places(1):
    pid = os.fork()
    if not pid:
        with parallelism.places(1) as taken:
            os._exit(taken)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
