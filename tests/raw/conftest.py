"""Fixtures of kernels from elsewhere."""

from __future__ import annotations

import pytest

from jitkern.compilers.cuda import toolkit


@pytest.fixture
def file(tmp_path):
    def write(text, name="k.cu"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def no_nvcc(monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
