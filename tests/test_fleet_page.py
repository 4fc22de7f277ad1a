"""docs/fleet.md, prewarm on many machines: its blocks run, with workers on this machine.

The recipes before are run by remote/test_recipes.py.
"""

from __future__ import annotations

import platform
import re

import pytest
from helpers import REPOSITORY
from test_deploy import project, shell  # noqa: F401  a fixture, among others

PAGE = (REPOSITORY / "docs" / "fleet.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
OF_RAY = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

needs_ray = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="there is no wheel of Ray"
)


def block(language, containing):
    (text,) = (text for kind, text in BLOCKS if kind == language and containing in text)
    return text


def built(out):
    return int(re.findall(r"^(\d+) built, .* 0 failed", out, re.MULTILINE)[-1])


@pytest.fixture
def layered(project, monkeypatch, recorder_cache):  # noqa: F811
    """The project, with what takes longest to build in a layer."""
    monkeypatch.setenv("JITKERN_SYSTEM_CACHE", str(recorder_cache))
    return project


@pytest.mark.long
def test_the_pods_of_a_job_leave_bundles_that_are_the_whole(layered, tmp_path):
    manifest = block("yaml", "completionMode")
    (count,) = {int(n) for n in re.findall(r"(?:completions|parallelism): (\d+)", manifest)}
    script = re.search(r"args:\n +- \|\n((?: {14}.*\n)+)", manifest)[1]
    assert f" + 1))/{count}\n" in script
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    for index in range(count):
        cache = {"JITKERN_CACHE_DIR": str(tmp_path / f"pod-{index}")}
        pod = {"JOB_COMPLETION_INDEX": str(index), **cache}
        shell(script.replace("/bundles", str(bundles)), layered, **pod)
    shell(block("sh", "cache unpack").replace("/bundles", str(bundles)), layered)
    assert built(shell("jitkern prewarm mypkg", layered, JITKERN_COMPILE="never")) == 0


@pytest.mark.long
def test_the_tasks_of_an_array_build_the_whole(layered):
    line = re.search(r"--array=1-(\d+) --wrap '(.*)'", block("sh", "sbatch --wait"))
    count = int(line[1])
    for number in range(1, count + 1):
        task = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": str(count)}
        shell(line[2], layered, **task)
    assert built(shell("jitkern prewarm mypkg", layered, JITKERN_COMPILE="never")) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dask", pytest.param("ray", marks=needs_ray), "submitit"])
def test_an_executor_of_the_page_builds_the_whole(kind, layered):
    """By the command as pip installs it, whose script the workers of Dask must not run again."""
    file = f"with_{kind}.py"
    text = block("python", f"# {file}").replace('cluster="slurm"', 'cluster="local"')
    (layered / file).write_text(text)
    (line,) = (line for line in block("sh", "with_dask").splitlines() if f"with_{kind}:" in line)
    assert built(shell(f"command {line}", layered, **OF_RAY)) > 10
    assert built(shell("jitkern prewarm mypkg", layered, JITKERN_COMPILE="never")) == 0
