"""The temporary root of a process: nobody else's while it lives, and gone soon after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitkern.cache import temporary_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CHILD = """
import os
from jitkern.cache.temporary_cache import private_root
mine = private_root()
if not os.fork():
    (private_root() / "kernel.so").touch()
    os._exit(0)
os.wait()
print(len([name for name in os.listdir(mine.parent) if name.startswith("jitkern-private-")]))
"""
LASTING = """
import sys
from jitkern.cache.temporary_cache import private_root
print(private_root(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path):
    """A process whose temporary directory is `tmp_path`."""

    def start(code):
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def test_a_child_that_ends_by_os_exit_leaves_nothing_for_long(run, tmp_path):
    assert run(CHILD).communicate()[0] == "2\n", "its own and the child's"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_sweep_takes_what_killed_processes_left_alone(run, tmp_path):
    with run(LASTING) as killed, run(LASTING) as living:
        left, kept = (Path(process.stdout.readline().strip()) for process in (killed, living))
        killed.kill()
        killed.wait()
        assert left.is_dir()
        run(CHILD).communicate()
        assert [path for path in (left, kept) if path.is_dir()] == [kept]
        living.kill()


def test_what_is_not_a_root_of_this_user_stays(run, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "jitkern-private-linked00").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "jitkern-private-file0000").touch()
    for name in ("jitkern-private-", "jitkern-private-longer0000", "jitkern-1000", "private0"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    temporary_cache.sweep(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "jitkern-private-others00").mkdir()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        temporary_cache.sweep(tmp_path)
    assert (tmp_path / "jitkern-private-others00").is_dir()
    temporary_cache.sweep(tmp_path)
    assert not (tmp_path / "jitkern-private-others00").is_dir()


def test_a_root_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    lock, swept = temporary_cache.locked, []

    def late(path, flags, *, wait):
        if wait and not swept:
            swept.append(path)
            temporary_cache.sweep(tmp_path)
        return lock(path, flags, wait=wait)

    monkeypatch.setattr(temporary_cache, "locked", late)
    path = temporary_cache.new_root_in(str(tmp_path))
    assert swept and path.is_dir() and path not in swept
    temporary_cache.sweep(tmp_path)
    assert path.is_dir()
