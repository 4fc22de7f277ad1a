"""What is told of remotes: a row of `doctor` for each, and where `explain` finds what is not cached."""

import json

import pytest
from helpers import last_json
from web_servers import Server, always, closed_port, fill, said, settings_file, static, trusting

import jitkern
from jitkern import config, jit, testing
from jitkern.cache.store import Cache
from jitkern.target import Target


@pytest.fixture
def row(cli, tmp_path, monkeypatch):
    """The row of `jitkern doctor` about the one remote of the settings."""

    def row(url, **settings):
        monkeypatch.setenv("JITKERN_REMOTE", url)
        home = settings_file(tmp_path, **{"trusted_remotes": [url], **settings})
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
        testing.set_settings(monkeypatch)
        (found,) = (
            check for check in last_json(cli("doctor", "--json")[1])["checks"]
            if check["name"].startswith("remote ")
        )  # fmt: skip
        return found

    return row


@pytest.fixture
def filled_here(tmp_path, compiler, variant):
    """A remote with an entry for this machine."""
    with config.using(cache_dir=tmp_path / "builder"):
        jit.ensure(variant, Target.current("cpu"))
        fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    return tmp_path / "remote"


def test_a_good_remote_has_one_row(filled_here, row):
    with Server(static(filled_here)) as server:
        secret = server.url.replace("127", "me:hunter2@127")
        found = row(secret, trusted_remotes=[server.url])
    assert (found["ok"], found["remedy"], found["name"]) == (True, "", f"remote {server.url}")
    assert "answers in " in found["value"] and "has 1 entry for cpu-" in found["value"]


@pytest.mark.parametrize(
    ("answer", "value", "remedy"),
    [
        (always(said(403)), "access denied: 403", "credentials"),
        (always(said(500)), "no valid answer: 500", "check the URL"),
        (always(said(404)), "has 0 entries for cpu-", "bucket and path"),
        (always(said(429)), "too many requests", "later"),
        (always(said(200, b"<html>")), "cannot be used", "delete this object, and push again"),
    ],
    ids=["refused", "broken", "empty", "busy", "a page"],
)
def test_each_problem_has_a_remedy(row, answer, value, remedy):
    with Server(answer) as server:
        found = row(server.url)
    assert (found["ok"], value in found["value"], remedy in found["remedy"]) == (False, True, True), found  # fmt: skip


def test_a_remote_that_cannot_be_asked_has_a_remedy(filled_here, row):
    for url, trusted, value, remedy in (
        ("https://host:abc/", None, "names no host", "expected https://"),
        (f"http://127.0.0.1:{closed_port()}", None, "refused", "check the URL"),
        (f"file://{filled_here}", [], "is not trusted", "trusted_keys"),
    ):
        found = row(url, trusted_remotes=[url] if trusted is None else trusted)
        assert (found["ok"], value in found["value"].lower()) == (False, True), found
        assert remedy in found["remedy"]


def test_doctor_asks_nobody_without_a_remote(cli):
    _, out, _ = cli("doctor", "--json")
    assert not [c for c in json.loads(out)["checks"] if c["name"].startswith("remote ")]


@pytest.mark.long
def test_explain_says_where_a_remote_has_what_is_not_cached(tmp_path, cli, monkeypatch):
    x = jitkern.ops.vec_add
    assert x
    with config.using(cache_dir=tmp_path / "builder"):
        code, out, _ = cli("prewarm", "vec_add", "--json")
        assert code == 0, out
    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    url = f"file://{tmp_path / 'remote'}"
    with trusting(url):
        _, out, _ = cli("explain", "vec_add", "--json")
        reasons = [row["reason"] for op in json.loads(out)["ops"] for row in op["variants"]]
        assert any(f"in the remote {url}: yes, in the bundle" in reason for reason in reasons)
        _, out, _ = cli("explain", "softmax", "--json")
        reasons = [row["reason"] for op in json.loads(out)["ops"] for row in op["variants"]]
        assert any(f"in the remote {url}: no" in reason for reason in reasons)
    dead = f"http://127.0.0.1:{closed_port()}"
    with trusting(dead):
        for _ in range(2):
            _, out, _ = cli("explain", "softmax", "--json")
    assert "not asked: off for" in out
