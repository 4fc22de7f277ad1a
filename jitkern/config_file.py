"""Settings files: `/etc/jitkern/config.toml`, then the user's own, which wins.

Each key is a setting's variable without `JITKERN_`, in lower case. Three more stand here and
nowhere else, since they say what native code may be loaded from: `trusted`, `trusted_keys` and
`signed`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jitkern.trust import distrust_entry

TRUST = ("TRUSTED", "TRUSTED_KEYS", "SIGNED")


def read(path: Path, known: Collection[str]) -> dict[str, str]:
    """`JITKERN_NAME` -> value, as the environment would have it, for the settings in the file.

    Raises ValueError, naming file and key, for what it cannot use, and for a file that another user
    could have written.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and distrust_entry(status, {0, os.geteuid()}):
            raise ValueError(f"{path} is not used: another user could have written it")
        text = file.read().decode(errors="replace")
    settings = {}
    for key, value in _parsed(text, path).items():
        name = f"JITKERN_{key.upper()}"
        if name not in known or key != key.lower():
            names = ", ".join(sorted(n.removeprefix("JITKERN_").lower() for n in known))
            raise ValueError(f"{path}: `{key}` is not a setting; there are: {names}")
        separator = "\n" if name == "JITKERN_TRUSTED_KEYS" else os.pathsep
        settings[name] = _as_text(value, separator, f"{path}: `{key}`")
    return settings


def _parsed(text: str, path: Path) -> dict[str, Any]:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        parsed: dict[str, Any] = importlib.import_module(name).loads(text)
    except ImportError as e:
        raise ValueError(f"{path} needs Python 3.11, or `pip install tomli`") from e
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return parsed


def _as_text(value: object, separator: str, what: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return separator.join(value)
    raise ValueError(f"{what} is neither text, a number nor a list of texts")
