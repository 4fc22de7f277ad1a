"""Receipts: a short way from a call to the entries that served it, in one file for each call.

Receipts lie in a folder of the root, and are deleted when their entries are gone. They are no facts
(see `cache.facts`): a lookup imports and parses more than a receipt is there to save. Whoever
leaves a receipt also says what else must be as it was; `read` checks the entries alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import cache, files
from jitkern.cache import MANIFEST, RECEIPTS, VERSION
from jitkern.files import owned
from jitkern.named_tuple import NamedTuple

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry
    from jitkern.config import Config

_MAX_RECEIPTS = 2048
_MAX_BYTES = 1 << 20  # of a receipt
_PLAIN_FLAGS = ("-O", "-W", "-D", "-U", "-f", "-m", "-std=", "-g", "-arch=sm_")


def leave(
    root: Path, digest: str, entries: Sequence[Entry], receipt: Mapping[str, Any], *, new: bool
) -> None:
    """Write a receipt for entries that lie in the user root.

    new: whether to replace an earlier receipt for the same call.
    """
    folder = root / RECEIPTS
    inside = all(entry.path.is_relative_to(root) for entry in entries)
    if not digest or not inside or (not new and (folder / digest).is_file()):
        return
    body = json.dumps({**receipt, "entries": [*map(_described, entries)]}).encode()
    if len(body) > _MAX_BYTES:
        return
    with suppress(OSError):
        files.atomic.make_directory(folder, 0o700, fsync=False)
        checksum = hashlib.sha256(body).hexdigest().encode()
        files.atomic.write(folder / digest, checksum + body, mode=0o600)
        if cache.layout.is_tagged(root):
            paths = sorted(_receipts(folder), key=lambda path: path.lstat().st_mtime)
            for old in paths[:-_MAX_RECEIPTS]:
                old.unlink(missing_ok=True)


def _described(entry: Entry) -> dict[str, Any]:
    """Return what a receipt says of an entry: where it lies, and what its artifact is."""
    manifest, name = entry.manifest, entry.manifest.meta.get("artifact", "")
    target, label, digest = entry.reference
    artifact = {"artifact": name, **manifest.artifacts[name]._asdict()} if name else {}
    return {
        "target": target, "label": label, "digest": digest, "entry": entry.path.name,
        "op": entry.op, "variant": entry.variant, "meta": dict(manifest.meta),
        "seconds": manifest.seconds, **artifact,
    }  # fmt: skip


class Opened(NamedTuple):
    """An entry of a receipt that is open: what the receipt says of it, and its directory.

    data: the verified bytes of its artifact; b"" if it has none, or if only sizes are verified.
    place: a path for the loader of the artifact, valid while the entry is open.
    """

    described: dict[str, Any]
    path: Path
    data: bytes
    place: str


@contextmanager
def read(settings: Config, digest: str) -> Iterator[tuple[dict[str, Any], list[Opened]]]:
    """Yield a receipt whose entries are whole, and the entries, open meanwhile.

    The artifacts are read under the rules of `cache.entry.read_entry`. Raises ValueError, OSError,
    KeyError, TypeError.
    """
    root = settings.cache_dir
    if owned.distrust_root(root, settings.trusted):
        raise ValueError(root)
    owners = frozenset({os.geteuid()})
    with ExitStack() as stack:
        top = stack.enter_context(owned.opened(root, follow=True))
        folder = stack.enter_context(owned.opened(root / RECEIPTS, top))
        receipt = _decoded(owned.read(root / RECEIPTS, folder, digest, _MAX_BYTES, owners))
        version = _opened(stack, root / VERSION, top, owners)
        opened = []
        for described in receipt["entries"]:
            target = root / VERSION / described["target"]
            path = target / described["entry"]
            directory = _opened(stack, target, version, owners)
            directory = _opened(stack, path, directory, owners)
            data, place = b"", ""
            if artifact := described.get("artifact"):
                expected, verify = (described["size"], described["sha256"]), settings.verify
                data, _ = owned.verified(path, directory, artifact, expected, owners, verify=verify)
                place = owned.path_in(directory, path, artifact)
            with owned.opened_file(path, directory, MANIFEST, owners) as (file, status):
                owned.touch(file.fileno(), status)  # an entry without its manifest is no entry
            opened.append(Opened(described, path, data, place))
        yield receipt, opened


def _opened(stack: ExitStack, path: Path, parent: int | None, owners: frozenset[int]) -> int | None:
    """Open a directory below the root until the stack ends. Raises ValueError and OSError."""
    directory = stack.enter_context(owned.opened(path, parent))
    owned.check_owner("it", path.stat() if directory is None else os.fstat(directory), owners)
    return directory


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
            entries = _decoded(path.read_bytes())["entries"]
            if not all((root / VERSION / e["target"] / e["entry"]).is_dir() for e in entries):
                path.unlink()


def _receipts(folder: Path) -> list[Path]:
    """Return the files in a folder that have the name of a receipt."""
    digits = set("0123456789abcdef")
    return [folder / n for n in cache.layout.names(folder) if len(n) == 64 and digits.issuperset(n)]


def is_plain(flag: str) -> bool:
    """Return whether a flag names no file; the value of a macro may name one in quotes."""
    quotes = '"<' if "/" in flag else ""
    odd = quotes if flag.startswith("-D") else ",/"
    return flag.startswith(_PLAIN_FLAGS) and not set(flag) & set(f" \t\n@{odd}")
