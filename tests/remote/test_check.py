"""What is told of a remote: by `doctor` and `explain`, and its read half of a check."""

from __future__ import annotations

import json

import pytest
from web_servers import Server, always, closed_port, put, said, settings_file, static

import jitkern
from jitkern import config, testing
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import EntryFilter, chosen
from jitkern.remote import layout
from jitkern.remote.check import read_half


@pytest.fixture
def machine(filled):
    return layout.machine_of(filled[1].target)


def look(url, machine, **settings):
    with config.using(remote=url, **{"trusted_remotes": url, **settings}):
        return list(read_half(url, [machine]))


def test_a_good_remote_passes_every_check(filled, machine):
    with Server(static(filled[0])) as server:
        checks = look(server.url, machine)
    assert all(check.ok and not check.remedy for check in checks)
    text = "\n".join(f"{check.name}: {check.value}" for check in checks)
    assert "trusted_remotes" in text and " ms" in text
    assert "1 entry in 1 bundle" in text and machine in text and "not signed" in text


@pytest.mark.usefixtures("signing_package")
def test_it_says_who_signed(tmp_path, filled, machine):
    cache = Cache(tmp_path / "builder")
    public = signing.keygen(tmp_path / "key", "")
    signing.sign(cache, chosen(cache, EntryFilter()), tmp_path / "key")
    from web_servers import fill

    (filled[0] / "v1" / machine / "index.json").unlink()
    fill(cache, filled[0])
    url = f"file://{filled[0]}"
    checks = look(url, machine, trusted_keys=[public], trusted_remotes=[])
    assert all(check.ok for check in checks)
    assert f"signed by {public.split()[1]}" in checks[-1].value
    other = signing.keygen(tmp_path / "other", "")
    checks = look(url, machine, trusted_keys=[other], trusted_remotes=[])
    assert not checks[-1].ok and "trusted key" in checks[-1].value


@pytest.mark.parametrize(
    ("answer", "said_", "remedy"),
    [
        (always(said(403)), "access denied: 403", "credentials"),
        (always(said(500)), "500", "check the URL"),
        (always(said(404)), f"has no {layout.ROOT}", "bucket and path"),
        (always(said(429)), "too many requests", "later"),
        (always(said(200, b"<html>")), "not one of this version", "check the URL"),
    ],
)
def test_each_problem_has_a_remedy(machine, answer, said_, remedy):
    with Server(answer) as server:
        bad = [check for check in look(server.url, machine) if not check.ok]
    assert any(said_ in check.value and remedy in check.remedy for check in bad), bad


def test_other_problems(filled, machine):
    (check,) = [c for c in look("https://host:abc/", machine) if not c.ok]
    assert "names no host" in check.value
    checks = look(f"http://127.0.0.1:{closed_port()}", machine)
    assert "refused" in checks[-1].value.lower() and not checks[-1].ok
    (check,) = [c for c in look(f"file://{filled[0]}", machine, trusted_remotes=[]) if not c.ok]
    assert "trusted_keys" in check.remedy
    checks = look(f"file://{filled[0]}", "cpu-aarch64-torch2.13.0-linux_aarch64")
    assert not checks[-1].ok and "no entries for cpu-aarch64" in checks[-1].value
    assert checks[-1].remedy
    (filled[0] / "v1" / machine / "index.json").write_text("{}")
    assert "its index is not usable" in look(f"file://{filled[0]}", machine)[-1].value
    put(filled[0], machine, b"x", ["0" * 16])
    assert "is refused" in look(f"file://{filled[0]}", machine)[-1].value
    next((filled[0] / "v1" / machine).glob("*.tar")).rename(filled[0] / "away.tar")
    for path in (filled[0] / "v1" / machine).glob("*.tar"):
        path.unlink()
    assert "gone" in look(f"file://{filled[0]}", machine)[-1].value


def test_doctor_checks_remotes_and_shows_no_password(filled, cli, tmp_path, monkeypatch):
    with Server(static(filled[0])) as server:
        secret = server.url.replace("127", "me:hunter2@127")
        monkeypatch.setenv("JITKERN_REMOTE", secret)
        monkeypatch.setenv("JITKERN_REMOTE_TIMEOUT", "60")  # this machine may be busy
        monkeypatch.setenv(
            "XDG_CONFIG_HOME", str(settings_file(tmp_path, trusted_remotes=[server.url]))
        )
        testing.set_settings(monkeypatch)
        _, out, _ = cli("doctor", "--json")
    checks = [c for c in json.loads(out)["checks"] if c["name"].startswith("remote ")]
    assert any("answers in" in check["value"] for check in checks)
    assert "hunter2" not in out


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
    from web_servers import fill

    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    url = f"file://{tmp_path / 'remote'}"
    with config.using(remote=url, trusted_remotes=url):
        _, out, _ = cli("explain", "vec_add", "--json")
        reasons = [row["reason"] for op in json.loads(out)["ops"] for row in op["variants"]]
        assert any(f"in the remote {url}: yes, in the bundle" in reason for reason in reasons)
        _, out, _ = cli("explain", "softmax", "--json")
        reasons = [row["reason"] for op in json.loads(out)["ops"] for row in op["variants"]]
        assert any(f"in the remote {url}: no" in reason for reason in reasons)
    dead = f"http://127.0.0.1:{closed_port()}"
    with config.using(remote=dead, trusted_remotes=dead):
        for _ in range(2):
            _, out, _ = cli("explain", "softmax", "--json")
    assert "not asked: circuit breaker open" in out
