"""`jitkern cache …`, as a user types it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitkern import cache_tools, config
from jitkern.cache import records
from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import EntryFilter
from jitkern.source.closure import closure_of
from jitkern.source.key import make_key
from jitkern.source.kinds import Generated

OTHER = "cuda-sm_90-cu130-torch2.11.0"


@pytest.fixture
def put(cache_dir, variant, target):
    """Publish an entry of this op for this target, last used `age` seconds ago."""

    def put(op="test::scale", target=target, size=1000, age=0.0, record="", **variant_fields):
        made = variant._replace(op=op, **variant_fields)
        key = make_key(made, target, (), closure_of(made.source))
        if record:
            key = records.record_key(record, op, str(target), key.label, {})
        with (cache := Cache(cache_dir)).staging() as staging:
            if not record:
                (staging / "out.so").write_bytes(bytes(size))
            manifest = Manifest(key.inputs, compiler={"name": "cc", "version": "1"}, seconds=2.0)
            entry = cache.publish(key, staging, manifest)
        os.utime(entry.path / NAME, (time.time() - age,) * 2)
        return entry

    return put


@pytest.fixture
def rows(cli):
    def rows(*arguments):
        code, out, err = cli("cache", *arguments, "--json")
        assert code == 0, err
        report = json.loads(out.splitlines()[-1])
        assert report["schema"] == 1
        return report["entries"]

    return rows


def test_ls_has_the_fields_that_programs_read(put, rows, cache_dir):
    put()
    (row,) = rows("ls")
    assert {"path", "op", "variant", "target", "compiler", "bytes", "age_s", "ok"} <= set(row)
    assert (row["op"], row["variant"], row["kind"], row["compiler"]) == (
        "test::scale", "f32", "cc", "cc 1",
    )  # fmt: skip
    assert row["layer"] == str(cache_dir)


def test_ls_filters(put, rows, target):
    put("jitkern::softmax")
    put("mylib::softmax", size=50000)
    put("mylib::gelu", age=3 * 86400, target=target._replace(torch="2.11.0"))
    assert [r["op"] for r in rows("ls", "--op", "softmax")] == ["jitkern::softmax"]
    assert [r["op"] for r in rows("ls", "--op", "mylib::*")] == ["mylib::gelu", "mylib::softmax"]
    both = rows("ls", "--op", "mylib::gelu", "--op", "softmax")
    assert {r["op"] for r in both} == {"mylib::gelu", "jitkern::softmax"}
    assert [r["op"] for r in rows("ls", "--target", "*torch2.11.0")] == ["mylib::gelu"]
    printed = str(target).partition("-")[2]
    for name in (printed, target.arch, f"cpu-{target.arch}", "cpu"):
        assert len(rows("ls", "--target", name)) == (2 if name == printed else 3), name
    assert [r["op"] for r in rows("ls", "--larger-than", "40k")] == ["mylib::softmax"]
    assert [r["op"] for r in rows("ls", "--older-than", "2d")] == ["mylib::gelu"]
    assert rows("ls", "--kind", "triton") == []


def test_ls_sorts_and_limits(put, rows):
    put("mylib::a", size=3000)
    put("mylib::b", size=9000)
    put("mylib::c", size=6000)
    by_size = [r["op"] for r in rows("ls", "--sort", "size")]
    assert by_size == ["mylib::b", "mylib::c", "mylib::a"]
    assert [r["op"] for r in rows("ls", "--sort", "size", "--limit", "1")] == ["mylib::b"]
    assert [r["op"] for r in rows("ls", "--sort", "size", "--reverse")] == by_size[::-1]
    newest = [r["age_s"] for r in rows("ls", "--sort", "age")]
    assert newest == sorted(newest)


def test_ls_lists_layers_too(put, rows, cache_dir, tmp_path):
    put()
    with config.using(cache_dir=tmp_path / "user", system_cache=(cache_dir,)):
        assert [r["layer"] for r in rows("ls")] == [str(cache_dir)]


def test_verify_finds_every_damage_and_exits_1(put, cli, rows):
    good, bad = put("mylib::good"), put("mylib::bad")
    assert cli("cache", "verify")[0] == 0
    (bad.path / "out.so").write_bytes(b"\1" + bytes(999))
    assert all(row["ok"] for row in rows("ls"))  # ls looks at sizes alone
    code, out, err = cli("cache", "verify")
    assert (code, out) == (1, f"{bad.path}: out.so is not what was published\n")
    assert "2 entries, 1 damaged" in err
    assert [r["path"] for r in rows("ls", "--damaged")] == [str(bad.path)]
    report = json.loads(cli("cache", "verify", "--json")[1].splitlines()[-1])
    assert report["totals"]["damaged"] == 1
    assert {r["path"]: r["ok"] for r in report["entries"]} == {
        str(good.path): True, str(bad.path): False,
    }  # fmt: skip
    (bad.path / NAME).write_bytes(b"{")
    assert [r["path"] for r in rows("ls", "--damaged")] == [str(bad.path)]


def test_stats_tell_sizes_by_target_and_op(put, cli):
    put("mylib::a")
    put("mylib::b")
    report = json.loads(cli("cache", "stats", "--json")[1].splitlines()[-1])
    assert set(report) == {"schema", "totals"}
    totals = report["totals"]
    assert totals["entries"] == 2
    assert set(totals["bytes_by_op"]) == {"mylib::a", "mylib::b"}
    assert sum(totals["bytes_by_target"].values()) == totals["bytes"]
    out = cli("cache", "stats")[1]
    assert "entries          2, " in out and "mylib::a" in out


@pytest.mark.parametrize("command", ["ls", "verify", "stats", "clear --yes", "pack -o x.tar"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("--op mylib::scle", "has the op `mylib::scle`; did you mean mylib::scale?"),
        ("--op scle", "has the op `scle`; did you mean mylib::scale?"),
        ("--op mylib", "has the op `mylib`; did you mean mylib::*?"),
        ("--op mylib::scale --op mylib::scle", "has the op `mylib::scle`"),
        ("--target cuda-sm_9", "has the target `cuda-sm_9`"),
        ("--layer /nonexistent", "has the layer `/nonexistent`"),
    ],
)
def test_a_misspelt_name_exits_2_everywhere(put, cli, command, name, says):
    entry = put("mylib::scale")
    code, out, err = cli("cache", *command.split(), *name.split())
    assert (code, out, says in err) == (2, "", True), err
    assert entry.path.exists()
    assert cli("cache", "ls", "--op", "nosuch*")[0] == 0  # a pattern may fit nothing


@pytest.mark.parametrize("gone", ["stdout", "stderr"])
def test_a_reader_that_goes_away_leaves_the_exit_code(put, cache_dir, gone):
    (put().path / "out.so").write_bytes(b"")
    code = "import sys; from jitkern.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "cache", "verify", "--cache-dir", str(cache_dir)]
    read, write = os.pipe()
    os.close(read)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, gone: write}
    done = subprocess.run(command, check=False, text=True, **streams)
    os.close(write)
    assert done.returncode == 1
    assert "damaged" in (done.stderr or "") or "wrong size" in (done.stdout or "")


def test_what_prints_a_line_prints_json_too(put, cli, cache_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put()
    key = str(tmp_path / "key")
    for command, field, value in (
        ("cache dir", "path", str(cache_dir)), (f"cache keygen {key}", "path", key),
        (f"cache sign --key {key}", "signed", 1),
        ("init --kernel relu", "files", ["relu/kernel.py", "relu/relu.cpp", "relu/relu.cu"]),
    ):  # fmt: skip
        code, out, err = cli(*command.split(), "--json")
        assert (code, json.loads(out)[field]) == (0, value), err


def test_an_empty_cache_is_no_error(cli, cache_dir):
    for command in ("ls", "stats", "verify", "prune"):
        assert cli("cache", command)[0] == 0, command
    assert not cache_dir.exists()


def test_prune_asks_says_and_does(put, cli):
    old, new = put("mylib::old", age=90 * 86400), put("mylib::new")
    assert cli("cache", "prune")[0] == 2  # no terminal, and no --yes
    code, out, err = cli("cache", "prune", "--dry-run")
    assert (code, out) == (0, f"{old.path}\n")
    assert "would evict 1 entry" in err
    assert old.path.exists()
    code, out, _ = cli("cache", "prune", "--yes", "--json")
    assert json.loads(out)["removed"] == [str(old.path)]
    assert not old.path.exists() and new.path.exists()
    assert cli("cache", "prune", "--max-size", "1", "--yes")[0] == 0
    assert not new.path.exists()


def test_clear_removes_what_is_chosen_and_by_default_all(put, cli):
    a, b, c = put("mylib::a"), put("mylib::b"), put("mylib::c")
    assert cli("cache", "clear", "--op", "mylib::a", "--yes")[0] == 0
    assert [entry.path.exists() for entry in (a, b, c)] == [False, True, True]
    assert cli("cache", "clear", "--yes")[0] == 0
    assert [entry.path.exists() for entry in (b, c)] == [False, False]


@pytest.mark.parametrize("verb", ["clear", "prune"])
def test_what_earlier_versions_kept_of_other_jits_is_deleted(verb, put, cli, cache_dir, tmp_path):
    """Their folders in `v1/run`; but nothing that a link leads to, and nothing in a root of others."""
    put("mylib::a")
    old = cache_dir / "v1" / "run"
    (old / "cpu-x86_64-torch2.13.0" / "numba-0a1b2c3d").mkdir(parents=True)
    (old / "starts").mkdir()
    (old / "starts" / "%usr%bin%python").write_bytes(b"a note")
    assert cli("cache", verb, "--dry-run")[0] == 0
    assert old.is_dir()
    assert cli("cache", verb, "--yes")[0] == 0
    assert not old.exists()
    (tmp_path / "mine").mkdir()
    old.symlink_to(tmp_path / "mine")
    assert cli("cache", verb, "--yes")[0] == 0
    assert (tmp_path / "mine").is_dir()
    (tmp_path / "other" / "v1" / "run").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("not a cache")
    assert cli("cache", verb, "--yes", "--cache-dir", str(tmp_path / "other"))[0] == 0
    assert (tmp_path / "other" / "v1" / "run").is_dir()


def test_explain_says_in_words_what_sets_two_entries_apart(put, cli, target, source):
    put()
    cuda = target._replace(device="cuda", arch="sm_90", cuda="130", torch="2.11.0")
    alone = put(target=cuda, template=(("T", "f64"),))
    out = cli("cache", "explain", alone.manifest.digest[:12])[1]
    assert "no other entry of this op has the same device and kind" in out
    cuda = target._replace(arch="aarch64", torch="2.11.0")
    (Path(source.folder) / "scale.cpp").write_text(
        'extern "C" void scale(float* out) { *out = 2; }\n'
    )
    other = put(target=cuda, template=(("T", "f64"),))
    code, out, _ = cli("cache", "explain", other.manifest.digest[:12])
    assert code == 0
    assert "    scale.cpp differs\n" in out
    assert "    arch is x86_64 instead of aarch64\n" in out
    assert "    Torch is 2.13.0 instead of 2.11.0\n" in out
    assert "    template argument T is f32 instead of f64\n" in out
    assert cli("explain", other.manifest.digest[:12])[1] == out
    (row,) = json.loads(cli("explain", other.manifest.digest, "--json")[1])["entries"]
    assert len(row["differences"]) >= 4
    assert cli("explain", "0123456789abcdef")[0] == 2


@pytest.mark.parametrize(
    ("there", "wanted", "line"),
    [
        ({"flags": ["-O2", "-g"]}, {"flags": ["-O3", "-g"]}, "extra flag -O2"),
        ({"flags": ["-a", "-b"]}, {"flags": ["-b", "-a"]}, "order of the flags"),
        ({"schema": 1}, {"schema": 2}, "layout of jitkern's entries is 1 instead of 2"),
        ({"environment": {"X": None}}, {"environment": {"X": "1"}}, "variable X is absent instead of 1"),
        ({"source": {"closure": {}}}, {"source": {"closure": {"a.h": "0"}}}, "a.h is new"),
        ({"source": {"closure": {"a.h": "0"}}}, {"source": {"closure": {}}}, "a.h is no longer used"),
        ({"source": {"versions": {"cutlass": "4.6"}}}, {"source": {"versions": {"cutlass": "4.7"}}}, "version of cutlass is 4.6 instead of 4.7"),
        ({"target": "odd"}, {"target": "cpu-x86_64-torch2.13.0"}, "target is odd instead of cpu-x86_64-torch2.13.0"),
        ({"variant": {"signature": ["f32"]}}, {"variant": {"signature": ["f64"]}}, "missing argument type f64"),
        ({"which": "0"}, {"which": "1"}, "the content of the record differs, such as the program for the same kind of call"),
    ],
)  # fmt: skip
def test_differences_in_words(there, wanted, line):
    assert line in cache_tools.differences(there, wanted)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ls", "--older-than", "soon"), "expected 30d"),
        (("prune", "--older-than", "30"), "`30` has no unit: expected 30d or 30s"),
        (("ls", "--larger-than", "big"), "expected 500MiB"),
        (("ls", "--sort", "colour"), "invalid choice"),
        (("ls", "--limit", "-1"), "not a number from 0 up"),
        (("prune", "--max-size", "x"), "expected 500MiB"),
        (("unpack",), "required"),
        (("unpack", "-q", "--allow-unsinged"), "did you mean --allow-unsigned?"),
        (("unpack", "--allow", "-v"), "required"),
        (("nosuch",), "invalid choice"),
    ],
)
def test_bad_options_are_usage_errors(cli, arguments, says):
    code, _, err = cli("cache", *arguments)
    assert (code, says in err) == (2, True), err


def test_a_target_means_the_host_code_for_it_too(put, rows, target):
    device = target._replace(device="cuda", arch="sm_90", cuda="130")
    put("mylib::a", target=device)
    put("mylib::b", target=device._replace(platform="linux_x86_64"))
    put("mylib::c", target=device._replace(torch="2.13.01"))
    assert [r["op"] for r in rows("ls", "--target", str(device))] == ["mylib::a", "mylib::b"]


def test_a_bundle_brings_the_runtime_that_serves_its_calls(put, target, cache_dir):
    host = target._replace(platform="linux_x86_64")
    runtime = Generated("runtime.c", text="int x;")
    put("mylib::a", target=host, record="call")
    put("jitkern::runtime", target=host, source=runtime)
    put("jitkern::runtime", target=host._replace(torch="2.11.0"), source=runtime)
    put("mylib::b", target=host)
    found = [entry.op for entry in cache_tools.chosen(Cache(cache_dir), EntryFilter(op="mylib::a"))]
    assert found == ["mylib::a", "jitkern::runtime"]
    found = [entry.op for entry in cache_tools.chosen(Cache(cache_dir), EntryFilter(op="mylib::b"))]
    assert found == ["mylib::b", "jitkern::runtime"]


@pytest.mark.parametrize("verb", ["pack", "wheel", "sign"])
def test_what_is_removed_meanwhile_is_left_out(verb, put, cli, cache_dir, tmp_path, monkeypatch):
    gone, kept = put("mylib::a"), put("mylib::b")
    key = tmp_path / "key"
    if verb == "sign":
        pytest.importorskip("cryptography")
        cache_tools.keygen(key)
    chosen = cache_tools.chosen(Cache(cache_dir), EntryFilter())
    cache_tools.remove(Cache(cache_dir), [gone.path])
    monkeypatch.setattr(cache_tools, "chosen", lambda *a: chosen)
    arguments = {
        "pack": ("pack", "-o", str(tmp_path / "b.tar")),
        "wheel": ("pack", "--wheel", "-o", str(tmp_path)),
        "sign": ("sign", "--key", str(key)),
    }[verb]
    code, _, err = cli("cache", *arguments)
    assert code == 0, err
    if verb != "wheel":
        assert err.startswith("1 entry")
    cache_tools.remove(Cache(cache_dir), [kept.path])
    assert cli("cache", *arguments)[0] == 1


@pytest.fixture
def looked_at(monkeypatch):
    """The entries that were read whole."""
    looked_at = []
    real = Cache.entry_at
    note = lambda *a: looked_at.append(a[2].name.partition(".scale.")[0]) or real(*a)
    monkeypatch.setattr(Cache, "entry_at", note)
    return looked_at


def test_few_entries_are_read_where_few_are_meant(put, cli, looked_at):
    for name in "abcdef":
        put(f"mylib::{name}", size=1000 * ord(name))

    def read_by(*arguments):
        looked_at.clear()
        assert cli("cache", *arguments)[0] == 0
        return looked_at

    assert read_by("ls", "--limit", "2") == ["mylib.a", "mylib.b"]
    assert read_by("ls", "--sort", "size", "--limit", "1") == ["mylib.f"]
    assert read_by("ls", "--op", "mylib::c") == ["mylib.c"]
    assert read_by("ls", "--op", "*::[ab]") == [f"mylib.{name}" for name in "abcdef"]
    assert read_by("ls", "--larger-than", "102300") == ["mylib.f"]
    assert read_by("show", "mylib.d") == ["mylib.d"]
    assert read_by("explain", "mylib.d")[:1] == ["mylib.d"]
    assert read_by("stats") == []
    assert sorted(read_by("verify")) == [f"mylib.{name}" for name in "abcdef"]


def test_show_refuses_a_text_of_several_entries(put, cli):
    entries = [put("mylib::a", template=(("T", f"N{i}"),)) for i in range(12)]
    for text in ("mylib::a", ""):
        code, out, err = cli("cache", "show", text)
        assert (code, out, len(err.splitlines())) == (2, "", 11)
        assert "names 12 entries:" in err and "by its digest" in err
        assert "`jitkern cache ls --op mylib::a` prints all" in err
    alone = entries[0].path.name
    assert cli("cache", "show", alone)[1].splitlines()[0] == str(entries[0].path)
    code, _, err = cli("cache", "show", "mylib")
    assert code == 2
    assert "did you mean mylib::a? `jitkern cache ls` prints all, with their digests" in err
    assert cli("cache", "ls", "--target", "x86_46")[2].count("did you mean x86_64?") == 1


def test_an_entry_is_found_by_its_digest(put, cli):
    entry = put("mylib::a")
    put("mylib::b")
    for length in (6, 16, 40, 64):
        code, out, _ = cli("cache", "show", entry.manifest.digest[:length])
        assert (code, out.splitlines()[0]) == (0, str(entry.path))
    assert cli("cache", "show", entry.manifest.digest[:16] + "x" * 4)[0] == 2


@pytest.mark.parametrize("verb", ["stats", "ls", "verify"])
def test_what_is_removed_while_it_is_listed_is_not_damaged(verb, put, cli, monkeypatch):
    gone = put("mylib::a").path
    put("mylib::b")
    places = Cache.places

    def places_then_remove(cache, named=None):
        found = list(places(cache, named))
        cache.remove(gone)
        return iter(found)

    monkeypatch.setattr(Cache, "places", places_then_remove)
    code, out, _ = cli("cache", verb, "--json")
    report = json.loads(out.splitlines()[-1])
    if verb == "stats":
        assert (code, report["totals"]["entries"], report["totals"]["damaged"]) == (0, 1, 0)
    else:
        rows = report["entries"]
        assert (code, [(row["op"], row["ok"]) for row in rows]) == (0, [("mylib::b", True)])
    assert not gone.exists()


def test_stats_count_what_cannot_be_read(put, cli):
    put("mylib::a")
    (put("mylib::b").path / NAME).write_text("{}")
    totals = json.loads(cli("cache", "stats", "--json")[1].splitlines()[-1])["totals"]
    assert (totals["entries"], totals["damaged"]) == (2, 1)


WITHOUT_TORCH = """
import sys
from jitkern.cli import main
assert main(sys.argv[1:]) == 0
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("command", ["cache dir", "cache ls", "cache stats", "cache verify"])
def test_a_command_on_the_cache_waits_for_no_import_of_torch(command, cache_dir):
    arguments = [sys.executable, "-c", WITHOUT_TORCH, *command.split()]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
