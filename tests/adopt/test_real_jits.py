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


@pytest.mark.long
@pytest.mark.parametrize("how", ["from helper import f, K", "import helper", "of a file"])
def test_numba_is_served_by_all_that_a_function_names(how, cache_dir, tmp_path):
    """Two programs with the same source, of which another module or a value differs."""
    pytest.importorskip("numba")
    text = {
        "from helper import f, K": "from helper import f, K\n\nBODY f(x) + K",
        "import helper": "import helper\n\nBODY helper.f(x) + helper.K",
        "of a file": "K = int(open(__file__ + '.txt').read())\n\nBODY x + K",
    }[how].replace("BODY", "@numba.njit(cache=True)\ndef g(x):\n    return")
    helper = "import numba\nK = {0}\n@numba.njit(cache=True)\ndef f(x):\n    return x * {0}\n"
    for number in (1, 2):
        folder = tmp_path / str(number)
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "helper.py").write_text(helper.format(number))
        (folder / "n.py").write_text(f"import numba\n{text}\n\nprint(g(10))\n")
        (folder / "n.py.txt").write_text(str(number))
    for number in (1, 2, 1):
        answer = 10 + number if how == "of a file" else 11 * number
        for mode in ((), ("--frozen",)):
            done = subprocess.run(
                [sys.executable, "-m", "jitkern", "run", *mode, "--", sys.executable, "n.py"],
                cwd=tmp_path / str(number), env={**os.environ, "PYTHONPATH": "lib"},
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            assert done.stdout == f"{answer}\n"
    assert "compiled: nothing" in done.stderr
