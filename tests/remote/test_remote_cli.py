"""`jitkern remote`: what its commands say, print as JSON, and exit with."""

import json
import signal
import subprocess
import sys

import pytest
from bucket_stubs import BUCKET
from helpers import LONGEST, last_json, until
from stocked import names, stock
from web_servers import settings_file

from jitkern import config
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.remote import layout
from jitkern.remote.opening import opened
from jitkern.remote.store import Object
from jitkern.target import Target

CPU = str(Target.current("cpu"))
HOST = str(Target.current("cpu").for_host_code())


@pytest.fixture
def stocked(cache_dir):
    """The cache of the settings, with entries for this machine."""
    return stock(Cache(cache_dir, fsync=False), cpu=CPU, host=HOST)


@pytest.fixture
def remote_url(directory, set_environment):
    set_environment({"JITKERN_REMOTE": directory.url})
    return directory.url


@pytest.fixture
def trusting(tmp_path, set_environment):
    """Settings that a file sets."""

    def trusting(**values):
        set_environment({"XDG_CONFIG_HOME": str(settings_file(tmp_path, **values))})

    return trusting


@pytest.fixture
def pushed(cli, stocked, remote_url, key, public, trusting):
    """The remote holds what the cache holds, signed by a key that is trusted; and the cache is empty."""
    code, out, err = cli("remote", "push", "--key", str(key))
    assert (code, out.count("alpha")) == (0, 1), err
    trusting(trusted_keys=[f"ed25519 {public}"])
    there = names(stocked)
    assert cli("cache", "clear", "--yes")[0] == 0
    return there


def test_a_missing_or_wrong_remote_is_a_misuse(cli):
    for command in ("push", "pull", "ls"):
        code, _, err = cli("remote", command)
        assert (code, "JITKERN_REMOTE" in err) == (2, True), err
    code, _, err = cli("remote", "ls", "ftp://kernels")
    assert (code, "`ftp://kernels` names no remote: expected https://…" in err) == (2, True)


def test_a_place_where_nothing_was_pushed_is_a_problem(cli, tmp_path):
    for command in ("pull", "ls"):
        option = ["--from"] if command == "pull" else []
        code, out, err = cli("remote", command, *option, (tmp_path / "nowhere").as_uri())
        assert code == (2 if command == "pull" else 1), command  # no key is trusted
        assert command == "pull" or "nothing was pushed" in out + err


def test_offline_no_command_asks_a_remote(cli, stocked, remote_url, directory, set_environment):
    set_environment({"JITKERN_OFFLINE": "1"})
    for command in (["push", "--unsigned"], ["pull"], ["ls"]):
        code, _, err = cli("remote", *command)
        assert (code, "JITKERN_OFFLINE" in err) == (2, True), err
    assert not list(directory.list(""))


def test_push_then_pull_then_nothing_to_pull(cli, pushed, stocked):
    code, out, err = cli("remote", "pull", "--json")
    assert code == 0, err
    found = last_json(out)
    assert (found["new"], found["present"], found["bundles"], found["signed"]) == (4, 0, 2, True)
    assert "4 entries added from 2 objects" in err
    assert names(stocked) == pushed
    assert last_json(cli("remote", "pull", "--json")[1])["new"] == 0


def test_push_names_what_it_sent(cli, stocked, remote_url):
    found = last_json(cli("remote", "push", "--unsigned", "--json")[1])
    (machine,) = found["machines"]
    assert (machine["machine"], found["signed"]) == (layout.machine_of(CPU), False)
    assert found["uploaded"] == sum(bundle["bytes"] for bundle in machine["bundles"]) > 0
    again = last_json(cli("remote", "push", "--unsigned", "--to", remote_url, "--json")[1])
    assert again["uploaded"] == 0


