"""The demo runs, and what docs/from_cuda_extension.md and docs/settings.md say is true.

The snippets of the README and of all other pages are run by docs/test_snippets.py.
"""

import math
import re
import subprocess
import sys

import pytest
from helpers import REPOSITORY

from benches import demo
from jitkern import config
from jitkern.cli.output import print_table
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
    command = [sys.executable, "-m", "benches.demo"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("softmax", "rms_norm", "gelu(gate) * up", "a * b + c"):
        assert f"\n{kernel} " in done.stdout
    assert done.stderr.splitlines()[0] == "[1/4] softmax: cpu cc"
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("OK: ") and "none by the second process" in verdict


def test_the_table_of_the_demo_fits_into_80_columns(capsys):
    first = [("gelu(gate) * up", "cpu extension", 12.7), ("softmax", "cuda triton", 99.96)]
    rest = [(0.9996, 0.001, 9.9996e-5, 0.5, 1.0), (2.0, 1e-6, 0.09996, math.inf, 1.0)]
    rows = demo.cells(first, rest)
    print_table(demo.HEADER, rows)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split()[5:] == ["12.7", "s", "1000", "ms", "1.00", "ms", "100", "us", "0.50"]
    assert demo.verdict([], 8, 8).startswith("OK: 8 of 8") and len(demo.verdict([], 8, 8)) <= 80
    assert demo.verdict(["softmax"], 8, 8) == "FAILED: 1 of 8 kernels give wrong results: softmax"


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
