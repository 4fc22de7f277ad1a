import contextlib
import fcntl
import os
import subprocess
import sys
import time

import pytest
from helpers import run_threads

from jitkern import config
from jitkern.cache import lock

pytestmark = pytest.mark.usefixtures("own_locks")

HOLDER = """
import sys, time
from jitkern.cache import lock
with lock.held("name", "x"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_at_a_time():
    inside, worst = [], []

    def work():
        with lock.held("name", "x"):
            inside.append(1)
            worst.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    run_threads(*[work] * 4)
    assert worst == [1, 1, 1, 1]


def test_the_wait_names_the_work_and_is_bounded(holder, monkeypatch, caplog):
    monkeypatch.setattr(lock, "MESSAGE_EVERY", 0.2)
    with config.using(lock_timeout=0.5), lock.held("name", "the thing"):
        pass
    waits = caplog.text.count("waiting for another process, which is compiling the thing")
    assert waits >= 2
    assert "waited 0.5 s for the thing; compiling it here" in caplog.text
    assert holder.poll() is None


def test_an_exception_inside_passes_through_and_frees():
    with pytest.raises(KeyError), lock.held("name", "x"):
        raise KeyError
    with config.using(lock_timeout=0), lock.held("name", "x"):
        pass


def test_somebody_elses_lock_directory_is_not_used(tmp_path):
    link = tmp_path / "jitkern"
    link.symlink_to(tmp_path)
    assert lock.lock_directory(config.current()) != link


def taken(path):
    """Whether somebody holds the lock on the file that has this name now."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def descriptors_of(path):
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(name)), path.stat()):
                found.append(int(name))
    return found


def test_a_child_that_was_forked_holds_no_lock_of_its_parent():
    path = lock.lock_directory(config.current()) / "name.lock"
    with lock.held("name", "x"):
        assert descriptors_of(path)
        if not (child := os.fork()):
            os._exit(len(descriptors_of(path)))
        assert os.waitpid(child, 0)[1] == 0
        assert taken(path)


def test_a_child_that_leaves_its_parents_block_leaves_the_lock():
    path, child = lock.lock_directory(config.current()) / "name.lock", None
    with lock.held("name", "x"):
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            assert taken(path)
    if not child:
        os._exit(0)


def test_a_child_takes_locks_of_its_own():
    if not (child := os.fork()):
        with lock.held("name", "x"):
            os._exit(not taken(lock.lock_directory(config.current()) / "name.lock"))
    assert os.waitpid(child, 0)[1] == 0


def files(directory):
    return sorted(path.name for path in lock.lock_directory(config.current()).iterdir())


def test_a_lock_that_is_released_leaves_no_file(tmp_path):
    with lock.held("0a-1b", "x"):
        assert files(tmp_path) == ["0a-1b.lock"]
    assert files(tmp_path) == []


def test_a_waiter_gets_a_lock_whose_file_was_deleted_under_it(monkeypatch):
    """Whoever opened the file before it was deleted must not take that one for the lock."""
    path = lock.lock_directory(config.current()) / "0a-1b.lock"
    real, opened = os.open, []

    def open_and_release(*arguments, **keywords):
        descriptor = real(*arguments, **keywords)
        if not opened:
            opened.append(descriptor)
            path.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_release)
    with lock.held("0a-1b", "x"):
        assert opened and path.stat().st_nlink == 1
        assert taken(path)


def test_files_of_holders_that_were_killed_long_ago_are_swept(tmp_path):
    directory = lock.lock_directory(config.current())
    for name in ("0a-1b.lock", "0c-1d.lock", "mine.lock", "notes"):
        (directory / name).write_text("")
        os.utime(directory / name, (1, 1))
    (directory / "ab-cd.lock").write_text("")  # of just now
    with lock.held("0c-1d", "x"):
        os.utime(directory / "0c-1d.lock", (1, 1))
        lock.sweep()
        assert files(tmp_path) == ["0c-1d.lock", "ab-cd.lock", "mine.lock", "notes"]
