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


# By what a function of Numba follows from: a helper with 1 or 2 for `{0}`, what the function returns,
# and what that is for 10.
FOLLOWS = {
    "functions": ("""
K = {0}
@numba.njit(cache=True)
def f(x):
    return x * {0}
""", "helper.f(x) + helper.K", (11, 22)),
    "a value": ("""
K = int(open(__file__ + '.txt').read())
""", "x + helper.K", (11, 12)),
    "an overload": ("""
from numba.extending import overload
def f(x): ...
NAMES = {{"alpha": {0}, "beta": {{"gamma"}}}}
@overload(f)
def of_f(x):
    return (None, lambda x: x, lambda x: x * 2)[NAMES["alpha"]]
""", "helper.f(x)", (10, 20)),
    "an intrinsic": ("""
from numba.extending import intrinsic
@intrinsic
def f(_, x):
    return x(x), lambda c, b, s, a: b.mul(a[0], c.get_constant(x, {0}))
""", "helper.f(x)", (10, 20)),
    "names of fields": ("""
import collections
T = collections.namedtuple('T', ['x a', 'a x'][{0} - 1])(1, 2)
""", "x + helper.T.x", (11, 12)),
    "functions in a tuple": ("""
@numba.njit
def f(x):
    return x * {0}
F = f, f
""", "helper.F[0](x)", (10, 20)),
    "a class": ("""
from numba.experimental import jitclass
@jitclass([('x', numba.int64)])
class C:
    def __init__(self, x):
        self.x = x + {0}
""", "helper.C(x).x", (11, 12)),
    "options": ("""
OPTIONS = {{'error_model': ['python', 'numpy'][{0} - 1]}}
""", "x / 0", ("-", "inf")),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("what", FOLLOWS)
def test_numba_is_served_by_all_that_a_function_follows_from(what, cache_dir, tmp_path):
    """Two programs with the same source, of which another module or a value differs."""
    pytest.importorskip("numba")
    helper, expression, answers = FOLLOWS[what]
    program = f"""import numba, helper
@numba.njit(cache=True, **getattr(helper, "OPTIONS", {{}}))
def g(x):
    return {expression}
try:
    print(g(10))
except ZeroDivisionError:
    print("-")
"""
    for number in (1, 2):
        folder = tmp_path / str(number)
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "helper.py").write_text(f"import numba\n{helper.format(number)}\n")
        (folder / "lib" / "helper.py.txt").write_text(str(number))
        (folder / "n.py").write_text(program)
    for number in (1, 2, 1):
        for mode in ((), ("--frozen",)):
            done = subprocess.run(
                [sys.executable, "-m", "jitkern", "run", *mode, "--", sys.executable, "n.py"],
                cwd=tmp_path / str(number), env={**os.environ, "PYTHONPATH": "lib"},
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            assert done.stdout == f"{answers[number - 1]}\n"
    assert "compiled: nothing" in done.stderr
