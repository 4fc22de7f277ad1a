"""Receipts: a short way from a call to the entry that served it, in one file for each call.

Receipts lie in the folder `inline` of the root, and are deleted when their entries are gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jitkern.cache import RECEIPTS, VERSION, layout
from jitkern.files import atomic

_MAX_RECEIPTS = 512


def leave(root: Path, digest: str, path: Path, receipt: Mapping[str, Any], *, new: bool) -> None:
    """Write a receipt for the entry at `path`, if the entry lies in the user root.

    new: whether to replace an earlier receipt for the same call.
    """
    folder = root / RECEIPTS
    if not digest or not path.is_relative_to(root) or (not new and (folder / digest).is_file()):
        return
    body = json.dumps({**receipt, "target": path.parent.name, "entry": path.name}).encode()
    with suppress(OSError):
        atomic.make_directory(folder, 0o700, fsync=False)
        checksum = hashlib.sha256(body).hexdigest().encode()
        atomic.write(folder / digest, checksum + body, mode=0o600)
        if layout.is_tagged(root):
            paths = sorted(_receipts(folder), key=lambda path: path.lstat().st_mtime)
            for old in paths[:-_MAX_RECEIPTS]:
                old.unlink(missing_ok=True)


def forget(root: Path) -> None:
    """Delete the receipts in a root whose entries are gone."""
    for path in _receipts(root / RECEIPTS) if layout.is_tagged(root) else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = path.read_bytes()
            if hashlib.sha256(data[64:]).hexdigest().encode() != data[:64]:
                continue  # jitkern did not write this file
            receipt = json.loads(data[64:])
            if not (root / VERSION / receipt["target"] / receipt["entry"]).is_dir():
                path.unlink()


def _receipts(folder: Path) -> list[Path]:
    """Return the files in a folder that have the name of a receipt."""
    digits = set("0123456789abcdef")
    return [folder / n for n in layout.names(folder) if len(n) == 64 and digits.issuperset(n)]
