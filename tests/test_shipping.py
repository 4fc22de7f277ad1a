"""docs/shipping.md does what it says: its image is built in directories, its lines are run, its units
parse, and so do the files of examples/shipping.

The recipes for buckets, servers, disks and pods are run by remote/test_recipes.py.
"""

import configparser
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import PATIENT_SERVICE, REPOSITORY, own_programs_first, ran

from jitkern.cache.store import Cache
from jitkern.cli import parser
from jitkern.compilers.cuda import toolkit
from jitkern.config import Config
from jitkern.files import trust
from jitkern.target import short_version, this_platform

PAGE, REFERENCE = ((REPOSITORY / "docs" / name).read_text() for name in ("shipping.md", "cache.md"))
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


def recipe(name):
    """A file of examples/shipping, which a page links."""
    assert f"(../examples/shipping/{name})" in PAGE + REFERENCE
    return (REPOSITORY / "examples" / "shipping" / name).read_text()


def block(language, containing, page=PAGE):
    """The one block of a page that contains a text."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (text,) = (text for kind, text in blocks if kind == language and containing in text)
    return text


def shell(script, cwd, **environment):
    where = {"PATH": own_programs_first(), "PYTHONPATH": f"{cwd}/src"}
    env = {**os.environ, **where, **environment}
    return ran("/bin/sh", "-ec", PROGRAMS + script, cwd=cwd, env=env)


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
    text = block("dockerfile", "FROM")
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
    """Close a directory to writes; return the words to put before a command that runs over it.

    Root gets a read-only mount, which only the command sees. Others get modes, and no words.
    """
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
        out = shell(block("sh", containing), project)
        if containing == "jitkern record":
            assert (project / "calls.jsonl").read_text().count("\n") >= 4
            assert " 0 failed, 0 skipped" in out


@pytest.mark.long
def test_eight_ranks_compile_each_kernel_once(project, cache_dir):
    line = block("sh", "torchrun")
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
    elsewhere = {"JITKERN_CACHE_DIR": str(tmp_path / "other"), "JITKERN_COMPILE": "never"}
    for name, environment in (("save.py", {}), ("load.py", elsewhere)):
        (project / name).write_text(recipe(name))
        shell(f"python {name}", project, **environment)


# Prewarm on many machines

OF_RAY = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

needs_ray = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="there is no wheel of Ray"
)


def built(out):
    return int(re.findall(r"^(\d+) built, .* 0 failed", out, re.MULTILINE)[-1])


@pytest.fixture
def layered(project, monkeypatch, recorder_cache):
    """The project, with what takes longest to build in a layer."""
    monkeypatch.setenv("JITKERN_SYSTEM_CACHE", str(recorder_cache))
    return project


@pytest.mark.long
def test_the_pods_of_a_job_leave_bundles_that_are_the_whole(layered, tmp_path):
    manifest = recipe("prewarm-job.yaml")
    (count,) = {int(n) for n in re.findall(r"(?:completions|parallelism): (\d+)", manifest)}
    script = re.search(r"args:\n +- \|\n((?: {14}.*\n)+)", manifest)[1]
    assert f" + 1))/{count}\n" in script
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    for index in range(count):
        cache = {"JITKERN_CACHE_DIR": str(tmp_path / f"pod-{index}")}
        pod = {"JOB_COMPLETION_INDEX": str(index), **cache}
        shell(script.replace("/bundles", str(bundles)), layered, **pod)
    shell(block("sh", 'cache unpack "$part"').replace("/bundles", str(bundles)), layered)
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
    (layered / file).write_text(recipe(file).replace('cluster="slurm"', 'cluster="local"'))
    (line,) = (line for line in block("sh", "with_dask").splitlines() if f"with_{kind}:" in line)
    assert built(shell(f"command {line}", layered, **OF_RAY)) > 10
    assert built(shell("jitkern prewarm mypkg", layered, JITKERN_COMPILE="never")) == 0


# The service

APP = """
import torch, mypkg
mypkg.scale(torch.ones(1000), 0.5)
"""
THEN = f"{APP}\nimport jitkern\nprint(jitkern.stats()['compiles'])"


def run(*command, cwd, **environment):
    env = {**os.environ, "PYTHONPATH": f"{cwd}/src", **environment}
    return ran(sys.executable, "-W", "ignore", *command, cwd=cwd, env=env, timeout=300)


@pytest.mark.long
def test_the_service_is_run_and_asked_as_written(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("init", "mypkg")[0] == 0
    install, serve = (shlex.split(line) for line in block("sh", "jitkern serve").splitlines())
    assert install == ["pip", "install", "jitkern[serve,sign,zstd]"]
    keygen = shlex.split(block("sh", "keygen").splitlines()[-1])
    home = tmp_path / "mypkg"
    run("-c", APP, cwd=home, JITKERN_RECORD="calls.jsonl", JITKERN_CACHE_DIR=str(tmp_path / "app"))
    run("-m", *keygen, cwd=home)
    (home / "token").write_text("secret\n")
    serve[serve.index("--listen") + 1] = "127.0.0.1:0"
    assert serve[:2] == ["jitkern", "serve"]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PATIENT_SERVICE, *serve[2:]], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = re.search(r"http://\S+:\d+", process.stdout.readline())[0]
        (home / "ask.py").write_text(recipe("ask.py"))
        other = {
            "JITKERN_CACHE_DIR": str(tmp_path / "other"), "JITKERN_COMPILE": "never",
            "JITKERN_REMOTE_TIMEOUT": "600", "JITKERN_REMOTE_BUDGET": "600", "PATH": "",
        }  # fmt: skip
        for line in block("console", "ask.py", REFERENCE).splitlines():
            command = shlex.split(line.removeprefix("$ ").replace("http://127.0.0.1:8757", url))
            run(*(command[1:] if command[0] == "python" else ("-m", *command)), cwd=home, **other)
        assert run("-c", THEN, cwd=home, **other) == "0\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()


def test_the_settings_are_settings(tmp_path):
    text = block("toml", "remote_token_file")
    (tmp_path / "config.toml").write_text(text)
    assert set(Config.from_env({}, [tmp_path / "config.toml"]).origins) == {
        "remote", "trusted_keys", "remote_token_file",
    }  # fmt: skip


def test_what_cron_runs_is_of_the_unit_and_is_a_command(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # keys of other machines
    unit, entry = recipe("jitkern-serve.service"), block("crontab", "push")
    assert all(re.fullmatch(r"\*(/\d+)?", field) for field in entry.split()[:5])
    cache, program, *arguments = shlex.split(entry)[5:]
    assert f"Environment={cache}\n" in unit and f"ExecStart={program} serve " in unit
    parsed = parser(arguments).parse_args(arguments)
    assert f"--key {parsed.key}\n" in unit and parsed.url == "s3://kernels/mypkg"


def commands():
    """The command lines of the page that start the service."""
    unit = configparser.ConfigParser()
    unit.optionxform = str
    unit.read_string(recipe("jitkern-serve.service"))
    yield unit["Service"]["ExecStart"]
    yaml = pytest.importorskip("yaml", reason="needs the extra docs: pip install jitkern[docs]")
    deployment, service = yaml.safe_load_all(recipe("service.yaml"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    yield script.partition("exec ")[2]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {
        volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]
    }
    check_that_the_cache_is_trusted(deployment["spec"]["template"]["spec"], container)
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == 8757
    subprocess.run(["/bin/sh", "-n", "-c", script], check=True)


def check_that_the_cache_is_trusted(pod, container):
    """On a volume that a group may write, as Kubernetes makes it for `fsGroup`."""
    (cache,) = (e["value"] for e in container["env"] if e["name"] == "JITKERN_CACHE_DIR")
    (mount,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "cache")
    with tempfile.TemporaryDirectory() as folder:
        volume = Path(folder, "volume")
        volume.mkdir()
        volume.chmod(0o2775)
        inside = Path(cache.replace(mount, str(volume)))
        assert trust.why_untrusted_root(volume)
        assert trust.why_untrusted_root(inside) == ""
        inside.mkdir(0o700)
        assert trust.why_untrusted_root(inside) == ""
    # By default each start of a pod would let the group write what lies in the volume, too.
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_units_start_it_with_options_that_exist(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # keys of other machines
    found = [*commands()]
    assert len(found) == 2
    for line in found:
        program, *arguments = shlex.split(line)
        assert Path(program).name == "jitkern"
        assert parser(arguments).parse_args(arguments).what == ["mypkg"]


def test_every_status_of_the_service_is_told():
    text = (REPOSITORY / "jitkern" / "service" / "app.py").read_text()
    told = {*re.findall(r"(?:refuse|HTTPException)\((\d{3})", text)}
    assert len(told) > 10
    for status in told - {"411", "501", "505"}:
        assert status in REFERENCE, status
