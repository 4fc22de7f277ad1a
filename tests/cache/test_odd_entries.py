"""Entries whose seals are right and whose content is odd: a miss, put aside, and built again."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import processes
import pytest
from helpers import published

from jitkern import config, jit
from jitkern.cache.key import Key, canonical, digest_of
from jitkern.cache.layout import is_entry_name
from jitkern.cache.manifest import MAX_BYTES, NAME, Manifest
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.loading.loader import load
from jitkern.ops import vec_add
from jitkern.runtime import records
from jitkern.source.closure import closure_of
from jitkern.source.key import make_key
from jitkern.source.kinds import Variant
from jitkern.target import Target

CALL = (
    "import torch, jitkern, jitkern.ops\n"
    "built = []\n"
    "jitkern.on_compile(lambda event: built.append(event.variant) if event.status == 'built' else 0)\n"
    "x = torch.ones(9)\n"
    "assert torch.equal(jitkern.ops.vec_add(x, x), 2 * x)\n"
    "from jitkern.runtime.specializer import settle\nsettle()\nprint(built)\n"
)


def sealed(path, change=lambda body: body, **fields):
    """Write the manifest of an entry with other fields, or another text, and a seal that is right."""
    found = {**json.loads((path / NAME).read_bytes()), **fields}
    found.pop("sha256")
    body = change(canonical(found)[:-1])
    seal = hashlib.sha256(body).hexdigest().encode()
    (path / NAME).write_bytes(body + b',"sha256":"%s"}\n' % seal)


def with_artifact(path, data=None, **artifact):
    """Give the first artifact of an entry this content, and say that of it in the manifest."""
    found = json.loads((path / NAME).read_bytes())["artifacts"]
    name = next(iter(found))
    if data is not None:
        (path / name).write_bytes(data)
        artifact = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sealed(path, artifacts={**found, name: {**found[name], **artifact}})


def with_seconds(path, text):
    sealed(path, lambda body: re.sub(rb'"seconds":[^,]+', b'"seconds":' + text, body))


def with_inputs(path, **inputs):
    found = json.loads((path / NAME).read_bytes())["inputs"]
    sealed(path, inputs={**found, **inputs})


KERNELS = {
    "size 2**63": lambda path: with_artifact(path, size=2**63),
    "size 2**62": lambda path: with_artifact(path, size=2**62),
    "size 2**39": lambda path: with_artifact(path, size=2**39),
    "seconds of 400 digits": lambda path: with_seconds(path, b"9" * 400),
    "negative seconds": lambda path: with_seconds(path, b"-1"),
    "seconds of 1e300": lambda path: with_seconds(path, b"1e+300"),
    "seconds true": lambda path: with_seconds(path, b"true"),
    "no symbol": lambda path: sealed(path, meta={}),
    "odd parameters": lambda path: sealed(path, meta={"parameters": 2**70}),
    "odd artifact": lambda path: sealed(path, meta={"artifact": ["../x"]}),
    "meta of lists": lambda path: sealed(path, meta={"artifact": {}, "symbol": [], "parameters": [None, {}, 1e9]}),
    "an empty library": lambda path: with_artifact(path, b""),
    "text for a library": lambda path: with_artifact(path, b"[]"),
}  # fmt: skip
WHOLE = {
    "program": [[], [], [], 0, 0, 0, 0, 0, 0], "kernels": [], "runtime": None, "example": "",
    "constant": False, "variants": None, "files": [], "absent": [],
}  # fmt: skip
CONTENTS = [
    *("null", "1", "[]", "{}", '"call"', "[null,null,null,null]"),
    *(
        json.dumps({**WHOLE, **odd})
        for odd in (
            {"program": ["abc", [], "", 0]}, {"kernels": [["../..", "x", 3]]}, {"runtime": 3},
            {"files": [[9, "x"]], "absent": [[0, 0]]}, {"files": [[[9, "x"], "y"]]},
            {"files": [[[0, "no_such.h"], "y"]]}, {"absent": [[0, "light.h"]]}, {"absent": 3},
            {"variants": 3}, {"variants": [["f", [], [], []]]}, {"variants": [[3, 3]]},
        )
    ),
]  # fmt: skip


def with_content(path, text, *, agreeing=False):
    """Put this content into a record; `agreeing`: under the name that such a content has."""
    content = json.loads(text)
    sealed(path, meta={"content": content})
    if agreeing:
        with_inputs(path, which=digest_of(content))
        digest = Manifest.decode((path / NAME).read_bytes()).digest
        path = path.rename(path.with_name(f"{path.name.rpartition('-')[0]}-{digest[:16]}"))
    return path


@pytest.fixture
def variant(source):
    return Variant("test::scale", source, "scale")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache in which a kernel and the record of a call lie."""
    root = tmp_path_factory.mktemp("made") / "cache"
    environment = {**os.environ, "JITKERN_CACHE_DIR": str(root)}
    processes.run([sys.executable, "-W", "ignore", "-c", CALL], env=environment, check=True)
    return root


@pytest.fixture
def warm(made, cache_dir):
    shutil.copytree(made, cache_dir)
    return cache_dir


def the_entry(root, prefix):
    (path,) = (path for path in Cache(root).paths() if path.name.startswith(prefix))
    return path


@pytest.mark.long
@pytest.mark.parametrize("odd", KERNELS)
def test_an_odd_kernel_is_built_again_once(odd, variant, source, monkeypatch):
    monkeypatch.setattr("jitkern.jit.load.LOADED", {})
    target = Target.current("cpu")
    path = jit.ensure(variant, target).path
    KERNELS[odd](path)
    assert jit.loaded(variant, target).address
    assert len(list(path.parents[1].joinpath("bad").iterdir())) == 1
    assert load(source, jit.open_cache().find(jit.key_of(variant, target))).address


