"""Who must have signed what comes from a remote: settings files say it, and the environment cannot."""

from pathlib import Path

import pytest
from web_servers import Server, closed_port, fill, static, trusting

from jitkern import Config, config, jit
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import EntryFilter, chosen
from jitkern.errors import JitkernError
from jitkern.remote import trust

KEY = "A" * 43 + "="
BUCKET = "s3://kernels/team"


def settings(tmp_path: Path, text: str, **environ: str) -> config.Config:
    file = tmp_path / "config.toml"
    file.write_text(text)
    file.chmod(0o600)
    return config.Config.from_env(environ, [file])


def test_trusted_keys_must_have_signed_what_a_remote_sends(tmp_path):
    found = settings(tmp_path, f'trusted_keys = ["ed25519 {KEY}"]')
    assert trust.keys_for(BUCKET, found) == (KEY,)
    assert trust.keys_for("http://10.0.0.1/kernels", found) == (KEY,)


def test_a_trusted_remote_needs_no_signature_another_does(tmp_path):
    found = settings(tmp_path, f'trusted_remotes = ["{BUCKET}/"]\ntrusted_keys = ["ed25519 {KEY}"]')
    assert trust.keys_for(BUCKET, found) == trust.keys_for(f"{BUCKET}/", found) == ()
    with_password = "https://user:secret@example.com/kernels"
    sites = settings(tmp_path, 'trusted_remotes = ["https://example.com/kernels/"]')
    assert trust.keys_for(with_password, sites) == ()
    with pytest.raises(JitkernError):
        trust.keys_for("https://example.com/kernels/other", sites)
    assert trust.keys_for(f"{BUCKET}/pull-requests", found) == (KEY,)


def assert_trusted(url: str, found: config.Config, trusted: bool) -> None:
    """Whether nothing of this remote must be signed."""
    if trusted:
        assert trust.keys_for(url, found) == ()
    else:
        with pytest.raises(JitkernError, match="Use https, or add the signer"):
            trust.keys_for(url, found)


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        ("http://kernels.example/v", False), ("http://10.0.0.1:80/v", False), ("http://127.0.0.1.example/", False),
        ("http://localhost.evil.com/x", False), ("http://127.0.0.1:8/v", True), ("http://localhost/v", True),
        ("http://[::1]:80", True), ("https://kernels.example", True), ("file:///x", True), (BUCKET, True),
    ],
)  # fmt: skip
def test_plain_http_is_trusted_unsigned_on_this_machine_alone(url, trusted, tmp_path):
    assert_trusted(url, settings(tmp_path, f'trusted_remotes = ["{url}"]'), trusted)


HERE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ALLOW_HTTP": "true"}


@pytest.mark.parametrize(
    ("environ", "trusted"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ALLOW_HTTP": "true"}, True),
        ({"AWS_ENDPOINT_URL": "https://minio.example", "AWS_ALLOW_HTTP": "true"}, True),
        ({"AWS_ENDPOINT_URL": "http://minio.example"}, True),  # obstore refuses to use it
        ({"AWS_ENDPOINT_URL": "http://minio.example", "AWS_ALLOW_HTTP": "true"}, False),
        ({"AWS_ENDPOINT_URL_S3": "http://10.0.0.1", "AWS_ALLOW_HTTP": "1"}, False),
        ({"AWS_ALLOW_HTTP": "true"}, False),
        # obstore asks a proxy for this machine, too
        ({**HERE, "http_proxy": "http://proxy.example"}, False),
        ({**HERE, "ALL_PROXY": "http://proxy.example", "no_proxy": "localhost"}, False),
        ({**HERE, "http_proxy": "http://proxy.example", "no_proxy": "a,127.0.0.1"}, True),
    ],
)
def test_a_bucket_over_http_cannot_be_trusted_unsigned(environ, trusted, tmp_path):
    found = settings(tmp_path, f'trusted_remotes = ["{BUCKET}"]', **environ)
    assert_trusted(BUCKET, found, trusted)


def test_azures_emulator_cannot_stand_in_for_a_bucket(tmp_path):
    """obstore asks it by http although AZURE_ALLOW_HTTP does not say so."""
    bucket = "az://kernels/main"
    for place, trusted in (("http://azurite.example:10000", False), ("http://127.0.0.1:1", True)):
        environ = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": place}
        found = settings(tmp_path, f'trusted_remotes = ["{bucket}"]', **environ)
        assert_trusted(bucket, found, trusted)


def test_the_environment_cannot_trust(tmp_path):
    found = settings(tmp_path, "", JITKERN_TRUSTED_REMOTES=BUCKET, JITKERN_TRUSTED_KEYS=KEY)
    with pytest.raises(JitkernError, match="is not trusted"):
        trust.keys_for(BUCKET, found)


@pytest.mark.parametrize(
    "url", ["htps://me:secret@h/v", "https://me:secret@[::1", "s3://me:secret@/v"]
)
def test_nor_is_one_of_a_misspelt_url(url, cli, set_environment):
    pytest.importorskip("obstore")
    for of in (lambda: cli("remote", "ls", url), lambda: set_environment({"JITKERN_REMOTE": url})):
        try:
            said = str(of())
        except JitkernError as e:
            said = str(e)
        assert "secret" not in said


# ------------------------------------------------------------------ misses


def test_entries_of_a_trusted_key_are_taken_over_plain_http(
    tmp_path, filled, key, public, compiler, variant, target
):
    cache, folder = Cache(tmp_path / "builder"), tmp_path / "signed"
    signing.sign(cache, chosen(cache, EntryFilter()), key)
    fill(cache, folder)
    keys = [f"ed25519 {public}"]
    with Server(static(folder)) as server, config.using(remote=server.url, trusted_keys=keys):
        entry = jit.ensure(variant, target)
    assert not compiler.compiles
    assert (entry.path / "manifest.sig").is_file()


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


def test_a_root_of_signed_entries_stays_one(tmp_path):
    url = "https://example.com/x"
    settings = Config(
        remote=url, trusted_remotes=url, trusted_keys=[f"ed25519 {KEY}"], signed=[tmp_path]
    )
    assert trust.keys_for(url, settings, tmp_path) == settings.trusted_keys
    assert trust.keys_for(url, settings, tmp_path / "other") == ()


def test_messages_name_no_password(caplog, compiler, variant, target):
    url = f"http://user:hunter2@127.0.0.1:{closed_port()}/x"
    with trusting(url):
        jit.ensure(variant, target)
    with config.using(remote=url.replace("/x", "/y")):
        jit.ensure(variant._replace(function="other"), target)
    assert len(caplog.messages) == 2
    assert "127.0.0.1" in caplog.text and "hunter2" not in caplog.text
