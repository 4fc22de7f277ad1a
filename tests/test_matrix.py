"""What is tested is one list, `doctor.TESTED`: the page on installing, doctor, make and CI go by it."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from helpers import REPOSITORY

from jitkern.cli.doctor import TESTED
from tests import matrix

DEFAULT = re.search(r"^TORCH \?= (\S+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1]


def test_the_page_on_installing_names_what_is_tested():
    page = (REPOSITORY / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([^|]+) \|", page, re.MULTILINE))
    for name, versions in zip(("Python", "Torch"), zip(*TESTED)):
        named = dict.fromkeys(".".join(version.split(".")[:2]) for version in versions)
        assert rows[name] == ", ".join(named)


def test_doctor_names_what_is_tested(cli):
    _, out, _ = cli("doctor", "--json")
    for python, torch in TESTED:
        assert f"{python} with Torch {torch}" in out


def test_make_and_ci_run_what_is_tested():
    assert DEFAULT in {torch for _, torch in TESTED}
    ci = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make test-another"} <= set(ci)
    done = subprocess.run(
        ["make", "-n", "test-matrix", "test-another"],
        cwd=REPOSITORY, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ran = [line.partition("-m tests.matrix")[2] for line in done.stdout.splitlines() if "tests.matrix" in line]  # fmt: skip
    assert ran == ["", f" --besides {DEFAULT}"]


@pytest.fixture
def ran(monkeypatch):
    """The pairs whose tests were run, all of which fail; Python 3.10 is not installed."""
    pairs = []
    monkeypatch.setattr(matrix, "lacking", lambda pair: "no 3.10" if pair[0] == "3.10" else "")
    monkeypatch.setattr(matrix, "passes", pairs.append)
    return pairs


def test_the_matrix_tells_which_pairs_it_left_out(ran, capsys):
    assert matrix.main([]) == 1
    assert ran == [*TESTED[1:]]
    out = capsys.readouterr().out
    assert out.startswith("Python 3.10 with Torch 2.11.0: not run: no 3.10\n")
    assert out.count(": failed") == len(ran)


def test_each_commit_has_another_pair_that_can_be_had(ran, monkeypatch):
    for commit in range(20):
        monkeypatch.setattr(subprocess, "check_output", lambda *_, n=commit, **__: f"{n:x}\n")
        before = len(ran)
        assert matrix.main(["--besides", DEFAULT]) == 1
        assert len(ran) == before + 1
    assert {*ran} == {pair for pair in TESTED[1:] if pair[1] != DEFAULT}


def test_a_python_that_is_not_installed_is_named():
    assert matrix.lacking(("3.0", "2.13.0")) == "there is no python3.0"
