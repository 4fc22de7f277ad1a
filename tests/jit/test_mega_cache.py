"""Torch's mega-cache carries what a process found or built, to one that then compiles nothing."""

from __future__ import annotations

import logging

import pytest

from jitkern import config, jit, mega_cache
from jitkern.cache import events
from jitkern.cache.store import Cache

cache = pytest.importorskip("torch.compiler._cache")

CALL = """
x = torch.ones(3, 4)
assert torch.equal(jitkern.ops.vec_add(x, x), 2 * x)
assert torch.allclose(jitkern.ops.softmax(x), torch.softmax(x, -1))
from jitkern.runtime.specializer import settle
settle()
"""
SAVE = (
    "import torch, jitkern.ops\n" + CALL + "import pathlib\n"
    "loaded = {name.partition('.')[2] for name in sys.modules if name.startswith('torch.')}\n"
    "assert not {'_inductor.codecache', '_dynamo.convert_frame'} & loaded\n"
    "content, info = torch.compiler.save_cache_artifacts()\n"
    "pathlib.Path('saved').write_bytes(content)\n"
    "print(sorted(info.jitkern_artifacts))\n"
)
LOAD = (
    "import torch, pathlib, jitkern\n{before}\n"
    "info = torch.compiler.load_cache_artifacts(pathlib.Path('saved').read_bytes())\n"
    "print(sorted(info.jitkern_artifacts))\nimport jitkern.ops\n" + CALL + "print(jitkern.stats())"
)


def places(root):
    return sorted(f"{path.parent.name}/{path.name}" for path in Cache(root).paths())


@pytest.mark.long
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_the_first_call_after_loading_compiles_nothing(start, cache_dir, tmp_path, run_python):
    for _ in range(1 + (start == "warm")):
        saved = run_python(f"import sys\n{SAVE}")
        assert saved.returncode == 0, saved.stderr
    listed = eval(saved.stdout)
    assert listed == places(cache_dir)
    names = {name.partition("/")[2].partition("-")[0] for name in listed}
    assert {"runtime", "vec_add.f32"} <= names
    other = tmp_path / "other"
    done = run_python(
        LOAD.format(before="import jitkern.mega_cache"),
        JITKERN_CACHE_DIR=str(other), JITKERN_COMPILE="never", PATH="/nonexistent",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    info, stats = map(eval, done.stdout.splitlines())
    assert info == listed
    assert (stats["compiles"], stats["runtimes"], stats["hits"]) == (0, 0, 2)
    assert set(places(other)) >= set(listed)


@pytest.mark.long
def test_ops_imported_before_loading_find_the_kernels_too(tmp_path, run_python):
    assert run_python(f"import sys\n{SAVE}").returncode == 0
    done = run_python(
        LOAD.format(before="import jitkern.ops"),
        JITKERN_CACHE_DIR=str(tmp_path / "other"), JITKERN_COMPILE="never",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout.splitlines()[1])["compiles"] == 0


@pytest.fixture
def saved(variant, target, compiler):
    """The artifact of one entry as Torch gets it, and its place and content."""
    with cache.CacheArtifactManager.with_fresh_cache():
        entry = jit.ensure(variant, target)
        (artifact,) = cache.CacheArtifactManager._new_cache_artifacts[mega_cache.KIND]
    return artifact, f"{entry.path.parent.name}/{entry.path.name}", entry


def taken_in(tmp_path, place, content):
    """What a cache has after it got `content` for `place`."""
    with config.using(cache_dir=tmp_path / "taker"):
        cache.CacheArtifactFactory.create(mega_cache.KIND, place, content).populate_cache()
    return places(tmp_path / "taker")


def test_an_entry_is_read_when_it_is_saved_and_not_before(saved, tmp_path, caplog):
    artifact, place, entry = saved
    assert artifact.key == place
    assert taken_in(tmp_path, place, artifact.content) == [place]
    with config.using(cache_dir=tmp_path / "taker"):
        found = next(iter(jit.open_cache().entries()))[1]
    assert (found.manifest, found.read("out.so")) == (entry.manifest, entry.read("out.so"))
    (entry.path / "out.so").write_bytes(b"another")
    assert (artifact.content, "is not saved" in caplog.text) == (b"", True)
    assert taken_in(tmp_path, place, b"") == [place]


def test_what_is_no_whole_entry_is_a_warning_and_nothing_else(saved, tmp_path, caplog):
    artifact, place, _ = saved
    whole = artifact.content
    bad = {
        "a bit": whole[:-1] + bytes([whole[-1] ^ 1]),
        "a bit of a file": whole[:-1600] + bytes([whole[-1600] ^ 1]) + whole[-1599:],
        "short": whole[:-1],
        "long": whole + b"x",
        "twice": whole + whole,
        "no bundle": b"[" * 100000,
    }
    for what, content in bad.items():
        with caplog.at_level(logging.WARNING):
            assert taken_in(tmp_path, place, content) == [], what
        assert caplog.text.count("is not published") == 1, what
        caplog.clear()
    target, _, name = place.partition("/")
    for other in (f"../{name}", f"{target}/../{name}", f"{target}/x-0", f"bad/{name}", name, ""):
        assert taken_in(tmp_path, other, whole) == []


def test_a_cache_that_cannot_be_written_is_a_warning(saved, tmp_path, caplog):
    artifact, place, _ = saved
    (tmp_path / "taker").write_text("a file")
    with config.using(cache_dir=tmp_path / "taker"):
        cache.CacheArtifactFactory.create(mega_cache.KIND, place, artifact.content).populate_cache()
    assert "is not published" in caplog.text


def test_every_entry_is_followed_once_and_those_before_too(variant, target, compiler, monkeypatch):
    monkeypatch.setattr(events, "followers", [])
    entry = jit.ensure(variant, target)
    seen = []
    events.follow(seen.append)
    jit.ensure(variant, target)
    assert seen.count(entry.path) == 1


def test_a_torch_without_it_is_left_alone(run_python):
    done = run_python(
        "import sys, torch\nsys.modules['torch.compiler._cache'] = None\n"
        "import jitkern.ops, jitkern.cache.events\nassert not jitkern.cache.events.followers"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["import jitkern.ops", "import torch.compiler._cache"])
def test_our_kind_is_registered_whichever_module_comes_first(first, run_python):
    done = run_python(
        f"import torch\n{first}\nimport jitkern.ops\n"
        "from torch.compiler._cache import CacheArtifactFactory\n"
        "assert 'jitkern' in CacheArtifactFactory._artifact_types"
    )
    assert done.returncode == 0, done.stderr


def test_an_import_of_ops_leaves_the_module_of_torch_for_later(run_python):
    done = run_python(
        "import sys, torch\nbefore = {*sys.modules}\nimport jitkern.ops\n"
        "new = {n for n in {*sys.modules} - before if n.startswith('torch.')}\nassert not new, new"
    )
    assert done.returncode == 0, done.stderr
