"""An entry: a published directory that is read without a lock and checked in every part.

An entry is read through one open descriptor, so a reader sees one generation of it even while
another process replaces it. Any defect is a ValueError, which the cache treats as a miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from jitkern import files
from jitkern.cache import VERSION
from jitkern.cache.manifest import MAX_BYTES, NAME, Manifest
from jitkern.files import trust
from jitkern.files.trust import Layer
from jitkern.named_tuple import NamedTuple

_PASSING = frozenset((  # errors of this process or moment, not of the entry
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ESTALE,
))  # fmt: skip


Verified = dict[str, tuple[int, ...]]  # the identity of each file by its name; "": the directory


class Entry(NamedTuple):
    """A whole entry: its directory, its manifest, and the identities of the verified files."""

    path: Path
    manifest: Manifest
    verified: Verified = {}

    def __repr__(self) -> str:
        return f"<Entry {self.path.name} of {self.path.parent.name}>"

    @property
    def root(self) -> Path:
        """The root of the layer that holds the entry."""
        return self.path.parents[2]

    @property
    def reference(self) -> str:
        """The reference of the entry's key."""
        label = self.path.name.rpartition("-")[0]
        return f"{self.path.parent.name}/{label}-{self.manifest.digest}"

    @property
    def op(self) -> str:
        """The op of the entry, with its namespace."""
        return str(self.manifest.inputs["op"])

    @property
    def variant(self) -> str:
        """The part of the label after the name of the op, e.g. `f32`."""
        base = self.op.removeprefix("jitkern::").replace("::", ".")
        label = self.path.name.rpartition("-")[0]
        return label.removeprefix(base).removeprefix(".")

    def read(self, name: str) -> bytes:
        """Return the verified bytes of an artifact. Raises ValueError or OSError if damaged."""
        with trust.opened(self.path) as directory:
            artifact = self.manifest.artifacts[name]
            return trust.verified(directory, name, artifact, None, verify="always")[0]

    @contextlib.contextmanager
    def loadable(self) -> Iterator[str]:
        """Yield a path for the loader of the artifact, valid inside the block.

        The path leads through an open descriptor: who may rename a directory above cannot exchange
        the code. Raises ValueError if the artifact was replaced since it was verified, and OSError.
        """
        name = self.manifest.meta["artifact"]
        with trust.opened(self.path) as directory:
            if self.verified:
                self._check_same(directory, name)
            else:  # this process has just published the entry, and has not read it back
                owners = frozenset({os.geteuid()})
                trust.check_owner("its directory", os.fstat(directory), owners)
                artifact = self.manifest.artifacts[name]
                trust.verified(directory, name, artifact, owners, verify="always")
            yield (place := trust.path_in(directory, self.path, name))
            trust.name_library(place, self.path / name)

    def _check_same(self, directory: int, name: str) -> None:
        identities = {"": trust.identity(os.fstat(directory))[:2]}
        with trust.opened_file(directory, name, None) as (_, status):
            identities[name] = trust.identity(status)
        if any(self.verified.get(file) != identity for file, identity in identities.items()):
            raise ValueError("the entry was replaced after it was verified")

    def files(self) -> dict[str, bytes]:
        """Return the verified files of the entry for another cache, with the checked manifest.

        The log is left out: no hash covers it, and it holds paths of this machine. Raises
        ValueError or OSError if the entry is damaged.
        """
        signatures = self.signatures()
        return {
            **({files.signature.NAME: signatures} if signatures else {}),
            NAME: self.manifest.encode(),
            **{name: self.read(name) for name in sorted(self.manifest.artifacts)},
        }

    def signatures(self) -> bytes:
        """Return the content of `manifest.sig`, or b"". Raises ValueError or OSError."""
        with trust.opened(self.path) as directory:
            return _signatures_in(directory)

    @property
    def size(self) -> int:
        """The size of the artifacts in bytes."""
        return sum(artifact.size for artifact in self.manifest.artifacts.values())


class Damaged(ValueError):
    """An entry is not whole; the message says why.

    path: the file or directory to quarantine; None where it was replaced meanwhile or is not ours.
    """

    def __init__(self, message: str, path: Path | None) -> None:
        super().__init__(message)
        self.path = path


class Unsigned(ValueError):
    """An entry carries no signature of a trusted key, and its layer demands one."""


def read_entry(layer: Layer, target: str, name: str, *, verify: str, touch: bool = False) -> Entry:
    """Return the entry `name` for `target` in a layer, after all checks.

    The checks are of owner and mode, of the signature where the layer demands one, of the manifest,
    and of size and hash of the artifacts. verify: "always", or "size" to skip the hashes. touch:
    note the use of the entry. Raises FileNotFoundError for a missing entry, Damaged, Unsigned, and
    OSError where the entry could not be read this time.
    """
    path = layer.root / VERSION / target / name
    if os.sep in target or os.sep in name:
        raise FileNotFoundError(path)  # no entry has such a name
    with contextlib.ExitStack() as open_directories:
        directory = open_directories.enter_context(trust.opened(layer.root, follow=True))
        for place in (path.parents[1], path.parent, path):
            _check_folder(directory, place.parent, layer)
            try:
                directory = open_directories.enter_context(trust.opened(place, directory))
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise Damaged(f"{place} is not a directory", place) from e
                if place != path or e.errno in (errno.ENOENT, *_PASSING):
                    raise
                raise Damaged(str(e), path) from e
        status = os.fstat(directory)
        try:
            trust.check_owner("its directory", status, layer.owners)
            return _read_opened(path, directory, layer, verify=verify, touch=touch)
        except FileNotFoundError as e:
            raise Damaged(f"{e.filename} is missing", _current(path, status)) from e
        except OSError as e:
            if e.errno in _PASSING:
                raise
            raise Damaged(str(e), _current(path, status)) from e
        except Unsigned:
            raise
        except ValueError as e:
            raise Damaged(str(e), _current(path, status)) from e


def _check_folder(directory: int, path: Path, layer: Layer) -> None:
    """Raise ValueError where other users can write a directory that holds entries of a layer.

    The root itself was checked when it was chosen as the root of a layer.
    """
    if layer.owners is not None and not layer.vouched and path != layer.root:
        trust.check_owner(str(path), os.fstat(directory), layer.owners)


def _current(path: Path, status: os.stat_result) -> Path | None:
    """Return `path` if it still names the directory of `status`, which must be open; else None."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), status):
            return path
    return None


def _signatures_in(directory: int) -> bytes:
    """Return the content of `manifest.sig`, or b""."""
    try:
        return trust.read(directory, files.signature.NAME, files.signature.MAX_BYTES, None)
    except FileNotFoundError:
        return b""


def _read_opened(path: Path, directory: int, layer: Layer, *, verify: str, touch: bool) -> Entry:
    data = trust.read(directory, NAME, MAX_BYTES, layer.owners, used=touch)
    if layer.keys:
        reason = files.signature.distrust(data, _signatures_in(directory), layer.keys)
        if reason:
            raise Unsigned(reason)
    manifest = Manifest.decode(data)
    if path.name.rpartition("-")[2] != manifest.digest[:16]:
        raise ValueError("its manifest belongs to another entry")
    if manifest.inputs["target"] != path.parent.name:
        raise ValueError("its manifest belongs to another target")
    verified = {"": trust.identity(os.fstat(directory))[:2]}
    for name, artifact in manifest.artifacts.items():
        status = trust.verified(directory, name, artifact, layer.owners, verify=verify)[1]
        verified[name] = trust.identity(status)
    return Entry(path, manifest, verified)
