"""Settings files: `/etc/jitkern/config.toml`, then the user's own file, which wins.

Each key is a field of `Config`. Six keys have no environment variable: those that decide where
native code may be loaded from (`trusted`, `trusted_keys`, `signed`, `trusted_remotes`), and those
that name files with secrets (`remote_token_file`, `sign_key`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jitkern.errors import SettingError, meant
from jitkern.files.trust import why_untrusted_entry


def read(path: Path, settings: Collection[str]) -> dict[str, Any]:
    """Return the values in a settings file by their keys, which are among `settings`.

    Raises SettingError, naming the file, for an unknown key, and for a file that another user could
    have written.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and why_untrusted_entry(status, {0, os.geteuid()}):
            raise SettingError(
                f"{path} is not used: another user could have written it; fix its owner and mode"
            )
        text = file.read().decode(errors="replace")
    values = _parsed(text, path)
    for key in values.keys() - set(settings):
        names = ", ".join(sorted(settings))
        raise SettingError(
            f"{path}: `{key}` is not a setting: expected one of {names}{meant(key, settings)}"
        )
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
