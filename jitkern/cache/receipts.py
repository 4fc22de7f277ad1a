"""Receipts: a short way from a call to the entry that served it, in one file for each call.

Receipts lie in the folder `inline` of the root, and are deleted when their entries are gone. They
are no facts (see `cache.facts`): a lookup imports and parses more than a receipt is there to save.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from jitkern import cache, files
from jitkern.cache import RECEIPTS, VERSION
from jitkern.config import Config
from jitkern.files import owned

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
        files.atomic.make_directory(folder, 0o700, fsync=False)
        checksum = hashlib.sha256(body).hexdigest().encode()
        files.atomic.write(folder / digest, checksum + body, mode=0o600)
        if cache.layout.is_tagged(root):
            paths = sorted(_receipts(folder), key=lambda path: path.lstat().st_mtime)
            for old in paths[:-_MAX_RECEIPTS]:
                old.unlink(missing_ok=True)


@contextmanager
def read(settings: Config, digest: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a receipt whose entry is whole, and the place to load its artifact from meanwhile.

    The artifact is read under the rules of `cache.entry.read_entry`. Raises ValueError, OSError,
    KeyError, TypeError.
    """
    root = settings.cache_dir
    if owned.distrust_root(root, settings.trusted):
        raise ValueError(root)
    owners = frozenset({os.geteuid()})
    with ExitStack() as stack:
        top = stack.enter_context(owned.opened(root, follow=True))
        folder = stack.enter_context(owned.opened(root / RECEIPTS, top))
        receipt = _decoded(owned.read(root / RECEIPTS, folder, digest, 1 << 20, owners))
        entry = root
        for name in (VERSION, receipt["target"], receipt["entry"]):
            entry /= name
            top = stack.enter_context(owned.opened(entry, top))
            owned.check_owner("it", entry.stat() if top is None else os.fstat(top), owners)
        artifact = os.path.basename(receipt["opens"]["path"])  # noqa: PTH119  imports less
        if receipt["opens"]["path"] != str(entry / artifact):
            raise ValueError("another root")
        expected = (receipt["size"], receipt["sha256"])
        owned.verified(entry, top, artifact, expected, owners, verify=settings.verify)
        with owned.opened_file(entry, top, "manifest.json", owners) as (file, status):
            owned.touch(file.fileno(), status)  # an entry without its manifest is no entry
        yield receipt, owned.path_in(top, entry, artifact)


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the receipt in `data`. Raises ValueError for bytes that jitkern did not write."""
    if hashlib.sha256(data[64:]).hexdigest().encode() != data[:64]:
        raise ValueError("not a receipt")
    receipt: dict[str, Any] = json.loads(data[64:])
    return receipt


def forget(root: Path) -> None:
    """Delete the receipts in a root whose entries are gone."""
    for path in _receipts(root / RECEIPTS) if cache.layout.is_tagged(root) else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            receipt = _decoded(path.read_bytes())
            if not (root / VERSION / receipt["target"] / receipt["entry"]).is_dir():
                path.unlink()


def _receipts(folder: Path) -> list[Path]:
    """Return the files in a folder that have the name of a receipt."""
    digits = set("0123456789abcdef")
    return [folder / n for n in cache.layout.names(folder) if len(n) == 64 and digits.issuperset(n)]
