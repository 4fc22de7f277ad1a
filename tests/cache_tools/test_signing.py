"""Keys and signatures: who signed an entry, and what comes of it in a layer."""

import base64
import os
import shutil
import stat

import pytest
from helpers import published

from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import chosen, signing
from jitkern.cache_tools.listing import EntryFilter
from jitkern.errors import CacheError, JitkernError
from jitkern.files import signature
from jitkern.files.trust import Trust

serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")


@pytest.fixture
def layer(tmp_path):
    """A cache which is to be a layer."""
    return Cache(tmp_path / "layer", fsync=False)


@pytest.fixture(autouse=True)
def entry_key(layer, variant, target):
    """The key of the one entry of the layer."""
    return published(layer, variant, target)[0]


@pytest.fixture
def found(tmp_path, layer, entry_key):
    """What a lookup finds where the layer is to be signed by one of these keys."""

    def found(*keys):
        rules = Trust(signed=(layer.root,), keys=keys)
        user = Cache(tmp_path / "user", (layer.root,), fsync=False, rules=rules)
        return user.look_up(entry_key.target, entry_key.name, entry_key.digest)

    return found


def sign(cache, key):
    return signing.sign(cache, chosen(cache, EntryFilter()), key)


def signature_file(cache):
    return next(cache.paths()) / signature.NAME


def another(tmp_path, name="another"):
    """A second key, and its public one."""
    return tmp_path / name, signature.public_key(signing.keygen(tmp_path / name))


# --- keys


def test_a_private_key_is_for_its_owner_alone(tmp_path):
    old = os.umask(0)
    try:
        line = signing.keygen(tmp_path / "key", "a comment: really")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "key.pub").stat().st_mode) == 0o644
    assert (tmp_path / "key.pub").read_text() == f"{line}\n"
    kind, public, comment = line.split(" ", 2)
    assert (kind, len(base64.b64decode(public)), comment) == ("ed25519", 32, "a comment: really")
    assert signature.public_key(line) == public


def test_a_private_key_is_pkcs8_that_openssl_reads(key, public):
    assert key.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    assert base64.b64encode(loaded.public_key().public_bytes_raw()).decode() == public


def test_no_key_is_overwritten(tmp_path, key):
    before = key.read_bytes(), key.with_name("key.pub").read_bytes()
    with pytest.raises(JitkernError, match="exists already and is not overwritten"):
        signing.keygen(key)
    assert (key.read_bytes(), key.with_name("key.pub").read_bytes()) == before
    (tmp_path / "new.pub").write_text("somebody's")
    with pytest.raises(JitkernError, match="exists already and is not overwritten"):
        signing.keygen(tmp_path / "new")
    assert (tmp_path / "new.pub").read_text() == "somebody's"
    assert not (tmp_path / "new").exists()


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "key").symlink_to(tmp_path / "target")
    with pytest.raises(JitkernError, match="exists already"):
        signing.keygen(tmp_path / "key")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("comment", ["two\nlines", "a\rb", "\x1b[2J"], ids=["lf", "cr", "escape"])
def test_a_comment_is_one_line_of_text(tmp_path, comment):
    with pytest.raises(JitkernError, match="one line of printable text"):
        signing.keygen(tmp_path / "key", comment)
    assert not (tmp_path / "key").exists()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(JitkernError, match="cannot be written: No such file"):
        signing.keygen(tmp_path / "none" / "key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_private_key_that_others_can_open_is_refused(layer, key, mode):
    key.chmod(mode)
    with pytest.raises(JitkernError, match=rf"open to other users \(mode {mode:o}\).*chmod 600"):
        sign(layer, key)
    assert not signature_file(layer).exists()


def pem(key, encryption=serialization.NoEncryption()):  # noqa: B008
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: pem(ed25519.Ed25519PrivateKey.generate(), serialization.BestAvailableEncryption(b"x")), "is encrypted"),
        (lambda: pem(ec.generate_private_key(ec.SECP256R1())), "is not an Ed25519 key"),
        (lambda: b"nonsense", "is not a private key in PEM"),
        (lambda: b"", "is not a private key in PEM"),
        (lambda: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "is not a private key in PEM"),
        (lambda: pem(ed25519.Ed25519PrivateKey.generate())[:60], "is not a private key in PEM"),
    ],
    ids=["encrypted", "ec", "text", "empty", "damaged", "short"],
)  # fmt: skip
def test_another_kind_of_key_is_a_clear_error(layer, tmp_path, data, says):
    (tmp_path / "key").write_bytes(data())
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(JitkernError, match=says):
        sign(layer, tmp_path / "key")


