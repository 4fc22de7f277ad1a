"""One published directory, read with no lock and trusted in nothing.

It is read through one open descriptor, so a reader sees one generation of it even while another
process replaces it. Whatever is odd is a ValueError, which the cache treats as a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from jitkern import files
from jitkern.cache import VERSION
from jitkern.cache.manifest import MAX_BYTES, NAME, Artifact, Manifest
from jitkern.files import owned
from jitkern.files.owned import Layer
from jitkern.named_tuple import NamedTuple

_PASSING = frozenset((  # what is wrong with this process or moment, not with the entry
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ESTALE,
))  # fmt: skip


Verified = dict[str, tuple[int, ...]]  # by the name of a file, what tells it from any other


class Entry(NamedTuple):
    """A whole entry: its directory, its manifest, and which files were verified."""

    path: Path
    manifest: Manifest
    verified: Verified = {}

    @property
    def root(self) -> Path:
        """Of the layer that it lies in."""
        return self.path.parents[2]

    @property
    def reference(self) -> tuple[str, str, str]:
        """What names it in any cache: its target, label and digest."""
        label = self.path.name.rpartition("-")[0]
        return self.path.parent.name, label, self.manifest.digest

    @property
    def op(self) -> str:
        """The op that it belongs to, qualified."""
        return str(self.manifest.inputs["op"])

    @property
    def variant(self) -> str:
        """The readable part of its name after that of the op, e.g. `f32`."""
        base = self.op.removeprefix("jitkern::").replace("::", ".")
        label = self.path.name.rpartition("-")[0]
        return label.removeprefix(base).removeprefix(".")

    def read(self, name: str) -> bytes:
        """The bytes of an artifact, verified. Raises ValueError or OSError if it is not whole."""
        with owned.opened(self.path) as directory:
            artifact = self.manifest.artifacts[name]
            return _check(self.path, directory, name, artifact, None, verify="always")[0]

    @contextlib.contextmanager
    def loadable(self) -> Iterator[str]:
        """Where a loader finds its artifact, as long as the block runs.

        The path leads through an open descriptor of the directory that was verified: whoever may
        rename what is above it cannot put other code in its place. Raises ValueError if it is not
        what was verified, and OSError.
        """
        name = self.manifest.meta["artifact"]
        with owned.opened(self.path) as directory:
            if directory is None:
                yield str(self.path / name)
                return
            if self.verified:
                self._check_same(directory, name)
            else:  # published by this process just now
                owners = frozenset({os.geteuid()})
                owned.check_owner("it", os.fstat(directory), owners)
                artifact = self.manifest.artifacts[name]
                _check(self.path, directory, name, artifact, owners, verify="always")
            yield owned.path_in(directory, self.path, name)

    def _check_same(self, directory: int, name: str) -> None:
        there = {"": _identity(os.fstat(directory))[:2]}
        with owned.opened_file(self.path, directory, name, None) as (_, status):
            there[name] = _identity(status)
        if any(self.verified.get(what) != identity for what, identity in there.items()):
            raise ValueError("it was replaced since it was verified")

    def files(self) -> dict[str, bytes]:
        """Its files as another cache takes them in, verified; the manifest is the one checked.

        Not the log: no hash covers it, and it holds paths of this machine. Raises ValueError or
        OSError if it is not whole.
        """
        signatures = self.signatures()
        return {
            **({files.signature.NAME: signatures} if signatures else {}),
            NAME: self.manifest.encode(),
            **{name: self.read(name) for name in sorted(self.manifest.artifacts)},
        }

    def signatures(self) -> bytes:
        """What is in its `manifest.sig`, b"" where it has none. Raises ValueError or OSError."""
        with owned.opened(self.path) as directory:
            try:
                return owned.read(
                    self.path, directory, files.signature.NAME, files.signature.MAX_BYTES, None
                )
            except FileNotFoundError:
                return b""

    @property
    def size(self) -> int:
        """Bytes of its artifacts."""
        return sum(artifact.size for artifact in self.manifest.artifacts.values())


class Damaged(ValueError):
    """What is wrong with an entry.

    path: what to put out of the way; None where that was replaced since, or is not ours to touch.
    """

    def __init__(self, message: str, path: Path | None) -> None:
        super().__init__(message)
        self.path = path


class Unsigned(ValueError):
    """No trusted key has signed an entry, where one must have."""


def read_entry(layer: Layer, target: str, name: str, *, verify: str, touch: bool = False) -> Entry:
    """The entry `name` for `target` of a layer, checked.

    That is: owner and mode, signature where one is wanted, manifest, and size and hash of its
    artifacts. verify: "always", or "size" to leave out the hashes; touch: note that it was used.
    Raises FileNotFoundError where there is none, Damaged where it is not whole, Unsigned, and
    OSError where it could not be read this time.
    """
    path = layer.root / VERSION / target / name
    with contextlib.ExitStack() as open_directories:
        directory = open_directories.enter_context(owned.opened(layer.root, follow=True))
        for place in (path.parents[1], path.parent, path):
            _check_folder(directory, place.parent, layer)
            try:
                directory = open_directories.enter_context(owned.opened(place, directory))
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise Damaged(f"{place} is not a directory", place) from e
                if place != path or e.errno in (errno.ENOENT, *_PASSING):
                    raise
                raise Damaged(str(e), path) from e
        status = path.lstat() if directory is None else os.fstat(directory)
        try:
            owned.check_owner("it", status, layer.owners)
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


def _check_folder(directory: int | None, path: Path, layer: Layer) -> None:
    """Raise ValueError where others may write a directory that holds entries of a layer.

    Of the root itself this is known where it was chosen to be one.
    """
    judged = layer.owners is not None and not layer.vouched
    if judged and directory is not None and path != layer.root:
        owned.check_owner(str(path), os.fstat(directory), layer.owners)


def _current(path: Path, status: os.stat_result) -> Path | None:
    """`path` if it names the directory of `status`; asked while that is open, so not reused."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), status):
            return path
    return None


