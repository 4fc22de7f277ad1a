"""`--shard auto`: the shard of a process, by the variables of the engine that started it."""

from __future__ import annotations

import pytest

import jitkern
from jitkern import testing
from jitkern.errors import SettingError
from jitkern.prewarming.shards import ENGINES, announced


def array(number, count, first, last, step=1):
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    values = (number, count, first, last, step)
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in zip(names, values)}


SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}  # of a job, which is no step: one process
POD = {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "8"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "part", "parts", "engine"),
    [
        (array(1, 4, 1, 4), 1, 4, "Slurm array"),
        (array(4, 4, 1, 4), 4, 4, "Slurm array"),
        (array(0, 4, 0, 3), 1, 4, "Slurm array"),
        (array(3, 4, 0, 3), 4, 4, "Slurm array"),
        (array(6, 4, 0, 6, 2), 4, 4, "Slurm array"),
        (array(6, 3, 2, 7, 2), 3, 3, "Slurm array"),
        (array(7, 1, 7, 7), 1, 1, "Slurm array"),
        ({**array(2, 3, 1, 3), **SRUN}, 2, 3, "Slurm array"),
        ({**array(1, 1, 1, 1), **SRUN}, 2, 2, "srun"),
        (POD, 1, 8, "Kubernetes indexed Job"),
        ({**POD, **TORCHRUN}, 1, 8, "Kubernetes indexed Job"),
        ({"JOB_COMPLETION_INDEX": "0", **TORCHRUN}, 6, 8, "torchrun"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "2", "AWS_BATCH_JOB_ARRAY_SIZE": "5"}, 3, 5, "AWS Batch array"),
        ({"CLOUD_RUN_TASK_INDEX": "9", "CLOUD_RUN_TASK_COUNT": "10"}, 10, 10, "Cloud Run job"),
        ({"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "3"}, 1, 3, "Google Batch"),
        ({"BUILDKITE_PARALLEL_JOB": "1", "BUILDKITE_PARALLEL_JOB_COUNT": "2"}, 2, 2, "Buildkite"),
        ({"CI_NODE_INDEX": "1", "CI_NODE_TOTAL": "3"}, 1, 3, "GitLab CI"),
        ({"CI_NODE_INDEX": "3", "CI_NODE_TOTAL": "3"}, 3, 3, "GitLab CI"),
        (TORCHRUN, 6, 8, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1, 1, "torchrun"),
        ({**TORCHRUN, **SRUN}, 6, 8, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 2, 2, "Open MPI"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", **SRUN}, 1, 2, "PMI"),
        (SRUN, 2, 2, "srun"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1, 1, "srun"),
    ],
)  # fmt: skip
def test_an_engine_numbers_its_processes(environ, part, parts, engine):
    assert announced(environ) == (part, parts, engine)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "no job system numbers this process"),
        (SCRIPT, "no job system numbers this process"),
        (
            {"CI_NODE_TOTAL": "1"},
            "no job system numbers this process",
        ),  # GitLab without `parallel:`
        ({"RANK": "", "WORLD_SIZE": ""}, "no job system numbers this process"),
        (array(5, 2, 5, 9), "submit an array without gaps, as in `sbatch --array=0-1`"),
        (array(9, 2, 5, 9), "has 2 tasks from 5 to 9 with gaps"),
        (array(1, 4, 1, 7), "has 4 tasks from 1 to 7 with gaps"),
        ({**array(5, 2, 5, 9), **SRUN}, "with gaps"),
        (array(1, 4, 0, 6, 2), "SLURM_ARRAY_TASK_ID=1 is not one of the 4 processes"),
        (array(1, 2, 1, 2, 0), "with gaps"),
        ({**array(1, 2, 1, 2), "SLURM_ARRAY_TASK_MIN": "one"}, "SLURM_ARRAY_TASK_MIN=`one`"),
        ({"JOB_COMPLETION_INDEX": "3"}, 'env: [{name: JOB_COMPLETIONS, value: "8"}]'),
        ({"JOB_COMPLETION_INDEX": "8", "JOB_COMPLETIONS": "8"}, "is not one of the 8 processes"),
        ({"CI_NODE_INDEX": "0", "CI_NODE_TOTAL": "3"}, "numbered from 1"),
        ({"RANK": "0"}, "WORLD_SIZE does not say of how many"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=`-1` of torchrun is not a number"),
        ({"RANK": "\u0663", "WORLD_SIZE": "4"}, "is not a number"),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, "is not one of the 0 processes"),
    ],
)
def test_what_cannot_be_counted_is_refused(environ, says):
    with pytest.raises(SettingError) as e:
        announced(environ)
    assert says in str(e.value) and "--shard auto" in str(e.value)


def test_without_an_engine_all_variables_are_named():
    with pytest.raises(SettingError) as e:
        announced({})
    for engine in ENGINES:
        assert engine.number in str(e.value) and engine.of in str(e.value)
    assert "as in --shard 1/4" in str(e.value)


@pytest.fixture
def environment(monkeypatch):
    """Set variables of this process, and have the settings read anew."""
    for engine in ENGINES:
        monkeypatch.delenv(engine.number, raising=False)

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        testing.set_settings(monkeypatch)

    return put


def test_the_command_says_its_part_and_exits_2_without_one(cli, environment):
    environment({})
    code, out, err = cli("prewarm", "vec_add", "--shard", "auto")
    assert (code, out, "no job system numbers this process" in err) == (2, "", True)
    environment(array(5, 2, 5, 9))
    code, out, err = cli("prewarm", "vec_add", "--shard", "auto")
    assert (code, out, "without gaps" in err) == (2, "", True)


@pytest.mark.long
def test_the_shards_of_an_array_are_the_whole(cli, environment, cache_dir):
    built = 0
    for number in (0, 2):
        environment(array(number, 2, 0, 2, 2))
        code, out, err = cli("prewarm", "vec_add", "--shard", "auto")
        assert code == 0 and f"part {number // 2 + 1} of 2, by the variables of Slurm array" in err
        built += int(out.splitlines()[-1].split()[0])
    results = jitkern.prewarm(["jitkern::vec_add"])
    assert {result.status for result in results} == {"hit"} and built == len(results)
    environment(array(0, 1, 0, 0))
    assert {r.status for r in jitkern.prewarm(["jitkern::vec_add"], shard="auto")} == {"hit"}
    with pytest.raises(SettingError, match="neither"):
        jitkern.prewarm(["jitkern::vec_add"], shard="2/3")
