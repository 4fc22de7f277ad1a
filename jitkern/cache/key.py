"""The key of an entry: named inputs, kept in clear, and the SHA-256 of their canonical JSON.

Inputs are everything that can change the artifact's bytes. No inputs are mtimes, where the files
lie (unless a flag names a path), the working directory, `$HOME`, and the compiler's identity, which
is provenance (see docs/cache.md, "What the key covers").
"""

from __future__ import annotations

import hashlib
import json
import string
from typing import Any

from jitkern.named_tuple import NamedTuple

SCHEMA = 9  # bump when the meaning of an input, a default flag or an artifact's layout changes
OBJECT = "object"  # the kind of entries with the object of one unit, and the namespace of their ops
LONGEST_PLACE = 155  # letters of <target>/<label>-<digest>: bundles are USTAR, which takes no more
_LETTERS = frozenset(f"{string.ascii_letters}{string.digits}_.-")
_LONGEST = 100  # letters of an op's name in that of a folder
_SHORTEST = 16  # letters of a label, whatever the target; bundles leave out what is then too long


class Key(NamedTuple):
    """The key of an entry: `inputs` in clear, their `digest`, and the label of the folder name."""

    inputs: dict[str, Any]
    digest: str
    label: str

    @property
    def target(self) -> str:
        """The target as spelled in the path."""
        return str(self.inputs["target"])

    @property
    def name(self) -> str:
        """The entry's folder name, e.g. `softmax.f32-6b898cd571c96182`."""
        return f"{self.label}-{self.digest[:16]}"

    @property
    def reference(self) -> str:
        """The place with the whole digest, by which a record names the entry in any cache."""
        return f"{self.target}/{self.label}-{self.digest}"


def digest_of(inputs: dict[str, Any]) -> str:
    """Return the SHA-256, in hex, of the canonical JSON of `inputs`."""
    return hashlib.sha256(canonical(inputs)).hexdigest()


def canonical(value: object) -> bytes:
    """Return JSON with sorted keys and no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def label_of(op: str, label: str, target: str, end: str = "") -> str:
    """Return the label of an entry of an op, in letters that names of folders may have.

    It is cut, in front of `end`, to what `LONGEST_PLACE` leaves beside the target and a digest.
    """
    namespace, _, name = op.partition("::")
    name = name if namespace == "jitkern" else f"{namespace}.{name}"
    letters = (c if c in _LETTERS else "_" for c in f"{name[:_LONGEST]}.{label}")
    plain = "".join(letters)
    while ".." in plain:  # no pattern: a warm start compiles none
        plain = plain.replace("..", ".")
    room = LONGEST_PLACE - len(f"{target}/-") - 16 - len(end)
    return plain.strip(".-")[: max(room, _SHORTEST)].rstrip(".-") + end
