"""Settings files: `/etc/jitkern/config.toml`, then the user's own, which wins.

Each key is a setting's variable without `JITKERN_`, in lower case. Three more stand here and
nowhere else, since they say what native code may be loaded from: `trusted`, `trusted_keys` and
`signed`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jitkern.errors import SettingError
from jitkern.files.owned import distrust_entry

TRUST = ("TRUSTED", "TRUSTED_KEYS", "SIGNED")


def read(path: Path, settings: Collection[str]) -> dict[str, object]:
    """The values in the file, by the names that they have there.

    settings: what may stand in it beside what says whom to trust. Raises SettingError, naming the
    file, for a key that is none, and for a file that another user could have written.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and distrust_entry(status, {0, os.geteuid()}):
            raise SettingError(f"{path} is not used: another user could have written it")
        text = file.read().decode(errors="replace")
    known = {name.lower() for name in (*settings, *TRUST)}
    values = _parsed(text, path)
    for key in values.keys() - known:
        names = ", ".join(sorted(known))
        raise SettingError(f"{path}: `{key}` is not a setting; there are: {names}")
    return values


def _parsed(text: str, path: Path) -> dict[str, Any]:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        parsed: dict[str, Any] = importlib.import_module(name).loads(text)
    except ImportError as e:
        raise SettingError(f"{path} needs Python 3.11, or `pip install tomli`") from e
    except ValueError as e:
        raise SettingError(f"{path}: {e}") from e
    return parsed
