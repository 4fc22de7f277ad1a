"""A prewarmed cache in a read-only image, for a user with no home of any use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import processes
import pytest

CALL = (
    "import torch, jitkern.ops, jitkern; x = torch.ones(3, dtype=torch.{}); "
    "print((jitkern.ops.vec_add(x, x) == 2).all().item(), jitkern.stats()['compiles'])"
)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A cache with the f32 kernel of vec_add, what launches it, and nothing else."""
    root = tmp_path_factory.mktemp("image") / "layer"
    for _ in range(2):  # the second call leaves plans
        processes.run(
            [sys.executable, "-W", "ignore", "-c", CALL.format("float32")],
            env={**os.environ, "JITKERN_CACHE_DIR": str(root)},
            check=True,
        )
    root.chmod(0o755)
    return root


def listing(root):
    return {
        str(path.relative_to(root)): (path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in (root, *root.rglob("*"))
    }


def over(layer, home):
    """The environment of a process over a layer, whose own cache would lie in a home."""
    own = {"JITKERN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": str(home)}
    return {"JITKERN_SYSTEM_CACHE": str(layer), **own}


HOMES = {
    "empty": lambda tmp: tmp,
    "absent": lambda tmp: tmp / "none" / "home",
    "a device": lambda tmp: "/dev/null",
    "unwritable": lambda tmp: "/proc",
}


@pytest.mark.long
@pytest.mark.parametrize("home", HOMES)
def test_a_layer_serves_and_is_neither_written_nor_touched(image, home, tmp_path, run_python):
    before = listing(image)
    place = over(image, HOMES[home](tmp_path))
    done = run_python(CALL.format("float32"), **place, PATH="/nonexistent", JITKERN_COMPILE="never")
    assert (done.stdout, done.stderr) == ("True 0\n", ""), done.stderr
    assert listing(image) == before
    assert not (tmp_path / ".cache").exists()


@pytest.mark.long
@pytest.mark.parametrize("home", [name for name in HOMES if name != "empty"])
def test_what_the_layer_lacks_is_compiled_for_this_process_alone(image, home, tmp_path, run_python):
    before = listing(image)
    done = run_python(CALL.format("float64"), **over(image, HOMES[home](tmp_path)))
    made_as_root = home == "absent" and os.geteuid() == 0
    assert done.stdout == "True 1\n", done.stderr
    assert ("for this process only" in done.stderr) != made_as_root
    assert listing(image) == before


@pytest.mark.long
def test_where_nothing_can_be_written_one_error_has_the_remedy(run_python):
    code = (
        "import tempfile, torch, jitkern, jitkern.ops\n"
        "def refuse(*a, **k): raise OSError(30, 'Read-only file system')\n"
        "tempfile.mkdtemp = refuse\nx = torch.ones(3)\n"
        "try: jitkern.ops.vec_add(x, x)\n"
        "except jitkern.CacheError as e: print(e)\n"
        "with jitkern.using(fallback='reference'): print(jitkern.ops.vec_add(x, x).tolist())\n"
    )
    done = run_python(code, JITKERN_CACHE_DIR="/proc/none")
    assert "point JITKERN_CACHE_DIR or TMPDIR at one, or prewarm" in done.stdout, done.stderr
    assert done.stdout.endswith("[2.0, 2.0, 2.0]\n"), done.stderr


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_no_call_of_the_system_asks_to_change_a_layer(image, tmp_path):
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-y", "-o", str(trace), "-e", "trace=%file,%desc"]
    program = [sys.executable, "-W", "ignore", "-c", CALL.format("float32")]
    place = {"JITKERN_SYSTEM_CACHE": str(image), "JITKERN_CACHE_DIR": str(tmp_path / "empty")}
    done = subprocess.run(
        [*strace, *program], env={**os.environ, **place, "JITKERN_COMPILE": "never"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.stdout == "True 0\n", done.stderr
    changing = (
        "O_WRONLY", "O_RDWR", "O_CREAT", "utimens", "flock", "mkdir", "rename", "unlink", "chmod", "F_SETLK",
    )  # fmt: skip
    touched = [line for line in trace.read_text().splitlines() if str(image) in line]
    assert len(touched) > 5
    assert [line for line in touched if any(word in line for word in changing)] == []


@pytest.mark.long
def test_a_layer_that_cannot_be_read_is_one_warning(image, tmp_path, run_python):
    if os.geteuid() == 0:
        pytest.skip("runs as root, who can read everything")
    copy = tmp_path / "copy"
    shutil.copytree(image, copy)
    copy.chmod(0)
    done = run_python(CALL.format("float32"), JITKERN_SYSTEM_CACHE=str(copy))
    copy.chmod(0o700)
    assert done.stderr.count("chmod -R a+rX") == 1
