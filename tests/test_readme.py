"""Every snippet of the README, and of the guide for those who come from elsewhere, is run in order.

Those of docs/deploying.md are in test_deploy.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY

from jitkern import config
from jitkern.compilers.cuda import toolkit
from jitkern.config import Config
from jitkern.target import short_version, this_platform

README = (REPOSITORY / "README.md").read_text()
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def code(*languages):
    return [text for language, text in SNIPPETS if language in languages]


def test_python_cuda_and_cpp_snippets_run(tmp_path, run_python):
    ran = 0
    for text in code("cuda", "cpp", "python"):
        named = re.match(r"(?:#|//) (scale/[\w.]+)\n", text)
        if named:
            path = tmp_path / named.group(1)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            continue
    for text in code("python"):
        if not text.startswith("# scale/"):
            done = run_python(text)
            assert done.returncode == 0, f"{text}\n{done.stderr}"
            ran += 1
    assert ran == 7


@pytest.mark.skipif(this_platform() != "linux_x86_64", reason="shows an x86-64 target")
def test_the_stub_is_what_explain_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in code("cuda", "cpp", "python"):
        named = re.match(r"(?:#|//) (scale/[\w.]+)\n", text)
        if named:
            Path("scale").mkdir(exist_ok=True)
            Path(named.group(1)).write_text(text)
    command = [sys.executable, "-W", "ignore", "-m", "jitkern"]
    target = ["--target", f"cpu-x86_64-torch{short_version(torch.__version__)}"]
    for arguments in (["prewarm", "scale", *target], ["explain", "scale", "--source", *target]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (shown,) = code("c")
    assert textwrap.indent(shown, "    ") in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not toolkit.nvrtc_libraries(), reason="needs NVRTC: pip install jitkern[cuda]")
def test_shell_snippets_run(tmp_path):
    scripts = Path(sys.executable).parent
    for line in "".join(code("sh")).splitlines():
        command = shlex.split(line, comments=True)
        environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
        if command[0] == "make":  # the real ones set up an environment and run this very test
            command = [*command, "-n", "-C", str(REPOSITORY)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.slow
def test_the_guide_from_cpp_extension_is_true(tmp_path, run_python):
    guide = (REPOSITORY / "docs" / "from_cuda_extension.md").read_text()
    ran = 0
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", guide, re.DOTALL | re.MULTILINE):
        named = re.match(r"(?:#|//) (mylib/[\w.]+)\n", text)
        if named:
            (tmp_path / "mylib").mkdir(exist_ok=True)
            (tmp_path / named.group(1)).write_text(text)
        elif language == "python":
            done = run_python(text)
            assert done.returncode == 0, f"{text}\n{done.stderr}"
            ran += 1
        if named and language == "python":
            assert len([line for line in text.splitlines()[1:] if line]) <= 10
        if language == "diff":
            assert len(text.splitlines()) == 2
    assert ran == 2


@pytest.mark.slow
def test_the_demo_runs():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benches.demo"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("jitkern::")]
    assert {row[0] for row in rows} == {
        f"jitkern::{op}" for op in ("muladd", "softmax", "softmax_backward", "vec_add")
    }
    assert all(float(row[-1]) <= 4 for row in rows)


def test_the_table_of_settings_is_that_of_the_code():
    rows = re.findall(r"^\| `JITKERN_.*$", README, re.MULTILINE)
    settings = [setting for setting in config.SETTINGS if setting.variable]
    assert rows == [f"| `{s.variable}` | {s.takes} | {s.default} |" for s in settings]


def test_the_settings_file_is_one(tmp_path):
    (text,) = code("toml")
    (tmp_path / "config.toml").write_text(text)
    found = Config.from_env({}, [tmp_path / "config.toml"])
    assert found.max_size == 20 << 30
    assert found.trusted_keys and found.signed and found.trusted


def test_every_command_line_of_the_readme_exists():
    from jitkern.cli import COMMANDS

    used = set(re.findall(r"jitkern (\w+)", "".join(code("sh"))))
    assert used <= set(COMMANDS)
