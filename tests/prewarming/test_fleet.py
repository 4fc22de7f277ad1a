"""Prewarming in the workers of an executor: the parts together are the whole, and none is built twice."""

import multiprocessing
import os
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fleet_packages import places
from helpers import last_json, needs_runtime

import jitkern
from jitkern import config, jit
from jitkern.calls import record
from jitkern.errors import SettingError
from jitkern.op.op import OPS
from jitkern.prewarming import jobs, workers
from jitkern.prewarming.op_calls import spelt_calls
from jitkern.target import Target

pytestmark = needs_runtime


def rows(report):
    return sorted((r["op"], r["variant"], Path(r["path"]).name) for r in report["results"])


def refuse(*_, **__):
    raise AssertionError("there is nothing to do")


@pytest.mark.long
def test_processes_build_the_whole_and_a_second_prewarm_nothing(
    cli, fleet_package, cache_dir, tmp_path, monkeypatch
):
    name = fleet_package()
    fleet = ("--executor", "pools:spawned", "--parts", "3")
    code, out, err = cli("prewarm", name, *fleet, "--json", "-v")
    report = last_json(out)
    assert (code, report["failed"], report["skipped"]) == (0, 0, 0), err
    assert sum(" of 3" in line or "/3] part " in line for line in err.splitlines()) == 3, err
    assert all(Path(row["path"]).is_relative_to(cache_dir) for row in report["results"])
    alone = last_json(cli("prewarm", name, "--json", "--cache-dir", str(tmp_path / "alone"))[1])
    assert (rows(report), places(cache_dir)) == (rows(alone), places(tmp_path / "alone"))
    assert report["built"] == alone["built"] == len(places(cache_dir))
    monkeypatch.setattr(jit.build, "build", refuse)
    for more in (("--executor", "pools:raising"), ()):  # which is not called
        code, out, err = cli("prewarm", name, *more, "--json")
        again = last_json(out)
        assert (code, again["built"], again["hits"]) == (0, 0, report["built"]), err
        assert rows(again) == rows(report)


BREAKS = """
if AWAY:
    if (HERE / "tried").exists():  # the next part, which begins before the driver knows of this one
        import time
        while not (HERE / "cancelled").exists():
            time.sleep(0.01)
    (HERE / "tried").touch()
    raise RuntimeError("broken here")
"""


@pytest.mark.long
def test_without_keep_going_the_rest_is_not_tried(cli, fleet_package, tmp_path, monkeypatch):
    name, cancel = fleet_package(BREAKS), jobs.cancel

    def cancel_and_tell(jobs):
        cancel(jobs)
        (tmp_path / name / "cancelled").touch()

    monkeypatch.setattr(jobs, "cancel", cancel_and_tell)
    code, out, err = cli("prewarm", name, "--executor", "pools:Apart", "--parts", "3", "--json")
    report = last_json(out)
    reasons = {row["reason"] for row in report["results"]}
    assert (code, report["built"]) == (1, 0) and "not tried after a failed build" in str(reasons)
    assert "broken here" in err and f"install the same {name} there" in err


@pytest.mark.long
def test_a_worker_with_other_sources_builds_nothing(cli, fleet_package, cache_dir):
    name = fleet_package(flags="['-DOTHER'] if AWAY else []")
    code, out, err = cli("prewarm", name, "--executor", "pools:one", "--json", "--keep-going")
    assert (code, last_json(out)["built"]) == (1, 0)
    assert not [place for place in places(cache_dir) if name in place]
    assert "is not the op that was to be built: extra flag -DOTHER" in err


class Threads(ThreadPoolExecutor):
    """An executor of this process, which counts."""

    def __init__(self):
        super().__init__(2)
        self.submitted = 0

    def submit(self, *args, **kwargs):
        self.submitted += 1
        return super().submit(*args, **kwargs)


def declared(name):
    sys.path.append(os.getcwd())
    try:
        __import__(f"{name}.kernel")
    finally:
        sys.path.remove(os.getcwd())
    return OPS[f"{name}::f"]


@pytest.mark.long
def test_what_the_cache_has_is_built_by_no_worker(cli, fleet_package, cache_dir):
    name = fleet_package()
    cli("prewarm", name, "--call", "f32[3]")
    before = places(cache_dir)
    with Threads() as executor:
        results = jitkern.prewarm([OPS[f"{name}::f"]], executor=executor, parts=2)
        old = [r for r in results if f"{Path(r.path).parent.name}/{Path(r.path).name}" in before]
        assert {r.status for r in old} == {"hit"} and len(old) == len(before)
        assert {r.status for r in results if r not in old} == {"built"}, results
        assert executor.submitted == 2
        assert {r.status for r in jitkern.prewarm([name], executor=executor)} == {"hit"}
        assert executor.submitted == 2


