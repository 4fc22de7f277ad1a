"""Fixtures of kernels from elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture
def file(tmp_path):
    def write(text, name="k.cu"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write
