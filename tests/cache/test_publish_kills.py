"""A kill at every call that touches the disk, for everything that changes a cache."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, until
from publishing import (
    KEY,
    SCENARIOS,
    Disk,
    Roots,
    check_that_all_is_well,
    in_a_child,
    kill_at,
    names,
    publish,
)

from jitkern.cache.layout import TAG_TEXT
from jitkern.cache.store import Cache

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="pathlib took its calls from os when it was imported"
)


@pytest.mark.parametrize(
    "scenario",
    ["first publish", *(pytest.param(name, marks=pytest.mark.long) for name in [*SCENARIOS][1:])],
    indirect=True,
)
def test_a_kill_at_any_call_leaves_the_old_the_new_or_nothing(folder, scenario):
    roots = Roots(folder, scenario)
    for n in itertools.count(1):
        root = roots.fresh()

        def work(root=root, n=n):
            os.fsync = lambda descriptor: None  # a kill loses nothing that was written
            with Disk(kill_at(n)):
                scenario.work(Cache(root))

        code = in_a_child(work)
        assert code in (0, -signal.SIGKILL)
        check_that_all_is_well(root, scenario)
        if code == 0:
            break
    assert n > 8


@pytest.mark.long
def test_the_tag_is_whole_after_a_kill_and_the_next_publish(folder):
    for n in itertools.count(1):
        root = folder / str(n)

        def work(root=root, n=n):
            with Disk(kill_at(n)):
                publish(Cache(root, fsync=False), KEY, b"new")

        code = in_a_child(work)
        publish(Cache(root, fsync=False), KEY, b"next")
        assert (root / "CACHEDIR.TAG").read_text() == TAG_TEXT
        if code == 0:
            break


@pytest.mark.long
def test_a_killed_sweep_takes_a_staging_whole_or_not_at_all(folder):
    """A clock that jumped makes others take a live builder for a dead one."""
    for n in itertools.count(1):
        cache = Cache(folder / str(n), fsync=False)
        with cache.staging() as staging:
            for name in ("a.so", "b.so"):
                (staging / name).write_bytes(b"code")
            os.utime(staging, (0, 0))

            def sweep(cache=cache, n=n):
                with Disk(kill_at(n)), cache.staging():
                    pass

            code = in_a_child(sweep)
            assert names(staging) in (["a.so", "b.so"], [])
            assert bool(names(staging)) == staging.exists()
        if code == 0:
            break


def changes_of(work):
    """How many calls that change something on the disk `work` makes."""
    seen = []
    with Disk(lambda call, changes: seen.append(call) if changes else None):
        work()
    return len(seen)


@pytest.mark.long
def test_after_a_kill_in_a_first_call_the_next_process_succeeds(folder, ensure):
    total = changes_of(lambda: ensure(folder / "whole"))
    for i in range(10):
        root = folder / str(i)

        def first(root=root, n=1 + i * (total - 1) // 10):
            with Disk(kill_at(n)):
                ensure(root)

        def second(root=root):
            assert ensure(root).read("out.so") == b"code of f32"

        assert in_a_child(first) == -signal.SIGKILL
        assert in_a_child(second) == 0
        assert names(root / "v1" / "bad") == []


PUBLISH = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from jitkern.cache.store import Cache
from jitkern.cache.key import Key, digest_of
from jitkern.cache.layout import TAG_TEXT
from jitkern.cache.manifest import Manifest
inputs = {"op": "test::op", "target": "cpu-x-torch2"}
key = Key(inputs, digest_of(inputs), "op")
cache = Cache(Path(sys.argv[2]))
assert "torch" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
with cache.staging() as staging:
    (staging / "out.so").write_bytes(b"new")
    cache.publish(key, staging, Manifest(inputs))
"""
CALLS = {
    "rename": "?rename,?renameat,?renameat2",
    "fsync": "fsync",
    "openat": "?open,openat",
    "mkdir": "?mkdir,mkdirat",
    "write": "write",
    "chmod": "?chmod,fchmodat",
    "remove": "?unlink,unlinkat,?rmdir",
}


def publish_under_strace(root, *options):
    """The exit code of a process that publishes and begins to be traced just before; None if it cannot be."""
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISH, str(REPOSITORY), str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        with subprocess.Popen(
            ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(process.pid), *options],
            stderr=subprocess.DEVNULL,
        ) as tracer:
            status = Path(f"/proc/{process.pid}/status")
            until(lambda: "TracerPid:\t0\n" not in status.read_text() or tracer.poll() is not None)
            if tracer.poll() is not None:
                process.kill()
                return None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.wait()


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_system_call_leaves_a_whole_entry_or_none(folder, call):
    if publish_under_strace(folder / "probe", "-e", "trace=fsync") is None:
        pytest.skip("this machine does not let a process be traced")
    scenario = SCENARIOS["first publish"]
    for n in itertools.count(1):
        root = folder / str(n)
        code = publish_under_strace(root, "-e", f"inject={CALLS[call]}:signal=SIGKILL:when={n}")
        assert code in (0, -signal.SIGKILL)
        check_that_all_is_well(root, scenario)
        if code == 0:
            break
    assert n > 1
