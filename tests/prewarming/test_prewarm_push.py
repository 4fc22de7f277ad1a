"""`jitkern prewarm --push`: what was built or found is pushed."""

import pytest
from helpers import last_json

from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.remote import layout
from jitkern.remote.index import read_index
from jitkern.remote.opening import opened
from jitkern.target import Target

CPU = str(Target.current("cpu"))
CALL = ("vec_add", "--call", "f32[3], f32[3]", "--target", CPU)


@pytest.fixture
def url(tmp_path):
    (tmp_path / "remote").mkdir()
    return (tmp_path / "remote").as_uri()


def listed(url):
    index, _ = read_index(opened(url), layout.machine_of(CPU))
    return {digest for bundle in index.bundles for digest in bundle.entries}


def digests(results):
    return {row["path"].rpartition("-")[2] for row in results if row["path"]}


@pytest.mark.usefixtures("signing_package")
@pytest.mark.long
def test_what_was_built_is_pushed_signed_and_what_was_found_too(cli, url, cache_dir, tmp_path):
    signing.keygen(tmp_path / "key")
    push = ("--push", url, "--key", str(tmp_path / "key"), "--json")
    code, out, err = cli("prewarm", *CALL, *push)
    found = last_json(out)
    assert code == 0 and "not signed" not in err and f"sent to {url}" in err
    assert found["pushed"] == url and found["uploaded"] > 0
    assert listed(url) == digests(found["results"]) and len(listed(url)) >= 3
    code, out, _ = cli("prewarm", *CALL, *push)
    found = last_json(out)
    assert (code, found["built"], found["uploaded"]) == (0, 0, 0)
    signers = [signing.signers_of(entry) for _, entry in Cache(cache_dir).entries()]
    assert signers == [[signing.public_key_of(tmp_path / "key")]] * len(signers)


@pytest.mark.long
def test_without_a_key_it_says_who_will_use_what_is_pushed(cli, url):
    code, _, err = cli("prewarm", *CALL, "--push", url)
    assert code == 0 and "is not signed" in err and "trusted_remotes" in err
    assert listed(url)


@pytest.mark.long
def test_the_shards_of_a_prewarm_count_as_one_push(cli, url, tmp_path):
    """An index keeps the last three pushes, and there are more shards."""
    found, shards = set(), 6
    for part in range(1, shards + 1):
        folder = ("--cache-dir", str(tmp_path / f"node{part}"))
        code, out, _ = cli(
            "prewarm", "vec_add", "--target", CPU, "--shard", f"{part}/{shards}",
            "--push", url, "--json", *folder,
        )  # fmt: skip
        assert code == 0
        found |= digests(last_json(out)["results"])
    assert listed(url) == found


@pytest.mark.usefixtures("signing_package")
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--key", __file__], 2, "--key is for --push"),
        (["--push", "ftp://x"], 2, "names no remote"),
        (["--push", "https://x.invalid"], 2, "can only be read"),
        (["--push", "file:///x", "--key", "/nonexistent"], 2, "there is no file /nonexistent"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_anything_is_built(
    cli, cache_dir, options, code, says
):
    got, _, err = cli("prewarm", *CALL, *options)
    assert (got, says in err) == (code, True), err
    assert not list(cache_dir.glob("v1/cpu*"))
