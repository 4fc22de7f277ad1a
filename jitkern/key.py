"""The key of an entry: named inputs, kept in clear, and the SHA-256 of their canonical JSON.

In: everything that can change the artifact's bytes. Out: mtimes, absolute paths, the working
directory, `$HOME`, and the compiler's identity, which is provenance (see README, "The
key").
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from jitkern import config
from jitkern.closure import Closure
from jitkern.kernel import Source, Variant
from jitkern.named_tuple import NamedTuple
from jitkern.target import Target

_LONGEST = 100  # letters of an op's name in that of a folder
SCHEMA = 3  # bump when the meaning of an input, a default flag or an artifact's layout changes


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


def make_key(variant: Variant, target: Target, flags: tuple[str, ...], closure: Closure) -> Key:
    """The key of `variant` built for `target` with `flags` from the files of `closure`."""
    source = variant.source
    environment = config.current().environment
    inputs = {
        "schema": SCHEMA,
        "op": variant.op,
        "source": {
            "kind": source.kind,
            "files": list(source.files),
            "closure": closure.files,
            "versions": closure.versions,
            "min_compiler": source.min_compiler,
            **_unit_flags(source),
        },
        "flags": list(flags),
        "variant": {
            "function": variant.function,
            "template": [list(item) for item in variant.template],
            "signature": list(variant.signature),
            "options": [list(item) for item in variant.options],
        },
        "target": str(target),
        "environment": {name: environment.get(name) for name in source.environment},
    }
    namespace, _, name = variant.op.partition("::")
    op = name if namespace == "jitkern" else f"{namespace}.{name}"
    label = f"{op[:_LONGEST]}.{variant.label}"
    return Key(inputs, digest_of(inputs), _as_folder(label))


def _as_folder(label: str) -> str:
    """A label as folders are named (see `layout`): plain letters, and no dots side by side."""
    plain = re.sub(r"[^\w.-]", "_", label, flags=re.ASCII)
    return re.sub(r"\.\.+", ".", plain).strip(".-")


def _unit_flags(source: Source) -> dict[str, Any]:
    """Flags of single files, where there are any."""
    flags = {unit.file: list(unit.flags) for unit in source.unit_flags}
    return {"unit_flags": flags} if flags else {}


def digest_of(inputs: dict[str, Any]) -> str:
    """SHA-256, in hex, of the canonical JSON of `inputs`."""
    return hashlib.sha256(canonical(inputs)).hexdigest()


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