def test_a_public_key_does_not_sign(layer, key):
    with pytest.raises(JitkernError, match=f"is a public key: sign with its private key, {key}$"):
        sign(layer, key.with_name("key.pub"))


def test_a_missing_key_is_a_clear_error(layer, tmp_path):
    with pytest.raises(JitkernError, match="cannot be read: No such file.*keygen"):
        sign(layer, tmp_path / "none")
    with pytest.raises(JitkernError, match="cannot be read: Is a directory"):
        sign(layer, tmp_path)


def test_without_cryptography_the_line_that_installs_it_is_given(tmp_path, layer, key, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(JitkernError, match=r'pip install "jitkern\[sign\]"'):
        signing.keygen(tmp_path / "other")
    with pytest.raises(JitkernError, match=r'pip install "jitkern\[sign\]"'):
        sign(layer, key)


# --- signing


def test_a_signed_entry_is_found_and_an_unsigned_one_is_not(layer, key, public, found, caplog):
    assert (found(public).entry, found(public).reason) == (None, "unsigned")
    assert sign(layer, key) == 1
    assert found(public).entry.read("out.so") == b"code"


def test_a_signature_covers_the_manifest_and_changes_no_byte(layer, key, public):
    path = next(layer.paths())
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    sign(layer, key)
    kind, by, made = (path / signature.NAME).read_text().split()
    assert (kind, by) == ("ed25519", public)
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    loaded.public_key().verify(base64.b64decode(made), (path / NAME).read_bytes())
    (path / signature.NAME).unlink()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_signature_file_is_readable_and_leaves_no_staging(layer, key):
    old = os.umask(0o077)
    try:
        sign(layer, key)
    finally:
        os.umask(old)
    assert stat.S_IMODE(signature_file(layer).stat().st_mode) == 0o644
    assert list((layer.root / "v1" / "tmp").iterdir()) == []


def test_signing_twice_is_signing_once(layer, key):
    sign(layer, key)
    first = signature_file(layer).read_bytes()
    assert sign(layer, key) == 1
    assert signature_file(layer).read_bytes() == first
    assert first.count(b"\n") == 1


def test_keys_rotate(layer, tmp_path, key, public, found):
    new, new_public = another(tmp_path)
    sign(layer, key)
    sign(layer, new)
    lines = signature_file(layer).read_text().splitlines()
    assert sorted(line.split()[1] for line in lines) == sorted((public, new_public))
    for keys in ((public,), (new_public,), (public, new_public)):
        assert found(*keys).entry


def test_the_order_of_signing_leaves_no_trace(layer, tmp_path, key):
    new, _ = another(tmp_path)
    sign(layer, key)
    sign(layer, new)
    one = signature_file(layer).read_bytes()
    signature_file(layer).unlink()
    sign(layer, new)
    sign(layer, key)
    assert signature_file(layer).read_bytes() == one


def test_a_wrong_signature_of_the_same_key_is_replaced(layer, key, public, found):
    signature_file(layer).write_text(f"ed25519 {public} {'A' * 86}==\n")
    assert found(public).reason == "unsigned"
    sign(layer, key)
    assert found(public).entry


def test_an_entry_signed_by_another_key_is_not_used(layer, tmp_path, key, found, caplog):
    sign(layer, key)
    _, other_public = another(tmp_path)
    assert found(other_public).reason == "unsigned"
    assert "not signed by a trusted key" in caplog.text


def test_a_manifest_that_was_changed_after_signing_is_not_used(layer, key, public, found):
    sign(layer, key)
    path = next(layer.paths()) / NAME
    manifest = Manifest.decode(path.read_bytes())
    path.write_bytes(manifest._replace(seconds=9.0).encode())
    assert found(public).reason == "unsigned"


def test_an_artifact_that_was_changed_after_signing_is_not_used(layer, key, public, found):
    sign(layer, key)
    (next(layer.paths()) / "out.so").write_bytes(b"evil")
    assert found(public).reason == "damaged"


@pytest.mark.parametrize(
    "tamper",
    [
        lambda text: text.replace("ed25519", "ed448"),
        lambda text: text[:60] + ("B" if text[60] == "A" else "A") + text[61:],
        lambda text: text.rsplit(" ", 1)[0],
        lambda text: "",
        lambda text: "\xff" * 99,
        lambda text: text.replace("=\n", "\n"),
        lambda text: text + "x" * signature.MAX_BYTES,
    ],
    ids=["kind", "flip", "none", "empty", "binary", "unpadded", "large"],
)
def test_a_signature_that_was_tampered_with_is_not_used(layer, key, public, found, tamper):
    sign(layer, key)
    file = signature_file(layer)
    file.write_text(tamper(file.read_text()), encoding="latin-1")
    assert found(public).entry is None


def test_only_entries_of_the_user_root_are_signed(layer, tmp_path, key, variant, target):
    user = Cache(tmp_path / "user", (layer.root,), fsync=False)
    published(user, variant, target, "-x")
    assert len(chosen(user, EntryFilter())) == 2
    assert sign(user, key) == 1
    assert signature_file(user).exists()
    assert not signature_file(layer).exists()


def test_an_entry_that_changed_since_it_was_chosen_is_unsigned(layer, key):
    whole = chosen(layer, EntryFilter())
    path = whole[0].path / NAME
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(JitkernError, match="cannot be signed: its manifest was changed"):
        signing.sign(layer, whole, key)
    assert not signature_file(layer).exists()


def test_a_link_in_place_of_the_signatures_is_not_followed(layer, tmp_path, key):
    (tmp_path / "elsewhere").write_text("ed25519 x y\n")
    signature_file(layer).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError):
        sign(layer, key)
    signature_file(layer).unlink()
    signature_file(layer).mkdir()
    with pytest.raises(JitkernError, match="is not a regular file"):
        sign(layer, key)


