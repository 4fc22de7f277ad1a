"""`prewarm --executor`: Dask and Ray for real, how executors end, and names of none."""

import os
import signal
import subprocess
import sys

import pytest
from fleet_packages import DIES_ONCE, places
from helpers import LONGEST, alive, last_json, until
from test_shipping import OF_RAY, needs_ray, recipe

DRIVER = """
import os, signal, sys
os.environ["DRIVER"] = str(os.getpid())  # this process is none of the workers
from jitkern.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
"""
KINDS = [
    pytest.param("with_dask:executor", id="dask"),
    pytest.param("with_ray:Ray", id="ray", marks=needs_ray),
]


@pytest.fixture
def driver(tmp_path):
    """Begin the command in a process and a group of its own, beside the page's files."""
    for kind in ("dask", "ray"):
        (tmp_path / f"with_{kind}.py").write_text(recipe(f"with_{kind}.py"))

    def begun(*arguments):
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DRIVER, "prewarm", *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, **OF_RAY},
        )  # fmt: skip

    return begun


@pytest.mark.long
@pytest.mark.parametrize("executor", KINDS)
def test_a_part_whose_worker_dies_is_built_by_another(
    executor, driver, fleet_package, cli, cache_dir, tmp_path
):
    name = fleet_package(DIES_ONCE)
    process = driver(name, "--executor", executor, "--parts", "3", "--json")
    out, err = process.communicate(timeout=LONGEST)
    report = last_json(out)
    assert (report["failed"], report["skipped"]) == (0, 0) and report["built"] > 3, err
    assert (tmp_path / name / "died").exists()
    assert report["built"] == len(places(cache_dir))
    again = last_json(cli("prewarm", name, "--json")[1])
    assert (again["built"], again["hits"]) == (0, report["built"])


@pytest.mark.long
@pytest.mark.parametrize("executor", KINDS)
def test_a_ctrl_c_ends_the_workers(executor, driver, fleet_package, tmp_path):
    waits = "import time; (HERE / f'pid-{os.getpid()}').touch(); time.sleep(600)"
    name = fleet_package(f"if AWAY: {waits}")
    process = driver(name, "--executor", executor, "--parts", "2")
    until(lambda: len([*(tmp_path / name).glob("pid-*")]) == 2, of=[process])
    pids = [int(path.name[4:]) for path in (tmp_path / name).glob("pid-*")]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, "interrupted" in err) == (130, True), err
    until(lambda: not any(map(alive, pids)))


@pytest.mark.long
def test_a_dead_pool_is_an_error_with_a_reason(cli, fleet_package):
    """The pool of the standard library takes no more tasks after the death of a process."""
    name = fleet_package("if AWAY: os.kill(os.getpid(), 9)")
    code, out, err = cli("prewarm", name, "--executor", "pools:spawned", "--json", "--keep-going")
    reasons = {row["reason"] for row in last_json(out)["results"] if row["status"] == "failed"}
    assert code == 1 and reasons and all("BrokenProcessPool" in reason for reason in reasons), err


@pytest.mark.long
def test_a_context_manager_is_entered_for_a_miss_and_left(cli, fleet_package, tmp_path):
    name = fleet_package()
    code, out, err = cli("prewarm", name, "--executor", "pools:told", "--json")
    assert (code, last_json(out)["failed"]) == (0, 0) and last_json(out)["built"] > 3, err
    (tmp_path / "begun").unlink()
    assert (tmp_path / "ended").exists()
    again = last_json(cli("prewarm", name, "--executor", "pools:told", "--json")[1])
    assert (again["built"], again["hits"]) == (0, last_json(out)["built"])
    assert not (tmp_path / "begun").exists()  # there was nothing to build


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("dask", 2, "`dask` names no function: expected MODULE:FACTORY, as in `cluster:executor`"),
        ("pools:", 2, "names no function"),
        (":none", 2, "names no function"),
        ("", 2, "names no function"),
        ("absent_module:none", 2, "absent_module cannot be imported: ModuleNotFoundError"),
        ("pools.none:none", 2, "pools.none cannot be imported"),
        (".pools:none", 2, ".pools cannot be imported"),
        ("broken:none", 2, "broken.py:2: ValueError: 7"),
        ("leaving:none", 2, "leaving cannot be imported"),
        ("pools:spawn", 2, "`spawn` is not there; did you mean spawned? Define it in"),
        ("pools:number", 2, "`number` is no function; define it in"),
        ("pools:none", 2, "returned None, which is no executor"),
        ("pools:kind", 2, "returned <class 'concurrent.futures.thread.ThreadPoolExecutor'>, which"),
        ("pools:raising", 1, "`pools:raising` failed: "),
        ("pools:Bare.submit", 2, "`Bare.submit` is not there"),
    ],
)
def test_what_names_no_executor_is_an_error(cli, fleet_package, tmp_path, text, code, says):
    (tmp_path / "broken.py").write_text("\nraise ValueError(7)\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    found, out, err = cli("prewarm", fleet_package(), "--executor", text)
    assert (found, out, says in err, "Traceback" in err) == (code, "", True, False), err


def test_the_options_of_executors_need_one(cli):
    assert "--parts is for --executor" in cli("prewarm", "vec_add", "--parts", "3")[2]
    code, _, err = cli("prewarm", "vec_add", "--executor", "pools:spawned", "--refresh")
    assert (code, "--refresh is not for --executor" in err) == (2, True)
