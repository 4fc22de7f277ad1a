"""Settings files: `/etc/jitkern/config.toml`, then the user's own file, which wins.

Each key is the name of an environment variable without `JITKERN_`, in lower case. Three keys have
no variable, since they decide where native code may be loaded from: `trusted`, `trusted_keys` and
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
    """Return the values in a settings file by their keys.

    settings: the keys that are allowed beside the keys of TRUST. Raises SettingError, naming the
    file, for an unknown key, and for a file that another user could have written.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and distrust_entry(status, {0, os.geteuid()}):
            raise SettingError(
                f"{path} is not used: another user could have written it; mend its owner and mode"
            )
        text = file.read().decode(errors="replace")
    known = {name.lower() for name in (*settings, *TRUST)}
    values = _parsed(text, path)
    for key in values.keys() - known:
        names = ", ".join(sorted(known))
        raise SettingError(f"{path}: `{key}` is not a setting: expected one of {names}")
    return values


def _parsed(text: str, path: Path) -> dict[str, Any]:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        parsed: dict[str, Any] = importlib.import_module(name).loads(text)
    except ImportError as e:
        raise SettingError(
            f"{path} cannot be read without a TOML parser: use Python 3.11, or `pip install tomli`"
        ) from e
    except ValueError as e:
        raise SettingError(f"{path}: this is not valid TOML: {e}") from e
    return parsed