@pytest.mark.long
def test_calls_and_recordings_are_sent(cli, fleet_package, tmp_path):
    name = fleet_package()
    op = declared(name)
    file = tmp_path / "calls.jsonl"
    with config.using(record=file):
        for size in (4, 5):
            x = torch.ones(size, dtype=torch.float64)
            record.note(op.name, f"{name}.kernel", "cpu", "cc", [x])
    code, out, err = cli("prewarm", name, "--from", str(file), "--executor", "pools:one", "--json")
    built = {row["variant"] for row in last_json(out)["results"] if row["op"] == op.name}
    assert code == 0 and "f64" in built and not built & {"f32", "i32"}, err
    again = last_json(cli("prewarm", name, "--from", str(file), "--json")[1])
    assert again["built"] == 0
    for text, statuses in (("i32[7]", {"built"}), ("i32[7], 1", {"failed"})):
        wanted = spelt_calls(op, [text], ["cpu"])
        with Threads() as executor:
            results = jitkern.prewarm([wanted], executor=executor)
        assert {r.status for r in results if not r.op.endswith("runtime")} == statuses, results
        variants = {r.variant for r in results}
        assert "f64" not in variants and ("i32" in variants or text in results[0].reason)


class Later:
    """What submitit returns: no Future, and lost at first."""

    def __init__(self, future, lost):
        self.future, self.lost = future, lost

    def done(self):
        return self.future.done()

    def cancel(self):
        self.future.cancel()

    def result(self):
        if self.lost:
            raise RuntimeError("the node went away")
        return self.future.result()


class LikeSubmitit:
    def __init__(self, losses):
        self.threads, self.losses, self.jobs = ThreadPoolExecutor(1), losses, 0

    def submit(self, function, /, *args):
        self.jobs += 1
        return Later(self.threads.submit(function, *args), self.jobs <= self.losses)


@pytest.mark.long
@pytest.mark.parametrize(
    ("losses", "jobs", "status"), [(0, 1, "built"), (1, 2, "built"), (2, 2, "failed")]
)
def test_a_lost_job_is_submitted_once_more(fleet_package, losses, jobs, status):
    op, executor = declared(fleet_package()), LikeSubmitit(losses)
    results = jitkern.prewarm([op], executor=executor, parts=1)
    assert (executor.jobs, {r.status for r in results}) == (jobs, {status})
    assert status == "built" or "the node went away" in results[0].reason


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _: None, "returned None"),
        (lambda done: done._replace(results=[]), "results for 0 of"),
        (lambda done: done._replace(bundle=done.bundle[:-600] + b"x" + done.bundle[-599:]), "is refused"),
    ],
    ids=["none", "no results", "a bad bundle"],
)  # fmt: skip
def test_an_executor_of_odd_results_is_an_error(fleet_package, cache_dir, spoil, says):
    class Odd(ThreadPoolExecutor):
        def submit(self, function, /, *args):
            future = Future()
            future.set_result(spoil(super().submit(function, *args).result()))
            return future

    results = jitkern.prewarm([declared(fleet_package())], executor=Odd(1), parts=1)
    assert results and {r.status for r in results} == {"failed"} and says in results[0].reason
    assert says != "is refused" or places(cache_dir) == []


def test_an_executor_takes_no_refresh(fleet_package):
    with Threads() as executor, pytest.raises(SettingError, match="refresh is not for an executor"):
        jitkern.prewarm(executor=executor, refresh=True)


def test_a_daemon_builds_in_its_own_process(monkeypatch):
    """As the workers of Dask are: a daemon may have no children."""

    def process_of(_):
        return os.getpid()

    assert [*workers.results(deque([1]), process_of, 2)] != [(1, os.getpid())]
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert [*workers.results(deque([1]), process_of, 2)] == [(1, os.getpid())]


@pytest.mark.long
def test_an_extension_that_the_cache_has_is_sent_to_nobody(cli):
    target = str(Target.current("cpu"))
    first = last_json(cli("prewarm", "muladd", "--target", target, "--json")[1])
    assert first["built"] >= 1 and first["failed"] == first["skipped"] == 0
    with Threads() as executor:
        results = jitkern.prewarm(["jitkern::muladd"], [target], executor=executor)
    assert ({r.status for r in results}, executor.submitted) == ({"hit"}, 0)
