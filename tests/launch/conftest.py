"""Fixtures of `.tune`, and a GPU that is none."""

import pytest
from fake_gpu import FakeGpu
from tuning import SOURCE, Clock, _number

from jitkern.declare import Cpp, kernel


@pytest.fixture
def declare(tmp_path):
    """An op with a launch function for the CPU, and configurations for it."""
    (tmp_path / "k.cpp").write_text(SOURCE)

    def declare(launch, configurations, key=None, schema="(Tensor x) -> Tensor"):
        op = kernel(f"jitkern_tune::f{next(_number)}{schema}", cpu=Cpp(str(tmp_path / "k.cpp")))
        op.launch("cpu")(launch)
        if configurations:
            op.tune("cpu", key=key)(configurations)
        return op

    return declare


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    return FakeGpu(tmp_path, monkeypatch)


@pytest.fixture
def clock(monkeypatch):
    """The higher `WAY`, the quicker."""
    return Clock(monkeypatch, lambda config: 1.0 / config["WAY"])
