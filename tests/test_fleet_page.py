"""docs/fleet.md does what it says: its blocks run with the engines that are installed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm
from helpers import REPOSITORY
from test_deploy import PATH, project, shell  # noqa: F401  a fixture, among others

from jitkern.prewarming.shards import ENGINES

PAGE = (REPOSITORY / "docs" / "fleet.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
needs_slurm = pytest.mark.skipif(bool(slurm.lacking()), reason=slurm.lacking())


def block(language, containing):
    (text,) = (text for kind, text in BLOCKS if kind == language and containing in text)
    return text


def built(out):
    return int(re.findall(r"^(\d+) built, .* 0 failed", out, re.MULTILINE)[-1])


@pytest.fixture(scope="module")
def node():
    with slurm.slurm() as environment:
        yield {**environment, "PATH": f"{PATH}{os.pathsep}{Path(sys.executable).parent}"}


def of_the_shell(script):
    """Lines whose commands Slurm or torchrun start: `jitkern` is a program there, by its path."""
    return script.replace("jitkern prewarm", f"{Path(sys.executable).with_name('jitkern')} prewarm")


def test_the_table_of_systems_is_that_of_the_code():
    text = PAGE.partition("### Other systems")[2].partition("### ")[0]
    rows = [row.split("|")[1:4] for row in text.splitlines() if row.startswith("| ")][1:]
    listed = [tuple(re.findall(r"`([A-Z_]+)`", number + of)) for _, number, of in rows]
    assert listed == [(engine.number, engine.of) for engine in ENGINES]


@pytest.mark.slow
def test_the_pods_of_a_job_leave_bundles_that_are_the_whole(project, tmp_path):  # noqa: F811
    manifest = block("yaml", "completionMode")
    (count,) = {int(n) for n in re.findall(r"(?:completions|parallelism): (\d+)", manifest)}
    assert f'env:\n            - {{name: JOB_COMPLETIONS, value: "{count}"}}' in manifest
    script = re.search(r"args:\n +- \|\n((?: {14}.*\n)+)", manifest)[1]
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    for index in range(count):
        pod = {"JOB_COMPLETION_INDEX": str(index), "JOB_COMPLETIONS": str(count)}
        cache = {"JITKERN_CACHE_DIR": str(tmp_path / f"pod-{index}")}
        shell(script.replace("/bundles", str(bundles)), project, **pod, **cache)
    shell(block("sh", "cache unpack").replace("/bundles", str(bundles)), project)
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0


@pytest.mark.slow
def test_the_ranks_of_torchrun_build_the_whole(project):  # noqa: F811
    shell(of_the_shell(block("sh", "--no-python")), project, OMP_NUM_THREADS="1")
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0


def lines_of_engines():
    return block("sh", "--engine processes").splitlines()


@pytest.mark.slow
def test_processes_build_and_the_other_engines_have_nothing_left_to_do(project):  # noqa: F811
    first, *others = lines_of_engines()
    assert built(shell(first, project)) > 10
    for line in others:  # none of them needs a server by now
        assert built(shell(line, project)) == 0


@pytest.mark.stress
@pytest.mark.parametrize("line", lines_of_engines())
def test_an_engine_of_the_page_builds(line, project, tmp_path):  # noqa: F811
    """Those with an address at servers that are started here."""
    *_, engine = line.split()
    module = {"dask": "distributed", "ray": "ray"}.get(engine.partition(":")[0], "jitkern")
    pytest.importorskip(module)
    commands = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PYTHONPATH": str(project),
        "PATH": f"{commands}{os.pathsep}{PATH}",
    }
    servers, end = [], []
    if engine.startswith("dask://"):
        servers = [["dask", "scheduler", "--port", "28786", "--no-dashboard"], ["dask", "worker", "tcp://127.0.0.1:28786", "--nworkers", "2", "--no-dashboard"]]  # fmt: skip
        line = line.replace("scheduler.example:8786", "127.0.0.1:28786")
    elif engine.startswith("ray://"):
        pytest.importorskip("grpc", reason="needs pip install ray[client]")
        servers = [["ray", "start", "--head", "--block", "--num-cpus=2", "--port=26379", "--ray-client-server-port=20001", "--include-dashboard=false", "--temp-dir=/tmp/ray-of-tests"]]  # fmt: skip
        end = ["ray", "stop"]
        line = line.replace("head.example:10001", "127.0.0.1:20001")
    started = []
    try:
        for server in servers:
            with (tmp_path / "log").open("a") as log:
                started.append(subprocess.Popen(server, env=environment, stdout=log, stderr=log))
            time.sleep(5)
        deadline = time.monotonic() + 120
        while True:
            try:
                assert built(shell(line, project)) > 10
                break
            except AssertionError:
                if not servers or time.monotonic() > deadline:
                    raise
                time.sleep(2)
        assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0
    finally:
        for server in reversed(started):
            server.terminate()
        for server in started:
            server.wait(60)
        if end:
            assert end


@pytest.mark.stress
@needs_slurm
@pytest.mark.parametrize("containing", ["sbatch --wait", "--engine slurm"])
def test_a_recipe_for_slurm_builds_the_whole(containing, project, node):  # noqa: F811
    script = block("sh", containing)
    if "--engine" in containing:
        pytest.importorskip("submitit")
        assert built(shell(script, project, **node)) > 10
        where = {}
    else:
        shell(of_the_shell(script), project, **node)
        where = {"JITKERN_CACHE_DIR": str(project / "kernels")}
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never", **where)) == 0


@pytest.mark.stress
@pytest.mark.parametrize(
    ("file", "module"),
    [("with_dask.py", "distributed"), ("with_ray.py", "ray"), pytest.param("with_submitit.py", "submitit", marks=needs_slurm)],
)  # fmt: skip
def test_an_executor_builds_the_whole(file, module, project, request):  # noqa: F811
    pytest.importorskip(module)
    environment = request.getfixturevalue("node") if module == "submitit" else {}
    (project / file).write_text(block("python", f"# {file}"))
    shell(f"python {file}", project, **environment)
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0
