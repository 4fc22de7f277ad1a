"""Another machine for programs under `jitkern run`."""

import os
import shutil

import pytest

# A compiler that says its version, which Inductor asks for, and fails at anything else.
FAILS = """#!/bin/sh
for word in "$@"; do
  case $word in --version | -v | -dumpversion | -dumpmachine | -print*) exec {real} "$@" ;; esac
done
echo "$0 was started: $*" >&2
exit 1
"""


@pytest.fixture
def elsewhere(cache_dir, tmp_path):
    """The variables of a machine with another root and home, and compilers that fail."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cc", "c++", "gcc", "g++", "ninja"):
        (tools / name).write_text(FAILS.format(real=shutil.which(name)))
        (tools / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    return {
        "PATH": os.pathsep.join((str(tools), "/usr/bin", "/bin")),
        "HOME": str(tmp_path / "home"),
        "JITKERN_CACHE_DIR": str(tmp_path / "other" / "root"),
        "TMPDIR": str(tmp_path / "home"),
    }
