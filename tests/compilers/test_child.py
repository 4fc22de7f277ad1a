"""Compilers die with the process that started them, however it ends."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import alive, children, guarded, until

from jitkern.compilers import child_process

TREE = "sh -c '%ssleep 1000 & echo $! > {0}/grandchild; touch {0}/begun; wait'"
TREE, GROUPS = TREE % "", TREE % "set -m; "  # each child in a group of its own, as ninja has them
PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may have had us ignore it
from jitkern.compilers import child_process
child_process.run(["sh", "-c", sys.argv[1]])
"""


def started(code, *words):
    return subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.DEVNULL)


def grandchild_in(folder):
    """The number of the process that a tree has started there."""
    until((folder / "begun").exists)
    return int((folder / "grandchild").read_text())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
@pytest.mark.parametrize("tree", [TREE, GROUPS], ids=["one group", "groups"])
def test_a_compiler_and_its_children_die_with_their_parent(tmp_path, tree, end):
    parent = started(PARENT, tree.format(tmp_path))
    grandchild = grandchild_in(tmp_path)
    assert alive(grandchild)
    if end == signal.SIGKILL:  # which nothing can put off until the guard is there
        until(lambda: guarded(parent.pid))
    parent.send_signal(end)
    parent.wait()
    until(lambda: not alive(grandchild))


SLOW = """
import os, subprocess, sys, time
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
subprocess.Popen = Popen
"""


@pytest.mark.parametrize(
    ("number", "handler", "status"),
    [
        (signal.SIGINT, "", -signal.SIGINT),
        (signal.SIGTERM, "", -signal.SIGTERM),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n", 3),
    ],
    ids=["Ctrl-C", "SIGTERM", "handled SIGTERM"],
)
def test_a_signal_while_a_compiler_starts_does_not_lose_it(tmp_path, number, handler, status):
    code = SLOW + PARENT.replace("child_process.run", f"{handler}child_process.run")
    sent = tmp_path / "sent"
    parent = started(code, TREE.format(tmp_path), str(sent))
    grandchild = grandchild_in(tmp_path)
    parent.send_signal(number)
    sent.touch()
    assert parent.wait() == status
    until(lambda: not alive(grandchild))


def test_a_command_is_killed_at_its_limit_with_its_children(tmp_path, monkeypatch):
    real, limits = subprocess.Popen.communicate, []

    def once_begun(process, text=None, timeout=None):
        if timeout is None:
            return real(process, text)
        limits.append(timeout)
        until((tmp_path / "begun").exists)
        return real(process, text, 0)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_begun)
    command = ["sh", "-c", f"echo said; {TREE.format(tmp_path)}"]
    status, output = child_process.run(command, limit=1.0)
    assert (status, output) == (-9, "said\n\nerror: it did not end within 1.0 seconds")
    assert limits == [1.0]
    until(lambda: not alive(int((tmp_path / "grandchild").read_text())))


def test_a_fork_of_the_parent_does_not_keep_them_alive(tmp_path):
    code = """
import os, sys, threading, time
from pathlib import Path
from jitkern.compilers import child_process
threading.Thread(target=child_process.run, args=(["sh", "-c", sys.argv[1]],), daemon=True).start()
while not Path(sys.argv[2], "begun").exists(): time.sleep(0.01)
pid = os.fork()
if not pid: time.sleep(1000)
Path(sys.argv[2], "fork").write_text(str(pid))
time.sleep(1000)
"""
    parent = started(code, TREE.format(tmp_path), str(tmp_path))
    fork = tmp_path / "fork"
    until(lambda: fork.exists() and fork.read_text())
    grandchild = grandchild_in(tmp_path)
    parent.kill()
    parent.wait()
    until(lambda: not alive(grandchild))
    os.kill(int(fork.read_text()), signal.SIGKILL)


def test_run_returns_status_and_output_and_leaves_no_process():
    before, descriptors = children(os.getpid()), set(os.listdir("/proc/self/fd"))
    done = child_process.run(["sh", "-c", "cat; echo err >&2; exit 3"], text="in ")
    assert done == (3, "in err\n")
    assert children(os.getpid()) <= before
    assert set(os.listdir("/proc/self/fd")) <= descriptors | {str(max(map(int, descriptors)) + 1)}


def test_what_a_killed_command_started_is_killed_too(tmp_path):
    killed = child_process.Child(["sh", "-c", GROUPS.format(tmp_path)])
    grandchild = grandchild_in(tmp_path)
    killed.process.kill()
    killed.process.wait()
    assert alive(grandchild)
    killed.close()
    until(lambda: not alive(grandchild))


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_missing_command_says_so():
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        child_process.run(["/nonexistent/tool"])
    assert open_descriptors() == before


def test_without_a_shell_commands_still_run(monkeypatch):
    real, before = subprocess.Popen, open_descriptors()

    def refuse(command, **options):
        if command[0] == "/bin/sh":
            raise FileNotFoundError(command[0])
        return real(command, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert child_process.run(["echo", "x"]) == (0, "x\n")
    assert open_descriptors() == before


def test_a_child_whose_pipe_cannot_be_made_does_not_run(monkeypatch):
    def no_pipe():
        raise OSError(24, "Too many open files")

    started = []
    monkeypatch.setattr(child_process.os, "pipe", no_pipe)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    with pytest.raises(OSError, match="Too many open files"):
        child_process.Child(["true"], stdin=subprocess.DEVNULL)
    assert not started
    child_process.kill_all()  # which knows none that did not start


def test_killing_what_runs_kills_nothing_later():
    running = child_process.Child(["sleep", "1000"])
    child_process.kill_all()
    assert running.process.wait() == -signal.SIGKILL
    running.close()
    assert child_process.run(["echo", "lives"]) == (0, "lives\n")
