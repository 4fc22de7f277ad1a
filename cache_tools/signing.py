"""Keys, and the signatures by which other users and machines can trust an entry.

A signature covers the bytes of `manifest.json`, and through its hashes every artifact. Signatures
lie beside the manifest (see jitkern.files.signature), so that signing changes no signed byte.
"""

from __future__ import annotations

import base64
import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.cache.entry import Entry
from jitkern.cache.manifest import NAME
from jitkern.cache.store import Cache
from jitkern.errors import JitkernError
from jitkern.files import atomic, signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC = ".pub"  # the suffix of a public key's file, after the name of the private key's file


def keygen(path: Path, comment: str = "") -> str:
    """Write a new private key at `path`, and its public key beside it; return the public line.

    Put the public line into `trusted_keys` of a settings file. Neither file may exist already.
    Raises JitkernError.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not comment.isprintable():
        raise JitkernError("the comment of a key must be one line of printable text")
    private = Ed25519PrivateKey.generate()
    line = f"ed25519 {_public_of(private)} {comment}".rstrip()
    pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write_new(path, pem, 0o600)
    try:
        _write_new(path.with_name(path.name + PUBLIC), f"{line}\n".encode(), 0o644)
    except JitkernError:
        path.unlink()  # a private key without its public key is of no use
        raise
    return line


def sign(cache: Cache, chosen: Iterable[Entry], key: Path) -> int:
    """Sign the chosen entries that are in the user root, and return their number.

    An earlier signature by the same key is replaced; signatures by other keys stay. Raises
    CacheError, and JitkernError if the key cannot be used, or an entry was changed meanwhile.
    """
    private = _load(key)
    public = _public_of(private)
    signed = 0
    with cache.staging() as staging:
        for entry in chosen:
            if not entry.path.is_relative_to(cache.root):
                continue
            try:
                text = base64.b64encode(private.sign(manifest_bytes(entry))).decode()
                lines = _with_line(entry.signatures(), public, f"ed25519 {public} {text}")
                atomic.write(entry.path / signature.NAME, lines, staging=staging, fsync=cache.fsync)
            except OSError as e:
                if not entry.path.exists():
                    continue  # the entry was removed meanwhile
                raise cache.write_error(e) from e
            except ValueError as e:
                raise JitkernError(
                    f"{entry.path} cannot be signed: {e}; see `jitkern cache verify`"
                ) from e
            signed += 1
    return signed


def public_key_of(key: Path) -> str:
    """Return the public key, in base64, of a private key's file. Raises JitkernError."""
    return _public_of(_load(key))


def signers(data: bytes, signatures: bytes) -> list[str]:
    """Return the public keys that have signed the manifest in `data`, sorted.

    The keys are those that the lines of `manifest.sig` name, so trust does not follow from them.
    """
    lines = signatures.decode("ascii", "replace").splitlines()
    named = {line.split(" ")[1] for line in lines if line.count(" ") == 2}
    return sorted(key for key in named if not signature.distrust(data, signatures, (key,)))


def signers_of(entry: Entry) -> list[str]:
    """Return the public keys that have signed an entry; none if it was removed meanwhile."""
    try:
        return signers(entry.manifest.encode(), entry.signatures())
    except (OSError, ValueError):
        return []


def sign_missing(cache: Cache, entries: Iterable[Entry], key: Path) -> list[Entry]:
    """Sign the entries that a key has not signed, and return them. Raises as `sign` does."""
    public = public_key_of(key)
    lacking = [entry for entry in entries if public not in signers_of(entry)]
    if lacking:
        sign(cache, lacking, key)
    return lacking


def manifest_bytes(entry: Entry) -> bytes:
    """Return the content of an entry's `manifest.json`. Raises ValueError if it was changed."""
    data = (entry.path / NAME).read_bytes()
    if data != entry.manifest.encode():
        raise ValueError("its manifest was changed since it was checked")
    return data


def _with_line(signatures: bytes, public: str, line: str) -> bytes:
    """Replace the line of a key; lines are sorted, so that the order of signing leaves no trace."""
    others = [
        other
        for other in signatures.decode("ascii", "replace").splitlines()
        if other.isascii() and other.split(" ")[1:2] != [public]
    ]
    data = "".join(f"{text}\n" for text in sorted({*others, line})).encode()
    if len(data) > signature.MAX_BYTES:
        raise ValueError(f"{signature.NAME} would have more than {signature.MAX_BYTES} bytes")
    return data


def _load(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a file that only its owner may read. Raises JitkernError."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(signature.MAX_BYTES)
    except OSError as e:
        raise JitkernError(
            f"the private key {path} cannot be read: {e.strerror}; "
            "`jitkern cache keygen` makes a new one"
        ) from e
    if data.startswith(b"ed25519 ") or b"-BEGIN PUBLIC KEY-" in data:
        named = path.suffix == PUBLIC
        private = f"{path.with_suffix('')}" if named else f"the file without `{PUBLIC}`"
        raise JitkernError(f"{path} is a public key: sign with its private key, {private}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise JitkernError(
            f"the private key {path} is open to other users (mode {mode:o}), who could sign with "
            f"it: run `chmod 600 {path}`, or make a new key if others may have read this key"
        )
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError as e:
        raise JitkernError(
            f"the private key {path} is encrypted: `openssl pkey -in {path} -out PLAIN` decrypts it"
        ) from e
    except (ValueError, UnsupportedAlgorithm) as e:
        raise JitkernError(f"{path} is not a private key in PEM, as `keygen` writes it") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise JitkernError(f"{path} is not an Ed25519 key: `jitkern cache keygen` makes one")
    return key


def _public_of(private: Ed25519PrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    raw = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return base64.b64encode(raw).decode()


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not exist yet; the file has its mode from the beginning."""
    try:
        with open(path, "xb", opener=lambda p, flags: os.open(p, flags, mode)) as file:
            file.write(data)
    except FileExistsError as e:
        raise JitkernError(
            f"{path} exists already and is not overwritten; name another file"
        ) from e
    except OSError as e:
        with contextlib.suppress(OSError):
            path.unlink()
        raise JitkernError(f"{path} cannot be written: {e.strerror}; name another file") from e


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as e:
        raise JitkernError(
            f"signing needs the package cryptography: {signature.REMEDY}", remedy=signature.REMEDY
        ) from e