def test_push_takes_the_filters_of_cache_pack(cli, stocked, remote_url):
    found = last_json(cli("remote", "push", "--unsigned", "--op", "alpha::op1", "--json")[1])
    bundles = {b["package"]: len(b["entries"]) for b in found["machines"][0]["bundles"]}
    assert bundles == {"alpha": 1, "jitkern-runtime": 1}
    assert cli("remote", "push", "--unsigned", "--op", "nothing")[0] == 2


def test_push_signs_with_the_key_of_the_settings(cli, stocked, remote_url, key, public, trusting):
    assert cli("remote", "push")[0] == 1
    trusting(sign_key=str(key))
    assert last_json(cli("remote", "push", "--json")[1])["signed"]
    entry = next(e for _, e in stocked.entries())
    assert signing.signers(entry.manifest.encode(), entry.signatures()) == [public]


def test_an_untrusted_remote_is_not_pulled_from(cli, pushed, trusting, remote_url):
    trusting()
    code, _, err = cli("remote", "pull")
    assert code == 2 and "trusted_keys" in err and "trusted_remotes" in err
    trusting(trusted_keys=["ed25519 " + "A" * 43 + "="])
    code, out, err = cli("remote", "pull", "--json")
    assert code == 1 and "is not trusted" in err and "v1/" in err
    assert len(last_json(out)["failed"]) == 2
    trusting(trusted_remotes=[remote_url])
    assert cli("remote", "pull")[0] == 0


@pytest.mark.long
def test_a_bundle_that_is_not_what_its_name_says_is_refused(cli, pushed, directory, stocked):
    one, two = [directory.root / f.name for f in directory.list("v1/") if ".tar" in f.name]
    for damaged in (one, two):
        good = damaged.read_bytes()
        for data, words in (
            (bytes(len(good)), "content is not what its name says"),
            (good + b"x", "bytes, over"),
            (good[:-1], "content is not what its name says"),
        ):
            damaged.write_bytes(data)
            code, out, err = cli("remote", "pull", "--json")
            assert (code, words in err) == (1, True), err
            assert last_json(out)["bundles"] == 1 and len(names(stocked)) in (1, 3)
            assert cli("cache", "clear", "--yes")[0] == 0
        damaged.write_bytes(good)
    assert cli("remote", "pull")[0] == 0
    assert names(stocked) == pushed


def test_pull_mends_what_is_damaged(cli, pushed, stocked):
    assert cli("remote", "pull")[0] == 0
    path = next(stocked.paths())
    (path / "out.so").write_bytes(b"")
    assert last_json(cli("remote", "pull", "--json")[1])["new"] == 1
    assert names(stocked) == pushed
    assert (path / "out.so").read_bytes()


def test_pull_waits_for_the_disk_where_a_loss_would_be_seen(
    cli, pushed, set_environment, monkeypatch
):
    synced = []
    monkeypatch.setattr("jitkern.files.atomic.sync", synced.append)
    monkeypatch.setattr("jitkern.cache.root.sync", synced.append, raising=False)
    assert cli("remote", "pull")[0] == 0
    assert synced == []
    assert cli("cache", "clear", "--yes")[0] == 0
    set_environment({"JITKERN_VERIFY": "size"})
    monkeypatch.setattr("jitkern.remote.trust.keys_for", lambda *_: ())
    assert cli("remote", "pull")[0] == 0
    assert len(synced) > 4


def test_pull_chooses_targets_and_packages(cli, pushed, stocked):
    assert cli("remote", "pull", "beta")[0] == 0  # the runtime comes with every package
    assert [n.rpartition("-")[0].rpartition("/")[2] for n in names(stocked)] == ["runtime"]
    code, _, err = cli("remote", "pull", "--target", "cuda-sm_90-cu130-torch9.9.9")
    assert code == 1 and "has no entries for cuda-sm_90-cu130-torch9.9.9-linux_" in err
    assert cli("remote", "pull", "--target", "sm90")[0] == 2
    assert cli("remote", "pull", "--target", CPU, "alpha")[0] == 0
    assert names(stocked) == pushed


