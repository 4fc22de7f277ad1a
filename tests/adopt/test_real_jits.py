"""Programs with real JITs: compiled once, served on another machine, where nothing may compile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benches" / "programs"


def jitkern(*words, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "jitkern", *map(str, words)], check=False,
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("name", "package", "tool"),
    [
        ("compiled", "torch", "inductor"),
        ("extension", "torch", "jitkern"),
        ("numba_functions", "numba", "numba"),
        ("tvm_ffi_inline", "tvm_ffi", "ninja"),
    ],
)
def test_a_program_is_served_elsewhere(name, package, tool, cache_dir, elsewhere, tmp_path):
    pytest.importorskip(package)
    program = Path(shutil.copytree(PROGRAMS, tmp_path / "here")) / f"{name}.py"
    report = tmp_path / "report.json"
    jitkern("run", "--report", report, "--", sys.executable, program, "cpu")
    told = json.loads(report.read_text())
    assert tool in told["by_tool"]
    asked = {e["where"].rpartition(":")[0] for e in told["compiles"] if e["tool"] == tool}
    assert asked == {str(program)}, "a line of the program asked"
    bundle = tmp_path / "bundle.tar"
    jitkern("cache", "pack", "-o", bundle)
    moved = Path(shutil.copytree(PROGRAMS, tmp_path / "there")) / f"{name}.py"
    shutil.rmtree(tmp_path / "here")
    jitkern("cache", "unpack", bundle, **elsewhere)
    jitkern("run", "--frozen", "--report", report, "--", sys.executable, moved, "cpu", **elsewhere)
    told = json.loads(report.read_text())
    assert (told["by_tool"], told["refused"]) == ({}, [])


@pytest.mark.long
def test_an_edited_function_of_numba_is_refused(cache_dir, tmp_path):
    pytest.importorskip("numba")
    program = Path(shutil.copytree(PROGRAMS, tmp_path / "here")) / "numba_functions.py"
    jitkern("run", "--", sys.executable, program)
    program.write_text(program.read_text().replace("* 2", "* 3").replace("20.0", "30.0"))
    done = subprocess.run(
        [sys.executable, "-m", "jitkern", "run", "--frozen", "--", sys.executable, str(program)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "numba compiles `total`, asked for at" in done.stderr
    assert f"numba_functions.py:{len(program.read_text().splitlines())}" in done.stderr
    jitkern("run", "--", sys.executable, program)
    jitkern("run", "--frozen", "--", sys.executable, program)
