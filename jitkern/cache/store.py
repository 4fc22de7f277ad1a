"""The cache: entries are looked up, verified, published and listed.

An entry is built in private staging, synced, and published by one rename; it is never edited.
Reading takes no lock; any defect of an entry makes it a miss. The user root is looked up first,
then the read-only layers, where nothing is ever written. `layout` says which file lies where.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jitkern import cache, files as files_room
from jitkern.cache import VERSION, layout
from jitkern.cache.entry import Damaged, Entry, Unsigned, read_entry
from jitkern.cache.key import Key
from jitkern.cache.manifest import NAME, Artifact, Manifest
from jitkern.cache.root import Root
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.files import atomic, trust
from jitkern.files.trust import Layer, Trust
from jitkern.named_tuple import NamedTuple

__all__ = ["Cache", "Entry"]

LONGEST_ROOT = 3500  # bytes of a root's path; the system's limit for a whole path is 4096
LOOKS = 100  # attempts to read an entry that another process keeps replacing
_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """The result of a lookup: an entry and the root of its layer, or the reason of a miss.

    reason: `absent`, `damaged`, `unreadable` or `unsigned`.
    """

    entry: Entry | None
    root: Path | None = None
    reason: str = ""


class Cache(Root):
    """A cache: a user root that this process writes to, and read-only layers below it."""

    def __init__(
        self,
        root: Path,
        layers: tuple[Path, ...] = (),
        *,
        verify: str = "always",
        fsync: bool = True,
        rules: Trust = Trust(),  # noqa: B008  immutable
        limits: tuple[int, float] | None = None,
    ) -> None:
        """Make a cache.

        limits: the most bytes, and seconds since the last use, that a publish keeps the root to.
        """
        super().__init__(root, fsync=fsync, trusted=rules.roots)
        self.layers = layers
        self.verify = verify
        self.rules = rules
        self.limits = limits

    @classmethod
    def open(cls, config: Config) -> Cache:
        """Return the cache that the settings name, with its layers and the installed layers.

        Raises UntrustedCache if others could have written the root, and CacheError if the path of
        the root is too long.
        """
        reason = trust.why_untrusted_root(config.cache_dir, config.trusted)
        if reason:
            raise UntrustedCache(
                f"the cache {config.cache_dir} is not trusted: {reason}. "
                "Native code is loaded from the cache, so fix its owner and mode (`chmod 700`), "
                "or point JITKERN_CACHE_DIR at a directory of your own",
                path=str(config.cache_dir),
            )
        if len(os.fsencode(config.cache_dir)) > LONGEST_ROOT:
            raise CacheError(
                f"the cache {config.cache_dir} has a path of more than {LONGEST_ROOT} bytes, which "
                "leaves no room for the names in it: point JITKERN_CACHE_DIR at a shorter one",
                path=str(config.cache_dir),
                errno=errno.ENAMETOOLONG,
            )
        return cls(
            config.cache_dir,
            (*config.system_cache, *trust.installed_layers()),
            verify=config.verify,
            fsync=config.fsync,
            rules=Trust.of(config),
            limits=(config.max_size, config.max_age),
        )

    @classmethod
    def private(cls, layers: tuple[Path, ...] = (), **rules: Any) -> Cache:
        """Return a cache in the private root, with layers, for what no user root takes."""
        return cls(cache.temporary_cache.private_root(), layers, fsync=False, **rules)

    def find(self, key: Key) -> Entry | None:
        """Return the entry of `key`, whole and verified, or None."""
        return self.look_up(key.target, key.name, key.digest).entry

    def look_up(self, target: str, name: str, digest: str = "") -> Found:
        """Return the entry of this target and folder name in the first layer that has a whole one.

        digest: the digest that the entry must have, or "" for any. An entry of a layer that others
        could change is copied into the user root before it is used.
        """
        reason = "absent"
        for layer in self.trusted_layers():
            path = layer.root / VERSION / target / name
            try:
                entry = self._read(layer, target, name, touch=True)
                if digest in ("", entry.manifest.digest):
                    entry = entry if layer.in_place else self._copy(entry)
                    return Found(entry, layer.root)
                _log.warning("%s is not used: another key has the same short name", path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Unsigned as e:
                reason = "unsigned"
                self._warn_once((layer.root, str(e)), "%s is not used: %s", path, e)
            except Damaged as e:
                reason = "damaged"
                _log.warning("the entry %s is damaged (%s); compiling it again", path, e)
                if layer.own and e.path:
                    self._quarantine(e.path)
            except (OSError, ValueError, CacheError) as e:
                reason = "unreadable"
                self._warn_once((path, str(e)), "%s could not be read (%s); skipping it", path, e)
        return Found(None, reason=reason)

    def publish(self, key: Key, staging: Path, manifest: Manifest) -> Entry:
        """Publish the files in `staging` as the entry of `key` by one rename; return the entry.

        The manifest is completed with the hashes of the files. If another process published first,
        its entry is returned. Raises CacheError.
        """
        with self._writing():
            ready = staging / ".entry"  # for the files of the entry alone, not for other leftovers
            ready.mkdir()
            artifacts = {}
            for path in sorted(staging.iterdir()):
                if path.is_file() and not path.is_symlink():
                    if path.suffix != ".log":
                        artifacts[path.name] = Artifact.of(path.read_bytes())
                    path.rename(ready / path.name)
            manifest = manifest._replace(artifacts=artifacts)
            (ready / NAME).write_bytes(self._encoded(key, manifest))
            entry = self._install(ready, key.target, key.name, manifest)
            self._keep_to_limits(entry)
            return entry

    def _encoded(self, key: Key, manifest: Manifest) -> bytes:
        """Return the bytes of a manifest. Raises CacheError if readers would refuse the bytes."""
        data = manifest.encode()
        try:
            Manifest.decode(data)
            layout.check_place(key.target, key.name)
        except ValueError as e:
            raise CacheError(
                f"{key.name} cannot be kept in a cache: {e}. If the source includes very many "
                "headers, name their root with a version, Include(path, version=...)",
                path=str(self.root),
                errno=None,
            ) from e
        return data

    def adopt(
        self,
        target: str,
        name: str,
        files: Mapping[str, bytes],
        *,
        fsync: bool = True,
    ) -> Entry:
        """Publish the files of an entry of another cache, manifest and signature unchanged.

        fsync: False for what can be had again. After a power cut the entry may be damaged, which
        every lookup with `verify="always"` finds, and treats as a miss. Raises CacheError, and
        ValueError where the files are not a whole entry of that name.
        """
        manifest = Manifest.decode(files[NAME])
        place = (str(manifest.inputs["target"]), name.rpartition("-")[2])
        if place != (target, manifest.digest[:16]):
            raise ValueError(f"{name} is not what its manifest describes")
        layout.check_place(target, name)
        for file, artifact in manifest.artifacts.items():
            if file not in files or Artifact.of(files[file]) != artifact:
                raise ValueError(f"{file} of {name} is not what was published")
        with self.staging() as staging, self._writing():
            for file in (*manifest.artifacts, *{files_room.signature.NAME} & {*files}, NAME):
                (staging / file).write_bytes(files[file])
            entry = self._install(staging, target, name, manifest, fsync=fsync)
        self._keep_to_limits(entry)
        return entry

    def _keep_to_limits(self, new: Entry) -> None:
        """Evict entries if a new one takes the user root over its limits."""
        if self.limits:
            max_size, max_age = self.limits
            with contextlib.suppress(OSError):
                size = cache.eviction.Use.of(new.path).bytes
                cache.eviction.after_publish(self, size, max_size=max_size, max_age=max_age)

    def entries(self, verify: str = "size") -> Iterator[tuple[Path, Entry | ValueError]]:
        """Yield each path and its entry, or the entry's defect, in the root and the layers."""
        for layer, path in self.places():
            if (entry := self.entry_at(layer, path, verify)) is not None:
                yield path, entry

    def places(
        self, named: Callable[[str, str], bool] | None = None
    ) -> Iterator[tuple[Layer, Path]]:
        """Yield layer and path of all entries, the user root first, without reading them."""
        for layer in self.trusted_layers():
            for path in self.paths(layer.root, named):
                yield layer, path

    def entry_at(self, layer: Layer, path: Path, verify: str) -> Entry | ValueError | None:
        """Return the entry at a path, or its defect, or None if the entry was removed meanwhile."""
        try:
            return self._read(layer, path.parent.name, path.name, verify=verify)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            return e if isinstance(e, ValueError) else ValueError(str(e))

    def trusted_layers(self) -> Iterator[Layer]:
        """Yield the user root and the trusted layers; warn once of each other layer."""
        yield self._own
        for root in self.layers:
            if not os.path.isdir(root):  # noqa: PTH112  False if it cannot be reached
                continue
            layer = trust.layer_of(root, self.rules)
            if isinstance(layer, Layer):
                yield layer
            else:
                self._warn_once(root, "the read-only cache %s is not used: %s", root, layer)

    def _install(
        self, ready: Path, target: str, name: str, manifest: Manifest, *, fsync: bool = True
    ) -> Entry:
        """Publish a directory of finished files as an entry."""
        sync = atomic.sync if fsync and self.fsync else bool  # which does nothing to a path
        for path in sorted(ready.iterdir(), key=lambda path: path.name == NAME):
            path.chmod(0o644)
            sync(path)
        ready.chmod(0o755)
        sync(ready)
        final = self.root / VERSION / target / name
        self._make_own(final.parent)
        try:
            ready.rename(final)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            winner = self.look_up(target, name, manifest.digest).entry
            return winner or self._publish_after_loss(ready, final, manifest)
        sync(final.parent)
        return Entry(final, manifest)

    def _publish_after_loss(self, ready: Path, final: Path, manifest: Manifest) -> Entry:
        try:
            ready.rename(final)  # the entry there was damaged, and the lookup has quarantined it
        except OSError:
            # The winner exists but cannot be seen yet (NFS caches lookups): use our own copy.
            final = Cache.private().root / final.name
            shutil.copytree(ready, final, dirs_exist_ok=True)
        return Entry(final, manifest)

    def _copy(self, entry: Entry) -> Entry:
        """Copy an entry into the user root, or into a private root if that cannot be written."""
        files = entry.files()
        target, name = entry.path.parent.name, entry.path.name
        try:
            return self.adopt(target, name, files)
        except CacheError:
            return Cache.private().adopt(target, name, files)

    def _read(
        self, layer: Layer, target: str, name: str, *, verify: str = "", touch: bool = False
    ) -> Entry:
        for _ in range(LOOKS):
            try:
                return read_entry(
                    layer, target, name, verify=verify or self.verify, touch=touch and layer.own
                )
            except Damaged as e:
                if e.path:
                    raise  # otherwise the entry was replaced during the read: read it again
                defect = e
        raise ValueError(f"{defect}; perhaps another process replaces the entry all the time")
