"""What is tested is one list, `doctor.TESTED`: the page on installing, doctor, make and CI go by it."""

import os
import re
import subprocess

from helpers import REPOSITORY

from jitkern.cli.doctor import TESTED

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
