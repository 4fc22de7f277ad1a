"""The demo runs, and what docs/from_cuda_extension.md and docs/settings.md say is true.

The snippets of the README and of all other pages are run by docs/test_snippets.py.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers import REPOSITORY

from jitkern import config
from jitkern.config import Config

SETTINGS = (REPOSITORY / "docs" / "settings.md").read_text()


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.common_cache
def test_the_demo_runs():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benches.demo"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Each result is PyTorch's" in done.stdout
    for kernel in ("softmax", "rms_norm", "gelu(gate) * up", "a * b + c"):
        assert f"\n{kernel} " in done.stdout
    assert done.stdout.endswith("make docs\n")


def test_the_table_of_settings_is_that_of_the_code():
    rows = re.findall(r"^\| `JITKERN_.*$", SETTINGS, re.MULTILINE)
    settings = [setting for setting in config.SETTINGS if setting.variable]
    assert rows == [f"| `{s.variable}` | {s.takes} | {s.default} |" for s in settings]


def test_the_settings_file_is_one(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```", SETTINGS, re.DOTALL | re.MULTILINE)
    (tmp_path / "config.toml").write_text(text)
    found = Config.from_env({}, [tmp_path / "config.toml"])
    assert found.max_size == 20 << 30
    assert found.trusted_keys and found.signed and found.trusted
