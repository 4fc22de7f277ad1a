"""docs/serve.md does what it says: the service is started and asked as written, and its units parse."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import PATIENT_SERVICE, REPOSITORY

from jitkern.cli import parser
from jitkern.config import Config
from jitkern.files import trust

GUIDE = (REPOSITORY / "docs" / "serve.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
APP = """
import torch, mypkg
mypkg.scale(torch.ones(1000), 0.5)
"""
THEN = f"{APP}\nimport jitkern\nprint(jitkern.stats()['compiles'])"


def blocks(language):
    return [text for kind, text in BLOCKS if kind == language]


def run(*command, cwd, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=cwd, env={**os.environ, "PYTHONPATH": f"{cwd}/src", **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.long
def test_the_service_is_run_and_asked_as_written(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("init", "mypkg")[0] == 0
    install, keygen, serve = (shlex.split(line) for line in blocks("sh")[0].splitlines())
    assert install == ["pip", "install", "jitkern[serve,sign,zstd]"]
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
        (script,) = blocks("python")
        (home / "ask.py").write_text(script)
        _, asking = blocks("sh")
        other = {
            "JITKERN_CACHE_DIR": str(tmp_path / "other"),
            "JITKERN_COMPILE": "never",
            "JITKERN_REMOTE_TIMEOUT": "600",
            "JITKERN_REMOTE_BUDGET": "600",
            "PATH": "",
        }
        for line in asking.splitlines():
            command = shlex.split(line.replace("http://127.0.0.1:8757", url))
            run(*(command[1:] if command[0] == "python" else ("-m", *command)), cwd=home, **other)
        assert run("-c", THEN, cwd=home, **other) == "0\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()


def test_the_settings_are_settings(tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "config.toml").write_text(text)
    assert set(Config.from_env({}, [tmp_path / "config.toml"]).origins) == {
        "remote", "trusted_keys", "remote_token_file",
    }  # fmt: skip


def test_what_cron_runs_is_of_the_unit_and_is_a_command(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # keys of other machines
    unit, (entry,) = blocks("ini")[0], blocks("crontab")
    assert all(re.fullmatch(r"\*(/\d+)?", field) for field in entry.split()[:5])
    cache, program, *arguments = shlex.split(entry)[5:]
    assert f"Environment={cache}\n" in unit and f"ExecStart={program} serve " in unit
    parsed = parser(arguments).parse_args(arguments)
    assert f"--key {parsed.key} " in unit and parsed.url == "s3://kernels/mypkg"


def commands():
    """The command lines of the page that start the service."""
    unit = configparser.ConfigParser()
    unit.optionxform = str
    unit.read_string(blocks("ini")[0])
    yield unit["Service"]["ExecStart"]
    yaml = pytest.importorskip("yaml", reason="needs the extra docs: pip install jitkern[docs]")
    deployment, service = yaml.safe_load_all(blocks("yaml")[0])
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


@pytest.mark.long
def test_every_option_and_status_is_told():
    out = subprocess.run(
        [sys.executable, "-m", "jitkern", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    own = out.partition("options:")[2].partition("options of every command")[0]
    for flag in re.findall(r"^  (--[a-z-]+)", own, re.MULTILINE):
        assert f"| `{flag}` |" in GUIDE, flag
    text = (REPOSITORY / "jitkern" / "service" / "app.py").read_text()
    told = {*re.findall(r"(?:refuse|HTTPException)\((\d{3})", text)}
    assert len(told) > 10
    for status in told - {"411", "501", "505"}:
        assert status in GUIDE, status
