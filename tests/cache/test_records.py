"""Records: found again under their inputs, in every layer, and made again where they are odd."""

import json
import shutil

import pytest

from jitkern import config
from jitkern.cache import records
from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import nearest, rows

TARGET = "cpu-x86_64-torch2.13.0"
BY = {"name": "test", "version": "1"}


@pytest.fixture
def cache(cache_dir):
    return Cache(cache_dir)


def key_of(kind="choice", **inputs):
    return records.record_key(kind, "test::k", TARGET, f"test.k.{kind}", inputs)


def number(content):
    if type(content) is not int:
        raise ValueError("it is not a number")
    return content


def found(key, look_up=lambda *_: None, **settings):
    with config.using(**settings):
        entries = [*records.Reader(config.current(), look_up).alternatives(key)]
    return sorted(records.content_of(entry) for entry in entries)


def write_each(cache, *numbers, key=None):
    key = key or key_of(model="a")
    return [records.write(cache, records.one_of(key, n), n, BY) for n in numbers]


def test_a_record_is_found_under_its_inputs_alone(cache):
    assert records.read(cache, key_of(model="a"), number) is None
    entry = records.write(cache, key_of(model="a"), 7, BY)
    assert [path.name for path in entry.path.iterdir()] == [NAME]
    assert records.read(cache, key_of(model="a"), number) == 7
    assert records.read(cache, key_of(model="b"), number) is None
    assert records.read(cache, key_of("call", model="a"), number) is None
    assert [(row.kind, row.op, row.variant) for row in rows(cache)] == [
        ("choice", "test::k", "choice")
    ]


def test_a_record_that_was_written_first_stays(cache):
    records.write(cache, key_of(), 1, BY)
    assert records.content_of(records.write(cache, key_of(), 2, BY)) == 1


def test_each_of_several_records_is_found(cache):
    write_each(cache, 1, 2)
    write_each(cache, 3, key=key_of(model="b"))
    assert found(key_of(model="a")) == [1, 2]
    assert found(key_of(model="c")) == []


def test_records_are_found_in_every_layer_once(cache, tmp_path):
    layer = Cache(tmp_path / "layer")
    write_each(layer, 1, 2)
    write_each(cache, 2, 3)
    assert found(key_of(model="a"), system_cache=(layer.root, tmp_path / "none")) == [1, 2, 3]
    shutil.rmtree(cache.root)
    assert found(key_of(model="a"), system_cache=(layer.root,)) == [1, 2]


def test_records_of_a_layer_that_others_could_change_are_read(tmp_path, cache_dir):
    layer = Cache(tmp_path / "layer")
    (entry,) = write_each(layer, 1)
    layer.root.chmod(0o777)
    asked = []
    key = key_of(model="a")
    assert found(key, lambda *place: asked.append(place), system_cache=(layer.root,)) == []
    assert asked == []  # nothing there is trusted
    layer.root.chmod(0o755)
    entry.path.chmod(0o777)
    assert found(key, lambda *place: asked.append(place), system_cache=(layer.root,)) == []
    assert asked == [(TARGET, entry.path.name)]


def test_the_content_of_a_record_is_part_of_its_name(cache):
    (entry,) = write_each(cache, 1)
    manifest = entry.manifest._replace(meta={"content": 2})
    (entry.path / NAME).write_bytes(manifest.encode())
    with pytest.raises(ValueError, match="not what it was published with"):
        records.content_of(cache.find(records.one_of(key_of(model="a"), 1)))


@pytest.mark.parametrize("content", [None, "7", [], {}])
def test_an_odd_record_is_set_aside_and_may_be_written_again(cache, content):
    records.write(cache, key_of(), content, BY)
    assert records.read(cache, key_of(), number) is None
    assert [path.name for path in (cache.root / "v1" / "bad").iterdir()] != []
    records.write(cache, key_of(), 1, BY)
    assert records.read(cache, key_of(), number) == 1


def test_a_record_has_no_artifact_and_all_else_has_one(cache):
    entry = records.write(cache, key_of(), 1, BY)
    fields = json.loads((entry.path / NAME).read_bytes())
    kernel = entry.manifest._replace(inputs={**fields["inputs"], "record": None})
    for inputs in ({"op": "a", "target": TARGET}, {**kernel.inputs, "source": {}}):
        inputs.pop("record", None)
        with pytest.raises(ValueError, match="lists no artifact"):
            Manifest.decode(entry.manifest._replace(inputs=inputs).encode())


def test_a_record_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert records.write(Cache(tmp_path / "file"), key_of(), 7, BY) is None


def test_a_record_is_explained_by_records_of_its_kind(cache):
    records.write(cache, key_of("call", model="a"), 1, BY)
    near = records.write(cache, key_of(model="a", more="x"), 2, BY)
    entry, lines = nearest(cache, key_of(model="a", more="y").inputs)
    assert (entry.path, lines) == (near.path, ["more is x instead of y"])