def test_ls_lists_bundles(cli, pushed):
    found = last_json(cli("remote", "ls", "--json")[1])
    assert [row["package"] for row in found["bundles"]] == ["alpha", layout.RUNTIME_PACKAGE]
    assert 0 <= found["bundles"][0]["age_s"] < 1000
    out, err = cli("remote", "ls")[1:]
    columns = ["machine", "package", "version", "entries", "size", "age", "bundle"]
    assert out.split()[:7] == columns
    assert "2 bundles, " in err


@pytest.mark.long
def test_ls_names_a_bucket_that_is_missing_refused_or_gone(cli, stub, trusting):
    url = f"s3://{BUCKET}/team"
    trusting(trusted_remotes=[url])
    for status, error, words in (
        (404, "<Error><Code>NoSuchBucket</Code></Error>", "404 Not Found"),
        (403, "", "access denied"),
        (503, "", "too many requests"),
        (500, "", "no valid answer"),
    ):
        stub.status, stub.error = status, error
        code, _, err = cli("remote", "ls", url)
        assert (code, words in err) == (1, True)


def test_what_cannot_be_written_is_said_before_packing(cli, stocked, monkeypatch):
    class ReadOnly:
        url = "https://kernels.example"

        def get(self, name, *, limit, unless=None):
            return Object(layout.ROOT_CONTENT, None) if name == layout.ROOT else None

    monkeypatch.setattr("jitkern.remote.opening.opened", lambda _: ReadOnly())
    code, _, err = cli("remote", "push", "--unsigned", "--to", "https://kernels.example")
    assert code == 2 and "can only be read" in err
    assert cli("remote", "ls", "https://kernels.example", "--json")[0] == 0


def test_a_push_has_more_patience_than_a_miss(cli, stocked, remote_url, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jitkern.remote.opening.opened",
        lambda url: seen.append(config.current().remote_timeout) or opened(url),
    )
    with config.using(remote_timeout=5):
        cli("remote", "push", "--unsigned")
        cli("doctor")
    assert seen == [60.0, 5.0]


@pytest.mark.long
def test_a_pulled_cache_serves_a_machine_that_may_not_compile(
    cli, remote_url, key, public, trusting, tmp_path, run_python
):
    """A pull brings kernel, record and launch runtime, as an init container needs them."""
    assert cli("prewarm", "vec_add", "--call", "f32[3], f32[3]", "--target", CPU)[0] == 0
    assert cli("remote", "push", "--key", str(key))[0] == 0
    trusting(trusted_keys=[f"ed25519 {public}"])
    other = str(tmp_path / "other")
    code, out, err = cli("remote", "pull", "--cache-dir", other, "--json")
    assert code == 0 and last_json(out)["new"] >= 3, err
    done = run_python(
        "import json, torch, jitkern, jitkern.ops\n"
        "x = torch.ones(3)\n"
        "assert torch.equal(jitkern.ops.vec_add(x, x), x + x)\n"
        "print(json.dumps(jitkern.stats()))\n",
        JITKERN_CACHE_DIR=other, JITKERN_COMPILE="never",
    )  # fmt: skip
    stats = json.loads(done.stdout or "{}")
    assert (stats.get("compiles"), stats.get("runtimes"), stats.get("failures")) == (0, 0, 0), (
        done.stderr
    )
    assert stats["hits"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("command", ["push --unsigned --to", "pull --from", "ls"])
def test_ctrl_c_does_not_wait_for_a_server_that_hangs(stub, stocked, trusting, command):
    url = f"s3://{BUCKET}/team"
    trusting(trusted_remotes=[url])
    stub.delay = 2 * LONGEST
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "jitkern", "remote", *command.split(), url],
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )  # fmt: skip
    until(lambda: stub.requests, of=[process])
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=LONGEST)[1]  # its request may take twice as long
    assert process.returncode == 130, err
    assert "interrupted" in err
