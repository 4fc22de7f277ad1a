"""Facts: found again under their named inputs, and made again where their content is odd."""

import json

import pytest

from jitkern.cache import facts
from jitkern.cache.store import Cache
from jitkern.cache_tools import nearest, rows

TARGET = "cpu-x86_64-torch2.13.0"
BY = {"name": "test", "version": "1"}


@pytest.fixture
def cache(cache_dir):
    return Cache(cache_dir)


def key_of(kind="choice", **inputs):
    return facts.key_of(kind, "test::k", TARGET, f"test.k.{kind}", inputs)


def number(entry):
    content = facts.content_of(entry)
    if type(content) is not int:
        raise ValueError("it is no number")
    return content


def test_a_fact_is_found_under_its_inputs_alone(cache):
    assert facts.read(cache, key_of(model="a"), number) is None
    facts.write(cache, key_of(model="a"), 7, BY)
    assert facts.read(cache, key_of(model="a"), number) == 7
    assert facts.read(cache, key_of(model="b"), number) is None
    assert facts.read(cache, key_of("plan", model="a"), number) is None
    assert [(row.kind, row.op, row.variant) for row in rows(cache)] == [
        ("choice", "test::k", "choice")
    ]


def test_a_fact_that_was_written_first_stays(cache):
    facts.write(cache, key_of(), 1, BY)
    assert number(facts.write(cache, key_of(), 2, BY)) == 1


def test_each_of_several_facts_is_found(cache):
    for which in (1, 2):
        facts.write(cache, facts.one_of(key_of(model="a"), which), which, BY)
    facts.write(cache, facts.one_of(key_of(model="b"), 3), 3, BY)
    found = facts.read_all(cache, key_of(model="a"), number)
    assert sorted(content for _, content in found) == [1, 2]


@pytest.mark.parametrize("content", [None, "7", [], {}])
def test_an_odd_fact_is_set_aside_and_may_be_written_again(cache, content):
    facts.write(cache, key_of(), content, BY)
    assert facts.read(cache, key_of(), number) is None
    assert len(list((cache.root / "v1" / "bad").iterdir())) == 1
    facts.write(cache, key_of(), 7, BY)
    assert facts.read(cache, key_of(), number) == 7


def test_another_entry_in_the_place_of_a_fact_is_none(cache):
    entry = facts.write(cache, key_of(), 7, BY)
    artifacts = {"other.json": entry.manifest.artifacts[facts.ARTIFACT]}
    with pytest.raises(ValueError, match="no fact"):
        facts.content_of(entry._replace(manifest=entry.manifest._replace(artifacts=artifacts)))


def test_a_fact_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert facts.write(Cache(tmp_path / "file"), key_of(), 7, BY) is None


def test_a_fact_is_explained_by_facts_of_its_kind(cache):
    facts.write(cache, key_of("plan", model="a"), 1, BY)
    near = facts.write(cache, key_of(model="a", more="x"), 2, BY)
    entry, lines = nearest(cache, key_of(model="a", more="y").inputs)
    assert (entry.path, lines) == (near.path, ["more: x there, y wanted"])
    assert json.loads(entry.read(facts.ARTIFACT)) == 2
