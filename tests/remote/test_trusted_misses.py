"""Whose entries are taken from a remote: of trusted keys, or of remotes that a file trusts."""

import pytest
from web_servers import Server, closed_port, fill, static

from jitkern import Config, config, jit
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import EntryFilter, chosen
from jitkern.remote import trust


@pytest.fixture
def keys(tmp_path, signing_package):
    """(a private key, its public line), and those of another signer."""
    return [(tmp_path / name, signing.keygen(tmp_path / name, name)) for name in ("a", "b")]


def sign(tmp_path, folder, key):
    cache = Cache(tmp_path / "builder")
    signing.sign(cache, chosen(cache, EntryFilter()), key)
    for path in folder.rglob("*.tar"):
        path.unlink()
    fill(cache, folder)


def test_entries_of_a_trusted_key_are_taken_over_plain_http(
    tmp_path, filled, keys, compiler, variant, target
):
    sign(tmp_path, filled[0], keys[0][0])
    with (
        Server(static(filled[0])) as server,
        config.using(remote=server.url, trusted_keys=[keys[0][1]]),
    ):
        entry = jit.ensure(variant, target)
    assert not compiler.compiles
    assert (entry.path / "manifest.sig").is_file()


def test_entries_of_another_key_are_refused_unread(
    tmp_path, filled, keys, compiler, variant, target, caplog, monkeypatch
):
    sign(tmp_path, filled[0], keys[1][0])
    monkeypatch.setattr("jitkern.cache_tools.bundle.Manifest", None)  # would be an error
    with config.using(remote=f"file://{filled[0]}", trusted_keys=[keys[0][1]]):
        jit.ensure(variant, target)
    assert len(compiler.compiles) == 1
    (line,) = caplog.messages
    assert "not signed by a trusted key" in line


def test_a_remote_that_is_not_trusted_is_not_asked(
    filled, compiler, variant, target, source, caplog
):
    with Server(static(filled[0])) as server, config.using(remote=server.url):
        jit.ensure(variant, target)
        jit.ensure(variant._replace(function="other"), target)
        assert not server.requests
    assert len(compiler.compiles) == 2
    (line,) = caplog.messages
    assert all(
        word in line for word in (server.url, "trusted_keys", "trusted_remotes", "config.toml")
    )


def test_a_root_of_signed_entries_stays_one(tmp_path, keys):
    public = keys[0][1]
    url = "https://example.com/x"
    settings = Config(remote=url, trusted_remotes=url, trusted_keys=[public], signed=[tmp_path])
    assert trust.keys_for(url, settings, tmp_path) == settings.trusted_keys
    assert trust.keys_for(url, settings, tmp_path / "other") == ()


def test_messages_name_no_password(caplog, compiler, variant, target):
    url = f"http://user:hunter2@127.0.0.1:{closed_port()}/x"
    with config.using(remote=url, trusted_remotes=url):
        jit.ensure(variant, target)
    with config.using(remote=url.replace("/x", "/y")):
        jit.ensure(variant._replace(function="other"), target)
    assert len(caplog.messages) == 2
    assert "127.0.0.1" in caplog.text and "hunter2" not in caplog.text
