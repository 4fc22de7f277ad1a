"""The key of an entry: named inputs, kept in clear, and the SHA-256 of their canonical JSON.

In: everything that can change the artifact's bytes. Out: mtimes, absolute paths, the working
directory, `$HOME`, and the compiler's identity, which is provenance (see README, "The
key").
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jitkern.named_tuple import NamedTuple


class Key(NamedTuple):
    """`inputs` in clear, their `digest`, and where an entry lies below the version folder."""

    inputs: dict[str, Any]
    digest: str
    label: str

    @property
    def target(self) -> str:
        """The target as it is spelled in the path."""
        return str(self.inputs["target"])

    @property
    def name(self) -> str:
        """The entry's folder name, e.g. `softmax.f32-6b898cd571c96182`."""
        return f"{self.label}-{self.digest[:16]}"


def digest_of(inputs: dict[str, Any]) -> str:
    """SHA-256, in hex, of the canonical JSON of `inputs`."""
    return hashlib.sha256(canonical(inputs)).hexdigest()


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
