"""Receipts: a short way from a call to the entries that served it, in one file for each call.

Receipts lie in a folder of the user root; their entries may lie in any layer. When an entry is
gone, its receipts are deleted. They are no facts (see `cache.facts`): a lookup imports and parses
more than a receipt is there to save. Whoever leaves a receipt also says what else must be as it
was; `read` checks the entries alone.
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
from jitkern.files.owned import Layer, Trust
from jitkern.named_tuple import NamedTuple

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry
    from jitkern.config import Config

_MAX_RECEIPTS = 2048
_MAX_BYTES = 1 << 20  # of a receipt
_PLAIN_FLAGS = ("-O", "-W", "-D", "-U", "-f", "-m", "-std=", "-g", "-arch=sm_")


def may_leave(settings: Config) -> bool:
    """Return whether the user root takes receipts."""
    root = settings.cache_dir
    return not owned.distrust_root(root, settings.trusted) and os.access(root, os.W_OK)


def leave(
    settings: Config,
    digest: str,
    entries: Sequence[Entry],
    receipt: Mapping[str, Any],
    *,
    new: bool,
) -> None:
    """Write a receipt for entries of the user root or of layers, unless their signatures count.

    new: whether to replace an earlier receipt for the same call.
    """
    root = settings.cache_dir
    folder = root / RECEIPTS
    if not digest or not may_leave(settings) or (not new and (folder / digest).is_file()):
        return
    try:
        for entry in entries:
            _layer_at(settings, entry.root)
    except ValueError:
        return
    body = json.dumps({**receipt, "entries": [*map(_described, entries)]}).encode()
    if len(body) > _MAX_BYTES:
        return
    with suppress(OSError):
        files.atomic.make_directory(folder, 0o700, fsync=False)
        checksum = hashlib.sha256(body).hexdigest().encode()
        files.atomic.write(folder / digest, checksum + body, mode=0o600)
        paths = _receipts(folder)
        if len(paths) > _MAX_RECEIPTS and cache.layout.is_tagged(root):
            paths.sort(key=lambda path: path.lstat().st_mtime)
            for old in paths[: len(paths) // 4]:
                old.unlink(missing_ok=True)


def _described(entry: Entry) -> dict[str, Any]:
    """Return what a receipt says of an entry: where it lies, and what its artifact is."""
    manifest, name = entry.manifest, entry.manifest.meta.get("artifact", "")
    target, label, digest = entry.reference
    artifact = {"artifact": name, **manifest.artifacts[name]._asdict()} if name else {}
    return {
        "root": str(entry.root), "target": target, "entry": entry.path.name,
        "label": label, "digest": digest, "op": entry.op, "variant": entry.variant,
        "meta": dict(manifest.meta), "seconds": manifest.seconds, **artifact,
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
    owners = owned.user_layer(root).owners
    with ExitStack() as stack:
        top = stack.enter_context(owned.opened(root, follow=True))
        folder = stack.enter_context(owned.opened(root / RECEIPTS, top))
        receipt = _decoded(owned.read(root / RECEIPTS, folder, digest, _MAX_BYTES, owners))
        layers = {e["root"]: _layer_at(settings, Path(e["root"])) for e in receipt["entries"]}
        entries = receipt["entries"]
        opened = [_opened(stack, layers[e["root"]], e, settings.verify) for e in entries]
        yield receipt, opened


def _layer_at(settings: Config, root: Path) -> Layer:
    """Return the layer at a root. Raises ValueError if entries there need a full lookup, or more.

    The user root was judged before.
    """
    if root == settings.cache_dir:
        return owned.user_layer(root, settings.trusted)
    if root not in settings.system_cache and root not in owned.installed_layers():
        raise ValueError(f"{root} is no layer")
    layer = owned.layer_of(root, Trust.of(settings))
    if isinstance(layer, str) or layer.keys:
        raise ValueError(f"{root} is not trusted, or for its signatures alone")
    return layer


def _opened(stack: ExitStack, layer: Layer, described: dict[str, Any], verify: str) -> Opened:
    """Open and verify an entry, until the stack ends. Raises ValueError and OSError."""
    path, directory = layer.root, stack.enter_context(owned.opened(layer.root, follow=True))
    names = VERSION, described["target"], described["entry"]
    for name in names:
        path /= name
        directory = stack.enter_context(owned.opened(path, directory))
        if not layer.vouched or name == names[-1]:
            status = path.stat() if directory is None else os.fstat(directory)
            owned.check_owner(name, status, layer.owners)
    data, place = b"", ""
    if artifact := described.get("artifact"):
        expected = described["size"], described["sha256"]
        data, _ = owned.verified(path, directory, artifact, expected, layer.owners, verify=verify)
        place = owned.path_in(directory, path, artifact)
    with owned.opened_file(path, directory, MANIFEST, layer.owners) as (file, status):
        if layer.own:  # in any case, an entry without its manifest is no entry
            owned.touch(file.fileno(), status)
    return Opened(described, path, data, place)


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
            places = (Path(e["root"], VERSION, e["target"], e["entry"]) for e in entries)
            if not all(map(Path.is_dir, places)):
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
