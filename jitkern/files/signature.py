"""Ed25519 signatures over the bytes of a manifest, in the file `manifest.sig` beside it.

Each line of `manifest.sig` is `ed25519 PUBLIC-KEY SIGNATURE`, and a public key in the settings is
`ed25519 PUBLIC-KEY`, all in base64. The package `cryptography` implements the algorithm, RFC 8032.
"""

from __future__ import annotations

import base64
import binascii

NAME = "manifest.sig"
MAX_BYTES = 64 << 10
REMEDY = 'pip install "jitkern[sign]"'


def distrust(data: bytes, signatures: bytes, keys: tuple[str, ...]) -> str:
    """Return the reason why `signatures` holds no valid signature of `data`, or "" if it does.

    keys: public keys in base64, one of which must have signed.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return f"signatures cannot be checked without the package cryptography: {REMEDY}"
    reason = "it is not signed by a trusted key; its maker runs `jitkern cache sign --key FILE`"
    for line in signatures.decode("ascii", "replace").splitlines():
        kind, _, rest = line.partition(" ")
        public, _, signature = rest.partition(" ")
        if kind != "ed25519" or public not in keys:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(decoded(public)).verify(decoded(signature), data)
        except (ValueError, InvalidSignature):
            reason = f"its signature by the key {public} is wrong"
        else:
            return ""
    return reason


def public_key(text: str) -> str:
    """Return the base64 in `ed25519 BASE64 [comment]`. Raises ValueError."""
    kind, _, rest = text.strip().partition(" ")
    public = rest.split(" ")[0]
    if kind != "ed25519" or len(decoded(public)) != 32:
        raise ValueError(f"`{text}` is not a public key: expected `ed25519 BASE64`")
    return public


def decoded(text: str) -> bytes:
    """Return the bytes that base64 text encodes. Raises ValueError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise ValueError(f"`{text}` is not base64") from e
