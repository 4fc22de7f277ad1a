import json

import pytest

from jitkern import cache_tools, config, jit
from jitkern.cache import usage
from jitkern.cache.store import Cache

WORK = """
import sys
from pathlib import Path
from jitkern.cache import usage
root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path({root!r})
usage.hit(root, root, 1.5)
usage.hit(root, Path("/layer"), 2.0)
usage.miss(root, "absent", 0.25)
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "cache" / "v1").mkdir(parents=True)
    return tmp_path / "cache"


@pytest.mark.long
def test_the_counts_of_processes_that_ended_add_up(root, run_python):
    for _ in range(2):
        assert run_python(WORK.format(root=str(root))).returncode == 0
    assert usage.total(root) == {
        "hits": {"user": 2, "/layer": 2},
        "misses": {"absent": 2},
        "saved_s": 7.0,
        "compiled_s": 0.5,
    }


@pytest.mark.long
def test_compacting_keeps_the_sum(root, run_python):
    for _ in range(3):
        run_python(WORK.format(root=str(root)))
    before = usage.total(root)
    (root / "v1" / "stats" / "aa.jsonl").write_text('{"hits":{"user":1}}\n')
    usage.compact(root)
    assert len(list((root / "v1" / "stats").iterdir())) == 1
    assert usage.total(root)["hits"]["user"] == before["hits"]["user"] + 1
    assert usage.total(root)["saved_s"] == before["saved_s"]


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\n",
        b"[1]\n",
        b'{"hits": 3}\n',
        b'{"hits": {"user": "x"}}\n',
        b"[" * 99999,
        b'{"other": 1}\n',
    ],
)
def test_damaged_lines_count_nothing(root, junk):
    (root / "v1" / "stats").mkdir()
    (root / "v1" / "stats" / "00.jsonl").write_bytes(junk)
    assert usage.total(root)["hits"] == {}


def test_a_root_that_does_not_exist_or_is_read_only_is_no_error(tmp_path, run_python):
    done = run_python(WORK.format(root=str(tmp_path / "none")))
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_a_fork_counts_only_its_own(root, run_python):
    code = WORK.format(root=str(root)) + (
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: usage.hit(root, root, 1.0)\n"
    )
    assert run_python(code).returncode == 0
    assert usage.total(root)["hits"]["user"] == 2


def test_stats_tell_hits_by_layer_and_misses_by_reason(
    compiler, variant, target, cache_dir, tmp_path
):
    jit.ensure(variant, target)
    jit.ensure(variant, target)
    next(cache_dir.glob("v1/cpu*/*/out.so")).write_bytes(b"")
    jit.ensure(variant, target)
    jit.ensure(variant, target, refresh=True)
    with config.using(cache_dir=tmp_path / "user", system_cache=(cache_dir,)):
        jit.ensure(variant, target)
        (tmp_path / "user" / "v1").mkdir(parents=True)
        usage.flush()
        above = usage.total(tmp_path / "user")
    found = cache_tools.stats(Cache(cache_dir), cache_tools.rows(Cache(cache_dir)))
    assert above["hits"] == {str(cache_dir): 1}
    assert found["hits"] == {"user": 1}
    assert found["misses"] == {"absent": 1, "damaged": 1, "refresh": 1}
    assert found["entries"] == 1
    assert found["bytes_by_op"] == {"test::scale": found["bytes"]}
    assert json.dumps(found)


def test_two_that_compact_at_once_count_nothing_twice(root, monkeypatch):
    stats = root / "v1" / "stats"
    stats.mkdir()
    for name in ("00", "01", "02"):
        (stats / f"{name}.jsonl").write_text('{"hits":{"user":10}}\n')
    real, inside = usage._sum, []

    def sum_while_another_compacts(files):
        if not inside:
            inside.append(1)
            usage.compact(root)
        return real(files)

    monkeypatch.setattr(usage, "_sum", sum_while_another_compacts)
    usage.compact(root)
    monkeypatch.undo()
    assert usage.total(root)["hits"] == {"user": 30}


def test_hits_are_counted_once_after_a_fork(root, run_python):
    code = f"""
import os
from pathlib import Path
from jitkern.cache import usage
root = Path({str(root)!r})
usage.hit(root, root, 1.0)
if os.fork():
    os.wait()
"""
    assert run_python(code).returncode == 0
    assert usage.total(root)["hits"] == {"user": 1}
