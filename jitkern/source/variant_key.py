"""The key of a variant: everything that can change the bytes of its artifact."""

from __future__ import annotations

import re
from typing import Any

from jitkern import config
from jitkern.cache.key import Key, digest_of
from jitkern.source.closure import Closure
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

_LONGEST = 100  # letters of an op's name in that of a folder
SCHEMA = 3  # bump when the meaning of an input, a default flag or an artifact's layout changes


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
    """A label with the letters that names of folders may have (see `cache.layout`)."""
    plain = re.sub(r"[^\w.-]", "_", label, flags=re.ASCII)
    return re.sub(r"\.\.+", ".", plain).strip(".-")


def _unit_flags(source: Source) -> dict[str, Any]:
    """The flags of single files for the key; {} if there are none."""
    flags = {unit.file: list(unit.flags) for unit in source.unit_flags}
    return {"unit_flags": flags} if flags else {}
