"""Who must have signed what comes from a remote: settings files say it, and the environment cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitkern import config
from jitkern.errors import JitkernError
from jitkern.remote import trust

KEY = "A" * 43 + "="
BUCKET = "s3://kernels/team"


def settings(tmp_path: Path, text: str, **environ: str) -> config.Config:
    file = tmp_path / "config.toml"
    file.write_text(text)
    file.chmod(0o600)
    return config.Config.from_env(environ, [file])


def test_without_trust_a_remote_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(JitkernError) as e:
        trust.keys_for(BUCKET, settings(tmp_path, ""))
    text = str(e.value)
    assert "\n" not in text
    assert all(word in text for word in (BUCKET, "trusted_keys", "trusted_remotes", "config.toml"))


def test_trusted_keys_must_have_signed_what_a_remote_sends(tmp_path):
    found = settings(tmp_path, f'trusted_keys = ["ed25519 {KEY}"]')
    assert trust.keys_for(BUCKET, found) == (KEY,)
    assert trust.keys_for("http://10.0.0.1/kernels", found) == (KEY,)


def test_a_trusted_remote_needs_no_signature_another_does(tmp_path):
    found = settings(tmp_path, f'trusted_remotes = ["{BUCKET}/"]\ntrusted_keys = ["ed25519 {KEY}"]')
    assert trust.keys_for(BUCKET, found) == trust.keys_for(f"{BUCKET}/", found) == ()
    assert trust.keys_for(f"{BUCKET}/pull-requests", found) == (KEY,)


@pytest.mark.parametrize(
    "url", ["http://kernels.example/v", "http://10.0.0.1:80/v", "http://127.0.0.1.example/"]
)
def test_http_to_another_machine_cannot_be_trusted_unsigned(url, tmp_path):
    with pytest.raises(JitkernError, match="https"):
        trust.keys_for(url, settings(tmp_path, f'trusted_remotes = ["{url}"]'))


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8/v", "http://localhost/v", "http://[::1]:80", "https://kernels.example"],
)
def test_http_to_this_machine_can(url, tmp_path):
    assert trust.keys_for(url, settings(tmp_path, f'trusted_remotes = ["{url}"]')) == ()


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
    if trusted:
        assert trust.keys_for(BUCKET, found) == ()
    else:
        with pytest.raises(JitkernError, match="https"):
            trust.keys_for(BUCKET, found)


def test_azures_emulator_cannot_stand_in_for_a_bucket(tmp_path):
    """obstore asks it by http although AZURE_ALLOW_HTTP does not say so."""
    bucket = "az://kernels/main"
    for place, trusted in (("http://azurite.example:10000", False), ("http://127.0.0.1:1", True)):
        environ = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": place}
        found = settings(tmp_path, f'trusted_remotes = ["{bucket}"]', **environ)
        if trusted:
            assert trust.keys_for(bucket, found) == ()
        else:
            with pytest.raises(JitkernError, match="https"):
                trust.keys_for(bucket, found)


def test_the_environment_cannot_trust(tmp_path):
    found = settings(tmp_path, "", JITKERN_TRUSTED_REMOTES=BUCKET, JITKERN_TRUSTED_KEYS=KEY)
    with pytest.raises(JitkernError, match="is not trusted"):
        trust.keys_for(BUCKET, found)


def test_a_password_in_a_url_is_not_printed(tmp_path):
    with pytest.raises(JitkernError) as e:
        trust.keys_for("https://me:secret@kernels.example/v", settings(tmp_path, ""))
    assert "secret" not in str(e.value) and "https://kernels.example/v" in str(e.value)


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
