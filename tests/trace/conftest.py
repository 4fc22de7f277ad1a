"""Fixtures of traced launch functions."""

import pytest
from subject import Subject


@pytest.fixture(autouse=True)
def launch_runtime_is_there(launch_runtime):
    pass


@pytest.fixture
def subject(tmp_path):
    return lambda *args, **kwargs: Subject(tmp_path / "k", *args, **kwargs)