def test_an_entry_that_is_gone_is_left_out(layer, key):
    whole = chosen(layer, EntryFilter())
    shutil.rmtree(whole[0].path)
    assert signing.sign(layer, whole, key) == len(whole) - 1


# --- layers of other users


def give_away(root):
    for path in (root, *root.rglob("*")):
        os.chown(path, 12345, 12345)


@needs_root
def test_a_signed_layer_of_another_user_is_copied_and_used(layer, tmp_path, key, public, entry_key):
    sign(layer, key)
    give_away(layer.root)
    user = Cache(tmp_path / "user", (layer.root,), fsync=False, rules=Trust(keys=(public,)))
    entry = user.find(entry_key)
    assert entry.path.is_relative_to(user.root)
    assert entry.read("out.so") == b"code"
    assert entry.path.stat().st_uid == os.geteuid()


@needs_root
def test_an_unsigned_layer_of_another_user_is_not_used(layer, tmp_path, public, entry_key):
    give_away(layer.root)
    for keys in ((), (public,)):
        user = Cache(tmp_path / "user", (layer.root,), fsync=False, rules=Trust(keys=keys))
        assert user.find(entry_key) is None
        assert not user.root.exists()


# --- the command line


def test_keygen_sign_and_filters(cli, cache_dir, tmp_path, variant, target):
    published(Cache(cache_dir, fsync=False), variant, target)
    code, out, err = cli("cache", "keygen", str(tmp_path / "k"), "--comment", "me")
    assert (code, out) == (0, (tmp_path / "k.pub").read_text())
    assert "trusted_keys" in err
    code, out, err = cli("cache", "sign", "--key", str(tmp_path / "k"), "--op", "test::scale")
    assert (code, out) == (0, "")
    assert "1 entry" in err
    code, _, err = cli("cache", "sign", "--key", str(tmp_path / "k"), "--op", "none")
    assert code == 2
    assert "has the op `none`" in err


def test_errors_are_one_line_and_an_exit_code(cli, cache_dir, tmp_path, variant, target, key):
    published(Cache(cache_dir, fsync=False), variant, target)
    assert cli("cache", "keygen", str(key))[0] == 1
    assert cli("cache", "sign")[0] == 2
    code, _, err = cli("cache", "sign", "--key", str(tmp_path / "none"))
    assert code == 2 and "there is no file" in err
    assert err.count("\n") == 1
    key.chmod(0o644)
    code, _, err = cli("cache", "sign", "--key", str(key))
    assert code == 1
    assert "chmod 600" in err