def _read_opened(
    path: Path, directory: int | None, layer: Layer, *, verify: str, touch: bool
) -> Entry:
    data = owned.read(path, directory, NAME, MAX_BYTES, layer.owners, used=touch)
    if layer.keys:
        try:
            signatures = owned.read(
                path, directory, files.signature.NAME, files.signature.MAX_BYTES, None
            )
        except FileNotFoundError:
            signatures = b""
        reason = files.signature.distrust(data, signatures, layer.keys)
        if reason:
            raise Unsigned(reason)
    manifest = Manifest.decode(data)
    if path.name.rpartition("-")[2] != manifest.digest[:16]:
        raise ValueError("its manifest belongs to another entry")
    if manifest.inputs["target"] != path.parent.name:
        raise ValueError("its manifest belongs to another target")
    verified: Verified = {}
    if directory is not None:
        verified[""] = _identity(os.fstat(directory))[:2]
    for name, artifact in manifest.artifacts.items():
        status = _check(path, directory, name, artifact, layer.owners, verify=verify)[1]
        verified[name] = _identity(status)
    return Entry(path, manifest, verified)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file from any other, and from itself after a change."""
    return (
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
    )  # fmt: skip


def _check(
    path: Path,
    directory: int | None,
    name: str,
    artifact: Artifact,
    owners: frozenset[int] | None,
    *,
    verify: str,
) -> tuple[bytes, os.stat_result]:
    """The bytes of an artifact (none where only its size is to be verified), and its status.

    Raises ValueError and OSError.
    """
    with owned.opened_file(path, directory, name, owners) as (file, status):
        if status.st_size != artifact.size:
            raise ValueError(f"{name} has the wrong size")
        try:
            data = file.read(artifact.size) if verify == "always" else b""
        except MemoryError as e:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), name) from e
        if verify == "always" and hashlib.sha256(data).hexdigest() != artifact.sha256:
            raise ValueError(f"{name} is not what was published")
        return data, status
