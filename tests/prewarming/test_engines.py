"""Real engines: Slurm on one node, Dask, Ray and torchrun. The union is the whole, and a second prewarm builds 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from fleet_packages import DIES_ONCE, places
from helpers import last_json

pytestmark = pytest.mark.long
needs_slurm = pytest.mark.skipif(bool(slurm.lacking()), reason=slurm.lacking())
DRIVER = """
import os, sys
os.environ["DRIVER"] = str(os.getpid())  # this process is none of the workers
from jitkern.cli import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
JITKERN = str(Path(sys.executable).with_name("jitkern"))


@pytest.fixture(scope="module")
def node():
    with slurm.slurm() as environment:
        yield environment


@pytest.fixture
def run(tmp_path):
    """Run a command, which must succeed, where packages are found; returns stdout and stderr."""

    def run(*command, code=0, **environment):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500,
            env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
        )  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    return run


def nothing_is_left(run, name, cache_dir, tmp_path):
    """What is in the cache is all that a prewarm in one process builds."""
    again = last_json(run(JITKERN, "prewarm", name, "--json")[0])
    assert (again["built"], again["failed"], again["skipped"]) == (0, 0, 0)
    alone = tmp_path / "alone"
    run(JITKERN, "prewarm", name, "--json", "--cache-dir", str(alone))
    assert places(alone) == places(cache_dir)


@pytest.mark.parametrize(
    "engine", ["processes:2", "dask", "ray", pytest.param("slurm", marks=needs_slurm)]
)
@pytest.mark.parametrize("before", ["", DIES_ONCE], ids=["", "a worker dies once"])
def test_an_engine_builds_the_whole_and_then_nothing(
    engine, before, fleet_package, run, cache_dir, tmp_path, request
):
    for module in {"dask": ["distributed"], "ray": ["ray"], "slurm": ["submitit"]}.get(engine, []):
        pytest.importorskip(module)
    environment = request.getfixturevalue("node") if engine == "slurm" else {}
    name = fleet_package(before)
    command = [
        sys.executable, "-c", DRIVER, "prewarm", name, "--engine", engine, "--parts", "3", "--json", "-v",
    ]  # fmt: skip
    out, err = run(*command, **environment)
    report = last_json(out)
    assert (report["failed"], report["skipped"]) == (0, 0) and report["built"] > 3, err
    assert (tmp_path / name / "died").exists() == bool(before)
    assert report["built"] == len(places(cache_dir))
    out, err = run(*command, **environment)
    assert (last_json(out)["built"], last_json(out)["hits"]) == (0, report["built"]), err
    nothing_is_left(run, name, cache_dir, tmp_path)
    assert not [*tmp_path.glob("jitkern-slurm-*")]


@needs_slurm
@pytest.mark.parametrize(("array", "tasks"), [("0-3", 4), ("1-2", 2), ("0-6:3", 3)])
def test_the_tasks_of_an_array_build_the_whole(
    array, tasks, fleet_package, run, node, cache_dir, tmp_path
):
    name = fleet_package()
    line = f"{JITKERN} prewarm {name} --shard auto"
    run("sbatch", "--wait", f"--array={array}", "--output=%a.txt", "--wrap", line, **node)
    said = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert sorted(text.split(",")[0] for text in said) == [
        f"jitkern: part {part + 1} of {tasks}" for part in range(tasks)
    ]
    nothing_is_left(run, name, cache_dir, tmp_path)


@needs_slurm
def test_an_array_with_gaps_is_refused(fleet_package, run, node, cache_dir, tmp_path):
    line = f"{JITKERN} prewarm {fleet_package()} --shard auto"
    run("sbatch", "--wait", "--array=5,9", "--output=%a.txt", "--wrap", line, code=2, **node)
    for task in (5, 9):
        assert (
            "submit an array without gaps, as in `sbatch --array=0-1`"
            in (tmp_path / f"{task}.txt").read_text()
        )
    assert places(cache_dir) == []


@needs_slurm
def test_the_processes_of_srun_build_the_whole(fleet_package, run, node, cache_dir, tmp_path):
    name = fleet_package()
    _, err = run("srun", "--ntasks=2", JITKERN, "prewarm", name, "--shard", "auto", **node)
    assert "part 1 of 2, by the variables of srun" in err and "part 2 of 2" in err
    nothing_is_left(run, name, cache_dir, tmp_path)
    # The script of a job is one process, whatever number of tasks the job may have.
    line = f"{JITKERN} prewarm {name} --shard auto"
    run("sbatch", "--wait", "--ntasks=2", "--output=out.txt", "--wrap", line, code=2, **node)
    assert "no job system numbers this process" in (tmp_path / "out.txt").read_text()


def test_the_ranks_of_torchrun_build_the_whole(fleet_package, run, cache_dir, tmp_path):
    name = fleet_package()
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        "--no-python",
    )
    _, err = run(*torchrun, JITKERN, "prewarm", name, "--shard", "auto")
    assert all(f"part {part} of 3, by the variables of torchrun" in err for part in (1, 2, 3))
    nothing_is_left(run, name, cache_dir, tmp_path)
