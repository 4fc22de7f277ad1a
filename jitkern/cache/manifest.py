"""The manifest: `manifest.json`, the last file written into an entry.

A manifest holds every key input in clear, and each artifact's hash, as canonical JSON whose last
field is the SHA-256 of the bytes before it. Parsing is strict and limited in size: any defect is a
ValueError, which the cache treats as a miss.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jitkern.cache import MANIFEST
from jitkern.cache.key import canonical, digest_of
from jitkern.named_tuple import NamedTuple

NAME = MANIFEST
LOG = "compile.log"
BEGINS = b'{"artifacts":{'  # of every manifest: fields are sorted
MAX_BYTES = 4 << 20  # of a manifest
MAX_SIZE = 1 << 40  # of an artifact, in bytes
MAX_SECONDS = 1e9
RESERVED = frozenset((NAME, LOG, "manifest.sig"))  # no artifact may have such a name
_SEAL = b',"sha256":"%s"}\n'
_SEAL_BYTES = len(_SEAL % bytes(64))
_HEXADECIMAL = frozenset("0123456789abcdef")
_NAME_CHARACTERS = frozenset(f"{string.ascii_letters}{string.digits}_.-")
_LONGEST_NAME = 128


class Artifact(NamedTuple):
    """The size in bytes and the SHA-256, in hex, of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Artifact:
        """Return the artifact with the content `data`."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


class Manifest(NamedTuple):
    """The artifacts of an entry and the inputs of its key.

    meta: facts for loading (symbols, parameters); compiler: name and version of the compiler;
    seconds: duration of the build; package: name and version of the package with the source.
    """

    inputs: dict[str, Any]
    artifacts: Mapping[str, Artifact] = MappingProxyType({})
    meta: Mapping[str, Any] = MappingProxyType({})
    compiler: Mapping[str, str] = MappingProxyType({})
    seconds: float = 0.0
    package: Mapping[str, str] = MappingProxyType({})

    @property
    def digest(self) -> str:
        """The digest, recomputed from the inputs, so that an entry cannot claim to be another."""
        return digest_of(self.inputs)

    def fields(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON."""
        plain = {n: dict(v) if isinstance(v, Mapping) else v for n, v in self._asdict().items()}
        plain["artifacts"] = {name: a._asdict() for name, a in self.artifacts.items()}
        return plain

    def encode(self) -> bytes:
        """Return the bytes of the file `manifest.json`."""
        body = canonical(self.fields())[:-1]
        return body + _seal_of(body)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest in `data`.

        Raises ValueError for anything that `encode` would not have written.
        """
        if len(data) > MAX_BYTES:
            raise ValueError(f"the manifest has {len(data)} bytes, more than {MAX_BYTES}")
        body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if seal != _seal_of(body):
            raise ValueError("the checksum of the manifest does not match its content")
        return cls._parsed(body + b"}", canonically=True)

    @classmethod
    def believed(cls, data: bytes) -> Manifest:
        """Parse a manifest; only the types of its fields are checked.

        Listings of many entries use this short cut. Raises ValueError.
        """
        return cls._parsed(data[:-_SEAL_BYTES] + b"}", canonically=False)

    @classmethod
    def _parsed(cls, text: bytes, *, canonically: bool) -> Manifest:
        try:
            fields = json.loads(text)
            if canonically and canonical(fields) != text:
                raise ValueError("the manifest is not canonical JSON")
            artifacts = {
                name: Artifact(**artifact) for name, artifact in fields.pop("artifacts").items()
            }
            manifest = cls(artifacts=artifacts, **fields)
        except (AttributeError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"the manifest does not have the expected fields: {e}") from e
        if not all(map(_is_name, artifacts)):
            raise ValueError("the manifest lists an artifact with an invalid name")
        if not manifest._has_expected_types():
            raise ValueError("a field of the manifest has an unexpected type")
        if bool(artifacts) == ("record" in manifest.inputs):
            raise ValueError("the manifest lists no artifact, or that of a record lists one")
        if not manifest._has_expected_sizes():
            raise ValueError("a number in the manifest is out of range")
        return manifest

    def _has_expected_types(self) -> bool:
        mappings = (self.compiler, self.package, self.inputs, self.meta)
        return (
            all(isinstance(mapping, Mapping) for mapping in mappings)
            and all(isinstance(t, str) for m in mappings[:2] for pair in m.items() for t in pair)
            and all(_is_text(self.inputs.get(name)) for name in ("op", "target"))
            and all(isinstance(self.inputs.get(n, {}), Mapping) for n in ("source", "variant"))
            and type(self.seconds) in (int, float)
            and all(type(a.size) is int and _is_sha256(a.sha256) for a in self.artifacts.values())
        )

    def _has_expected_sizes(self) -> bool:
        sizes = (artifact.size for artifact in self.artifacts.values())
        return 0 <= self.seconds <= MAX_SECONDS and all(0 <= size <= MAX_SIZE for size in sizes)


def _seal_of(body: bytes) -> bytes:
    return _SEAL % hashlib.sha256(body).hexdigest().encode()


def _is_text(value: object) -> bool:
    """Return whether a value is text that is not empty and that a terminal can print."""
    return isinstance(value, str) and value.isprintable() and bool(value)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and _HEXADECIMAL.issuperset(value)


def _is_name(name: str) -> bool:
    """Return whether an artifact may have a name: short, plain, not hidden, not like an option."""
    plain = 0 < len(name) <= _LONGEST_NAME and _NAME_CHARACTERS.issuperset(name)
    return plain and name[0] not in ".-" and name not in RESERVED
