"""Fixtures of this room."""

import itertools
import os
import sys

import pytest
from fleet_packages import KERNEL, MODULE, POOLS

from jitkern import testing
from jitkern.op.op import OPS

numbers = itertools.count()


@pytest.fixture
def fleet_package(tmp_path, monkeypatch):
    """Write a package of one op, with three kernels, beside a module of executors; returns its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pools.py").write_text(POOLS)
    monkeypatch.setenv("DRIVER", str(os.getpid()))
    testing.set_settings(monkeypatch)
    made = []

    def write(before="", flags="[]", inside="pass"):
        name = f"fleet{next(numbers)}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        text = MODULE.format(name=name, before=before, flags=flags, inside=inside)
        (tmp_path / name / "kernel.py").write_text(text)
        (tmp_path / name / "k.cpp").write_text(KERNEL)
        made.append(name)
        return name

    yield write
    for name in made:
        OPS.pop(f"{name}::f", None)
    sys.modules.pop("pools", None)
