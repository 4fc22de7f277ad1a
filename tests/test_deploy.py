"""docs/deploying.md does what it says: its image is built in directories, its lines are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, own_programs_first

from jitkern.cache.store import Cache
from jitkern.compilers.cuda import toolkit
from jitkern.target import short_version, this_platform

GUIDE = (REPOSITORY / "docs" / "deploying.md").read_text()
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
PYTHON = f"{sys.executable} -W ignore"
# Where a shell has no PATH, or must not take another Python's programs.
PROGRAMS = (
    f'python() {{ {PYTHON} "$@"; }}; jitkern() {{ {PYTHON} -m jitkern "$@"; }}; '
    f'torchrun() {{ {PYTHON} -m torch.distributed.run "$@"; }}\n'
)
SERVE = """
import json, jitkern, torch, mypkg
for name in mypkg.__all__:
    op = getattr(mypkg, name)
    for args in op.sample_inputs("cpu"):
        torch.testing.assert_close(op(*args), op.run_reference(*args))
print(json.dumps(jitkern.stats()))
"""
TRAIN = """
import json, os, jitkern, torch, mypkg
from jitkern.config import background
for dtype in (torch.float32, torch.float64):
    x = torch.ones(1000, dtype=dtype)
    assert torch.equal(mypkg.scale(x, 2.0), mypkg.add_relu(x, x))
