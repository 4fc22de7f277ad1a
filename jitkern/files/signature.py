"""Ed25519 signatures over the bytes of a manifest, in the file `manifest.sig` beside it.

A line of that file, and a public key in the settings, is `ed25519 PUBLIC-KEY [SIGNATURE]`, both in
base64. The algorithm is that of RFC 8032, by the package `cryptography`.
"""

from __future__ import annotations

import base64
import binascii

NAME = "manifest.sig"
MAX_BYTES = 64 << 10
REMEDY = 'pip install "jitkern[sign]"'


def distrust(data: bytes, signatures: bytes, keys: tuple[str, ...]) -> str:
    """Why no signature over `data` by one of `keys` is among `signatures`, or "" if one is.

    keys: public keys in base64.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return f"signatures cannot be checked without the package cryptography: {REMEDY}"
    reason = "it is not signed by a trusted key"
    for line in signatures.decode("ascii", "replace").splitlines():
        kind, _, rest = line.partition(" ")
        public, _, signature = rest.partition(" ")
        if kind != "ed25519" or public not in keys:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(decoded(public)).verify(decoded(signature), data)
        except (ValueError, InvalidSignature):
            reason = f"its signature of {public} is wrong"
        else:
            return ""
    return reason


def public_key(text: str) -> str:
    """The base64 in `ed25519 BASE64 [comment]`. Raises ValueError."""
    kind, _, rest = text.strip().partition(" ")
    public = rest.split(" ")[0]
    if kind != "ed25519" or len(decoded(public)) != 32:
        raise ValueError(f"`{text}` is not a public key: expected `ed25519 BASE64`")
    return public


def decoded(text: str) -> bytes:
    """The bytes of base64. Raises ValueError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise ValueError(f"`{text}` is not base64") from e
