"""Fixtures of `load_inline` and `load`."""

from __future__ import annotations

import pytest
from helpers import write_files
from inline_modules import forget_answers


@pytest.fixture(autouse=True)
def _no_answers():
    """Each test asks its own cache."""
    forget_answers()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write files below a folder of their own, which is the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(**texts):
        names = {name: name.replace("__", "/").replace("_dot_", ".") for name in texts}
        write_files(folder, {names[name]: text for name, text in texts.items()})
        return folder

    return write
