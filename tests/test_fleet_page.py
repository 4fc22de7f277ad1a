"""docs/fleet.md, prewarm on many machines: its blocks run with the engines that are installed here.

The recipes before are run by remote/test_recipes.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from helpers import REPOSITORY, own_programs_first, until
from test_deploy import project, shell  # noqa: F401  a fixture, among others

from jitkern.prewarming.shards import ENGINES

PAGE = (REPOSITORY / "docs" / "fleet.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
OF_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
needs_slurm = pytest.mark.skipif(bool(slurm.lacking()), reason=slurm.lacking())


def block(language, containing):
    (text,) = (text for kind, text in BLOCKS if kind == language and containing in text)
    return text


def built(out):
    return int(re.findall(r"^(\d+) built, .* 0 failed", out, re.MULTILINE)[-1])


@pytest.fixture(scope="module")
def node():
    with slurm.slurm() as environment:
        yield {**environment, "PATH": own_programs_first()}


def of_the_shell(script):
    """Lines whose commands Slurm or torchrun start: `jitkern` is a program there, by its path."""
    return script.replace("jitkern prewarm", f"{Path(sys.executable).with_name('jitkern')} prewarm")


def test_the_table_of_systems_is_that_of_the_code():
    text = PAGE.partition("### Other systems")[2].partition("### ")[0]
    rows = [row.split("|")[1:4] for row in text.splitlines() if row.startswith("| ")][1:]
    listed = [tuple(re.findall(r"`([A-Z_]+)`", number + of)) for _, number, of in rows]
    assert listed == [(engine.number, engine.of) for engine in ENGINES]


@pytest.mark.long
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
        task = {"ID": index, "COUNT": count, "MIN": 0, "MAX": count - 1, "STEP": 1}
        task = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in task.items()}
        assert built(shell("jitkern prewarm mypkg --shard auto", project, **task, **cache)) == 0
    shell(block("sh", "cache unpack").replace("/bundles", str(bundles)), project)
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0


@pytest.mark.long
def test_the_ranks_of_torchrun_build_the_whole(project):  # noqa: F811
    shell(of_the_shell(block("sh", "--no-python")), project, OMP_NUM_THREADS="1")
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0


def lines_of_engines():
    return block("sh", "--engine processes").splitlines()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def servers(commands, folder, log):
    """Run commands beside the block, where the packages of a folder are found."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}/src",
        "PATH": own_programs_first(),
        **OF_RAY,
    }
    with contextlib.ExitStack() as started, log.open("w") as file:
        for command in commands:
            process = subprocess.Popen(
                shlex.split(command), env=environment, stdout=file, stderr=file
            )
            started.callback(process.wait, 60)
            started.callback(process.terminate)
        yield


@pytest.mark.long
@pytest.mark.parametrize("line", lines_of_engines())
def test_an_engine_of_the_page_builds(line, project, tmp_path):  # noqa: F811
    """Those with an address at servers that are started here."""
    *_, engine = line.split()
    module = {"dask": "distributed", "ray": "ray"}.get(engine.partition(":")[0], "jitkern")
    pytest.importorskip(module)
    if engine.startswith("ray://"):
        pytest.importorskip("grpc", reason='needs pip install "ray[client]"')
    port = free_port()
    line = re.sub(r"//[a-z.]+:\d+", f"//127.0.0.1:{port}", line)
    of_clients = f"--num-cpus=2 --ray-client-server-port={port}"
    commands = {
        "dask://": (
            f"dask scheduler --host 127.0.0.1 --port {port} --no-dashboard",
            f"dask worker tcp://127.0.0.1:{port} --nworkers 2 --no-dashboard",
        ),
        "ray://": (
            f"ray start --head --block --port={free_port()} --include-dashboard=false {of_clients}",
        ),
    }.get(re.sub("(?<=//).*", "", engine), ())
    with servers(commands, project, tmp_path / "log"):
        out = until(lambda: shell(f"{line} || true", project, **OF_RAY))  # once the server runs
        assert built(out) > 10, (tmp_path / "log").read_text()
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "module"),
    [("with_dask.py", "distributed"), ("with_ray.py", "ray"), pytest.param("with_submitit.py", "submitit", marks=needs_slurm)],
)  # fmt: skip
def test_an_executor_builds_the_whole(file, module, project, request):  # noqa: F811
    pytest.importorskip(module)
    environment = {"RAY_ADDRESS": "local"}  # and no cluster that another program has left
    if module == "submitit":
        environment = request.getfixturevalue("node")
    (project / file).write_text(block("python", f"# {file}"))
    shell(f"python {file}", project, **environment)
    assert built(shell("jitkern prewarm mypkg", project, JITKERN_COMPILE="never")) == 0