@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize("odd", CONTENTS)
def test_an_odd_record_is_none(odd, agreeing, warm):
    path = with_content(the_entry(warm, "vec_add.call"), odd, agreeing=agreeing)
    entry = Cache(warm).look_up(path.parent.name, path.name).entry
    key = Key(entry.manifest.inputs, "", path.name.rpartition("-")[0])
    source, target = vec_add.sources["cpu"][0], Target.current("cpu")
    with config.using(cache_dir=warm):
        kept = [*records.of_keys(records.reader(), key)]
        assert not [one for one in kept if records.is_fresh(one, vec_add.name, source, target)]


@pytest.mark.long
@pytest.mark.parametrize("odd", [CONTENTS[0], *CONTENTS[6:8]])
def test_beside_an_odd_record_another_is_made(odd, warm, run_python):
    with_content(the_entry(warm, "vec_add.call"), odd, agreeing=True)
    done = run_python(CALL)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert len([path for path in Cache(warm).paths() if path.name.startswith("vec_add.call")]) == 2


@pytest.mark.long
@pytest.mark.parametrize("kernels", [0, 1])
def test_a_record_of_other_kernels_does_not_serve(kernels, warm, run_python):
    path = the_entry(warm, "vec_add.call")
    content = json.loads((path / NAME).read_bytes())["meta"]["content"]
    target = content["kernels"][0].partition("/")[0]
    others = [f"{target}/vec_add.f64-{'0' * 64}"] * kernels
    with_content(path, json.dumps({**content, "kernels": others}), agreeing=True)
    done = run_python(CALL)  # a program over too few kernels reads what lies behind them
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


TOO_LARGE = (
    "import resource, sys\n"
    "from pathlib import Path\n"
    "from jitkern.cache.store import Cache\n"
    "from jitkern.cache_tools import rows\n"
    "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
    "cache = Cache(Path(sys.argv[1]))\n"
    "print(cache.look_up(*sys.argv[2:]).reason, [row.ok for row in rows(cache, verify='always')])\n"
)


def test_an_artifact_that_memory_cannot_hold_is_a_miss(warm, tmp_path):
    path = the_entry(warm, "vec_add.f32-")
    for other in Cache(warm).paths():
        if other != path:
            Cache(warm).remove(other)
    with_artifact(path, size=1 << 36)
    os.truncate(path / Manifest.decode((path / NAME).read_bytes()).meta["artifact"], 1 << 36)
    done = subprocess.run(
        [sys.executable, "-c", TOO_LARGE, str(warm), path.parent.name, path.name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "unreadable [False]\n"), done.stderr
    assert path.exists()


@pytest.mark.parametrize("odd", KERNELS)
def test_the_verbs_survive_an_odd_entry(odd, warm, cli):
    KERNELS[odd](the_entry(warm, "vec_add.f32-"))
    for verb in ("ls", "stats"):
        code, _, err = cli("cache", verb)
        assert code in (0, 1)
        assert "Traceback" not in err
    assert cli("cache", "clear", "--yes")[0] == 0
    assert list(Cache(warm).paths()) == []


@pytest.mark.parametrize(
    "inputs", [{"op": "a\nb"}, {"op": "\ud800"}, {"op": ""}, {"op": None}, {"source": 1}]
)
def test_what_cannot_be_shown_is_refused(inputs, warm, cli):
    path = the_entry(warm, "vec_add.f32-")
    with_inputs(path, **inputs)
    with pytest.raises(ValueError, match="unexpected type"):
        Manifest.decode((path / NAME).read_bytes())
    assert cli("cache", "ls")[0] == 0


@pytest.mark.long
def test_what_no_reader_would_take_is_not_published(cache_dir, variant, target):
    files = {f"{n}.h": "0" * 64 for n in range(MAX_BYTES // 70)}
    key = make_key(variant, target, (), closure_of(variant.source)._replace(files=files))
    cache = Cache(cache_dir)
    with cache.staging() as staging:
        (staging / "out.so").write_bytes(b"code")
        with pytest.raises(CacheError, match="many headers"):
            cache.publish(key, staging, Manifest(key.inputs))
    assert list(cache.paths()) == []


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("test::" + "x" * 500, "f"), ("test::scale", "größe"), ("test::scale", "a..b"),
        ("test::scale", ".hidden"), ("test::scale", "f" * 300), ("load_inline::größe 1/2", ""),
        ("jitkern::-x", "-o"),
    ],
)  # fmt: skip
def test_every_name_makes_a_folder_that_every_reader_takes(op, function, cache_dir, source, target):
    cache = Cache(cache_dir)
    key, _ = published(cache, Variant(op, source, function), target)
    assert is_entry_name(key.name)
    assert len(key.name) < 220
    assert cache.find(key)
    assert [path.name for path in cache.paths()] == [key.name]


@pytest.mark.parametrize("place", ["../../outside", "v1/..", "a/b"])
def test_a_name_leads_nowhere_else(place, cache_dir, tmp_path):
    outside = tmp_path / "outside" / f"x-{'0' * 16}"
    outside.mkdir(parents=True)
    (outside / NAME).write_text("{}")
    (cache_dir / "v1").mkdir(parents=True)
    for found in (Cache(cache_dir).look_up(place, outside.name),
                  Cache(cache_dir).look_up("v1", f"{place}/{outside.name}")):  # fmt: skip
        assert (found.entry, found.reason) == (None, "absent")
    assert (outside / NAME).exists()
