"""`manifest.json`, the last file written into an entry.

It holds every key input in clear, and each artifact's hash, as canonical JSON whose last field is
the SHA-256 of the bytes before it. Parsing is strict and size-capped: anything odd is a ValueError,
which the cache treats as a miss.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jitkern.cache.key import canonical, digest_of
from jitkern.named_tuple import NamedTuple

NAME = "manifest.json"
LOG = "compile.log"
BEGINS = b'{"artifacts":{"'  # of every manifest: its fields are sorted, and there is an artifact
MAX_BYTES = 4 << 20  # of a manifest
MAX_SIZE = 1 << 40  # of an artifact
MAX_SECONDS = 1e9
RESERVED = frozenset((NAME, LOG, "manifest.sig"))  # no artifact may have such a name
_SEAL = b',"sha256":"%s"}\n'
_SEAL_BYTES = len(_SEAL % bytes(64))
_HEXADECIMAL = frozenset("0123456789abcdef")
_OF_NAMES = frozenset(f"{string.ascii_letters}{string.digits}_.-")
_LONGEST_NAME = 128


class Artifact(NamedTuple):
    """Size in bytes and SHA-256, in hex, of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Artifact:
        """The artifact that `data` is."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


class Manifest(NamedTuple):
    """What an entry holds and what it was made from.

    meta: what loading needs to know (symbols, parameters); compiler: who built it; seconds: how
    long it took; package: name and version of the package that the source came in.
    """

    inputs: dict[str, Any]
    artifacts: Mapping[str, Artifact] = MappingProxyType({})
    meta: Mapping[str, Any] = MappingProxyType({})
    compiler: Mapping[str, str] = MappingProxyType({})
    seconds: float = 0.0
    package: Mapping[str, str] = MappingProxyType({})

    @property
    def digest(self) -> str:
        """Recomputed from the inputs, so that an entry cannot claim to be another."""
        return digest_of(self.inputs)

    def fields(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        plain = {n: dict(v) if isinstance(v, Mapping) else v for n, v in self._asdict().items()}
        plain["artifacts"] = {name: a._asdict() for name, a in self.artifacts.items()}
        return plain

    def encode(self) -> bytes:
        """The file's bytes."""
        body = canonical(self.fields())[:-1]
        return body + _seal_of(body)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in `data`.

        Raises ValueError for anything that `encode` would not have written.
        """
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes, and at most {MAX_BYTES} are read")
        body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if seal != _seal_of(body):
            raise ValueError("its checksum does not match its content")
        return cls._parsed(body + b"}", canonically=True)

    @classmethod
    def believed(cls, data: bytes) -> Manifest:
        """The manifest in `data`, of which no more is checked than the types of its fields.

        For listings of many. Raises ValueError.
        """
        return cls._parsed(data[:-_SEAL_BYTES] + b"}", canonically=False)

    @classmethod
    def _parsed(cls, text: bytes, *, canonically: bool) -> Manifest:
        try:
            fields = json.loads(text)
            if canonically and canonical(fields) != text:
                raise ValueError("it is not canonical")
            artifacts = {
                name: Artifact(**artifact) for name, artifact in fields.pop("artifacts").items()
            }
            manifest = cls(artifacts=artifacts, **fields)
        except (AttributeError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"it has not the expected fields: {e}") from e
        if not artifacts or not all(map(_is_name, artifacts)):
            raise ValueError("it lists no artifact, or one with an odd name")
        if not manifest._has_expected_types():
            raise ValueError("a field of it has an unexpected type")
        if not manifest._has_expected_sizes():
            raise ValueError("a number in it is out of range")
        return manifest

    def _has_expected_types(self) -> bool:
        texts = [*self.compiler.items(), *self.package.items()] if self._has_mappings() else [(0,)]
        return (
            all(isinstance(text, str) for pair in texts for text in pair)
            and all(_is_text(self.inputs.get(name)) for name in ("op", "target"))
            and all(isinstance(self.inputs.get(n, {}), Mapping) for n in ("source", "variant"))
            and type(self.seconds) in (int, float)
            and all(type(a.size) is int and _is_sha256(a.sha256) for a in self.artifacts.values())
        )

    def _has_expected_sizes(self) -> bool:
        sizes = (artifact.size for artifact in self.artifacts.values())
        return 0 <= self.seconds <= MAX_SECONDS and all(0 <= size <= MAX_SIZE for size in sizes)

    def _has_mappings(self) -> bool:
        return all(
            isinstance(m, Mapping) for m in (self.inputs, self.meta, self.compiler, self.package)
        )


def _seal_of(body: bytes) -> bytes:
    return _SEAL % hashlib.sha256(body).hexdigest().encode()


def _is_text(value: object) -> bool:
    """Whether it may be shown: it is neither empty nor holds what no terminal can print."""
    return isinstance(value, str) and value.isprintable() and bool(value)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and _HEXADECIMAL.issuperset(value)


def _is_name(name: str) -> bool:
    """Whether it may name an artifact: short and plain, neither hidden nor an option."""
    plain = 0 < len(name) <= _LONGEST_NAME and _OF_NAMES.issuperset(name)
    return plain and name[0] not in ".-" and name not in RESERVED
