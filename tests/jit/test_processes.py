"""Several processes, kills and read-only disks, with the real C compiler."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONGEST, guarded, until

CALL = """
import sys, time, pathlib
import torch, jitkern.ops, jitkern
ready, go = map(pathlib.Path, sys.argv[1:3])
x = torch.arange(10.0)
ready.touch()
while not go.exists():
    time.sleep(0.01)
print(jitkern.ops.vec_add(x, x).tolist() == (2 * x).tolist(), jitkern.stats()["compiles"])
"""


def start(code, *args, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, args)],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def slow_compiler(tmp_path: Path) -> str:
    """A c++ that says it has begun, and takes longer than a test."""
    tool = tmp_path / "slow-c++"
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) touch {tmp_path}/begun; sleep 1000 ;; esac\nexec c++ "$@"\n'
    )
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.long
def test_a_process_killed_in_mid_compile_hurts_nobody(tmp_path, cache_dir):
    (tmp_path / "go").touch()
    victim = start(CALL, tmp_path / "ready", tmp_path / "go", CXX=slow_compiler(tmp_path))
    until((tmp_path / "begun").exists, of=[victim])
    until(lambda: guarded(victim.pid))
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert not list(cache_dir.glob("v1/cpu-*/vec_add*"))
    out, err = start(CALL, tmp_path / "ready", tmp_path / "go").communicate(timeout=LONGEST)
    assert out == "True 1\n", err


@pytest.mark.long
@pytest.mark.parametrize(
    ("jobs", "how", "code"),
    [(1, signal.SIGINT, 130), (3, signal.SIGINT, 130), (3, signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_prewarm_ended_in_mid_compile_leaves_nothing(jobs, how, code, tmp_path, cache_dir):
    program = (  # a runner in the background may have had us ignore SIGINT, and children inherit that
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from jitkern.cli import main; sys.exit(main(['prewarm', 'vec_add', '--jobs', '{jobs}']))"
    )
    process = start(program, CXX=slow_compiler(tmp_path))
    until((tmp_path / "begun").exists, of=[process])
    process.send_signal(how)
    try:
        _, err = process.communicate(timeout=LONGEST)  # no child holds its ends any more
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "interrupted" in err or how != signal.SIGINT
    assert not list((cache_dir / "v1" / "tmp").iterdir())
    assert not list(cache_dir.glob("v1/cpu-*/vec_add.f*"))


READ_ONLY_CALL = (
    "import torch, jitkern.ops, jitkern; x = torch.ones(3, dtype=torch.{}); "
    "print((jitkern.ops.vec_add(x, x) == 2).all().item(), jitkern.stats()['compiles'])"
)


@contextlib.contextmanager
def closed_by_modes(root):
    directories = [path for path in (root, *root.rglob("*")) if path.is_dir()]
    for path in directories:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in directories:
            path.chmod(0o755)


@contextlib.contextmanager
def closed_by_a_mount(root):
    mounts = ["mount", "--bind", "-o", "ro", root, root], ["mount", "-o", "remount,ro,bind", root]
    for command in mounts:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", root], check=True)


CLOSED = [  # and whom it stops
    pytest.param(
        closed_by_modes, "cannot be written: Permission denied", id="modes",
        marks=pytest.mark.skipif(os.geteuid() == 0, reason="runs as root, whom no mode stops"),
    ),
    pytest.param(
        closed_by_a_mount, "Read-only file system", id="mount",
        marks=[pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("closed", "says"), CLOSED)
def test_a_closed_cache_serves_when_warm_and_tells_when_cold(closed, says, cache_dir, run_python):
    assert run_python(READ_ONLY_CALL.format("float32")).stdout == "True 1\n"
    with closed(cache_dir):
        warm, cold = (run_python(READ_ONLY_CALL.format(t)) for t in ("float32", "float64"))
        strict = run_python(READ_ONLY_CALL.format("float64"), JITKERN_FALLBACK="raise")
    assert warm.stdout == "True 0\n", warm.stderr
    assert (cold.stdout, cold.stderr.count(says)) == ("True 1\n", 1)
    assert "CacheError: jitkern::vec_add for cpu-" in strict.stderr


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_is_a_clear_error_and_space_mends_it(cache_dir, run_python):
    cache_dir.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "none", cache_dir]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("cannot mount here")
    code = "import torch, jitkern.ops; print(jitkern.ops.vec_add(torch.ones(3), torch.ones(3)).tolist())"
    try:
        (cache_dir / "filler").write_bytes(bytes(500 << 10))
        full = run_python(code)
        (cache_dir / "filler").unlink()
        mended = run_python(code)
    finally:
        subprocess.run(["umount", cache_dir], check=True)
    assert "CacheError: jitkern::vec_add for cpu-" in full.stderr
    assert "no space is left" in full.stderr
    assert mended.stdout == "[2.0, 2.0, 2.0]\n", mended.stderr


def test_a_warm_start_needs_no_compiler_and_no_subprocess(run_python):
    code = """
import subprocess, sys, torch, jitkern.ops, jitkern
if {warm}:
    def refuse(*a, **k): raise AssertionError("a subprocess")
    subprocess.Popen.__init__ = refuse
x = torch.randn(4, 5)
jitkern.ops.vec_add(x, x), jitkern.ops.softmax(x)
print(jitkern.stats()["compiles"], [m for m in ("triton", "sympy", "jitkern.cache.lock", "jitkern.trace.trace", "jitkern.launch.runner") if m in sys.modules])
"""
    assert run_python(code.format(warm=False)).stdout.startswith("2 ")
    done = run_python(code.format(warm=True), PATH="/nonexistent", JITKERN_COMPILE="never")
    assert done.stdout == "0 []\n", done.stderr


def test_import_compiles_nothing_and_touches_no_disk_or_device(cache_dir, fresh_python):
    done = fresh_python(
        "import sys\nimport jitkern\nassert 'torch' not in sys.modules\nimport torch\nbefore = set(sys.modules)\nimport jitkern.ops\n"
        "print(torch.cuda.is_initialized(), jitkern.stats()['compiles'], [m for m in ('triton', 'jitkern.cache.lock', 'sympy') if m in set(sys.modules) - before])"
    )
    assert done.stdout == "False 0 []\n", done.stderr
    assert not cache_dir.exists()