background.settle()
json.dump(jitkern.stats(), open(f"rank-{os.environ['RANK']}.json", "w"))
"""


def snippets(language, containing=""):
    return [text for kind, text in SNIPPETS if kind == language and containing in text]


def shell(script, cwd, **environment):
    done = subprocess.run(
        ["/bin/sh", "-ec", PROGRAMS + script],
        cwd=cwd, env={**os.environ, "PATH": own_programs_first(), "PYTHONPATH": f"{cwd}/src", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def project(tmp_path, monkeypatch, cli):
    """A project that `jitkern init` wrote, with a program to serve and one to train."""
    monkeypatch.chdir(tmp_path)
    assert cli("init", "mypkg")[0] == 0
    (tmp_path / "mypkg" / "serve.py").write_text(SERVE)
    (tmp_path / "mypkg" / "train.py").write_text(TRAIN)
    return tmp_path / "mypkg"


class Stage:
    """A stage of the Dockerfile: its files below a directory, its environment, and no other machine's PATH."""

    def __init__(self, root, project, path):
        self.root = root
        self.project = project
        self.environment = {"PATH": path, "PYTHONPATH": f"{project}/src", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip

    def here(self, text):
        return text.replace("/opt/", f"{self.root}/opt/").replace("/src", str(self.project))

    def run(self, *command):
        return subprocess.run(
            command, cwd="/", env=self.environment, capture_output=True, text=True, check=False
        )

    def follow(self, verb, rest, stages):
        """Do one instruction; None for those that need a registry."""
        if verb == "ENV":
            name, _, value = rest.partition("=")
            self.environment[name] = self.here(value)
        elif verb == "COPY" and rest.startswith("--from="):
            name, source, target = rest.removeprefix("--from=").split()
            shutil.copytree(stages[name].here(source), self.here(target))
        elif verb == "RUN" and not rest.startswith(("apt-get", "pip")):
            done = self.run("/bin/sh", "-ec", PROGRAMS + self.here(rest))
            assert done.returncode == 0, f"{rest}\n{done.stdout}\n{done.stderr}"


@pytest.fixture
def image(project, tmp_path):
    """The last stage, and the command that it runs."""
    (text,) = snippets("dockerfile")
    text = text.replace("2.13.0", short_version(torch.__version__)).replace("\\\n", " ")
    stages, command = {}, []
    for line in text.split("\n"):
        verb, _, rest = line.partition(" ")
        if verb == "FROM":
            builds = rest.endswith(" AS builder")
            name = "builder" if builds else "last"
            path = os.environ["PATH"] if builds else "/nonexistent"
            stage = stages[name] = Stage(tmp_path / name, project, path)
        elif verb == "CMD":
            command = [stage.here(part) for part in json.loads(rest)]
        elif verb:
            stage.follow(verb, rest, stages)
    shutil.rmtree(stages["builder"].root)
    assert command[0] == "python"
    return stages["last"], [sys.executable, "-W", "ignore", *command[1:]]


def read_only(root):
    """What stands before a command for which a directory cannot be written: a mount, or modes."""
    mounted = ["unshare", "-m", "/bin/sh", "-ec", 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec "$@"', str(root)]  # fmt: skip
    if os.geteuid() == 0 and shutil.which("unshare"):
        mounted[0] = shutil.which("unshare")
        mounted[4] = f"PATH=/bin:/usr/bin:/sbin; {mounted[4]}".replace(
            "exec", "PATH=/nonexistent exec"
        )
        tried = subprocess.run(
            [*mounted, sys.executable, "-c", ""], check=False, capture_output=True
        )
        if tried.returncode == 0:
            return mounted
    for path in (root, *root.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return []


@pytest.mark.long
@pytest.mark.skipif(not toolkit.nvrtc_libraries(), reason="needs NVRTC: pip install jitkern[cuda]")
@pytest.mark.skipif(this_platform() != "linux_x86_64", reason="its targets are x86-64")
def test_the_image_runs_with_nothing_to_write(image):
    stage, command = image
    layer = Path(stage.environment["JITKERN_SYSTEM_CACHE"])
    targets = {
        path.name.partition("-")[0] for path in (layer / "v1").iterdir() if "torch" in path.name
    }
    assert (targets, stage.environment["JITKERN_COMPILE"]) == ({"cpu", "cuda"}, "never")
    before = {path: path.lstat().st_mtime_ns for path in layer.rglob("*")}
    prefix = read_only(layer)
    done = stage.run(*prefix, *command)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    stats = json.loads(done.stdout)
    assert (stats["compiles"], stats["runtimes"], stats["failures"]) == (0, 0, 0)
    assert stats["hits"] >= 4
    lacking = "import torch, mypkg; mypkg.add_relu(*[torch.ones(3, dtype=torch.int32)] * 2)"
    done = stage.run(*prefix, sys.executable, "-W", "ignore", "-c", lacking)
    assert (
        "compiling is off (JITKERN_COMPILE=never). Prewarm it: jitkern prewarm mypkg" in done.stderr
    )
    assert {path: path.lstat().st_mtime_ns for path in layer.rglob("*")} == before
    assert not Path("/nonexistent").exists()


@pytest.mark.long
def test_what_a_run_called_is_recorded_and_packed(project):
    for containing in ("jitkern record", "-o kernels.tar\n"):
        (script,) = snippets("sh", containing)
        out = shell(script, project)
        if containing == "jitkern record":
            assert (project / "calls.jsonl").read_text().count("\n") >= 4
            assert " 0 failed, 0 skipped" in out


@pytest.mark.long
def test_eight_ranks_compile_each_kernel_once(project, cache_dir):
    (line,) = snippets("sh", "torchrun")
    assert "--nproc-per-node 8" in line
    shell(line, project, OMP_NUM_THREADS="1")
    ranks = [json.loads(path.read_text()) for path in project.glob("rank-*.json")]
    names = [path.name for path in Cache(cache_dir).paths()]
    others = [name for name in names if name.startswith("runtime-")]
    made = [name for name in names if name not in others and ".call." not in name]
    assert len(ranks) == 8
    assert sum(rank["compiles"] for rank in ranks) == len(made) == 4
    assert sum(rank["runtimes"] for rank in ranks) == len(others) == 1
    assert sum(rank["failures"] for rank in ranks) == 0


@pytest.mark.long
def test_the_mega_cache_brings_the_kernels_along(project, tmp_path):
    pytest.importorskip("torch.compiler._cache")
    save, load = snippets("python")
    for text, environment in (
        (save, {}),
        (load, {"JITKERN_CACHE_DIR": str(tmp_path / "other"), "JITKERN_COMPILE": "never"}),
    ):
        name = text.partition("\n")[0].removeprefix("# ")
        (project / name).write_text(text)
        shell(f"python {name}", project, **environment)
