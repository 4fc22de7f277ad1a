"""Entries on disk: found, published, listed and removed. Knows no compiler and no Torch.

An entry is built in private staging, synced, and published by one rename; it is never edited.
Reading takes no lock; whatever is odd about an entry makes it a miss. The user root is looked up
first, then the read-only layers, where nothing is ever written. What lies where is in `layout`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jitkern import durable, layout, trust
from jitkern.config import Config
from jitkern.entry import Damaged, Entry, Unsigned, read_entry
from jitkern.errors import CacheError, UntrustedCache
from jitkern.key import Key
from jitkern.layout import VERSION
from jitkern.manifest import LOG, NAME, Artifact, Manifest
from jitkern.named_tuple import NamedTuple
from jitkern.trust import Layer, Trust

__all__ = ["VERSION", "Cache", "Entry"]

STALE_STAGING = 86400.0  # seconds after which a killed builder's staging is swept
GRACE = 600.0  # seconds that what was removed stays in the trash, for those who are reading it
LONGEST_ROOT = 3500  # bytes of a root's path; the system's limit for all of a path is 4096
LOOKS = 100  # times that an entry is read again because another took its place
QUARANTINED = 20  # entries kept for a look at what went wrong
_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a lookup gave: an entry and the root it lies in, or why there is none.

    reason: `absent`, `damaged`, `unreadable` or `unsigned`.
    """

    entry: Entry | None
    root: Path | None = None
    reason: str = ""


class Cache:
    """A user root that is written to, and read-only layers below it."""

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
        """limits: bytes, and seconds since the last use, that new entries are to keep to."""
        self.root = root
        self.layers = layers
        self.verify = verify
        self.fsync = fsync
        self.rules = rules
        self.limits = limits
        self._own = trust.user_layer(root, rules.roots)
        self._warned: set[object] = set()

    @classmethod
    def open(cls, config: Config) -> Cache:
        """The cache that the settings name, with the layers that are installed.

        Raises UntrustedCache if others could have written the root, and CacheError for one whose
        path is too long.
        """
        reason = trust.distrust_root(config.cache_dir, config.trusted)
        if reason:
            raise UntrustedCache(
                f"the cache {config.cache_dir} is not trusted: {reason}. "
                "Native code is loaded from it, so mend its owner and mode (`chmod 700`), "
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

    def find(self, key: Key) -> Entry | None:
        """The entry of `key`, whole and verified, or None."""
        return self.look_up(key.target, key.name, key.digest).entry

    def labelled(self, target: str, label: str) -> Iterator[Entry]:
        """Every entry of a target whose folder's name is `label` and a digest, each once."""
        roots = [layer.root for layer in self.trusted_layers()]
        for name in sorted({name for root in roots for name in _labelled(root, target, label)}):
            if entry := self.look_up(target, name).entry:
                yield entry

    def look_up(self, target: str, name: str, digest: str = "") -> Found:
        """The entry of this target, folder name and digest in the first layer that has it whole.

        digest: "" for whichever has that name. One of a layer that others could change is copied
        into the user root before it is used.
        """
        reason = "absent"
        if os.sep in target or os.sep in name:
            return Found(None, reason=reason)  # what names it is odd
        for layer in self.trusted_layers():
            path = layer.root / VERSION / target / name
            try:
                entry = self._read(layer, target, name, touch=True)
                if digest in ("", entry.manifest.digest):
                    entry = entry if layer.in_place else self._copied(entry)
                    return Found(entry, layer.root)
                _log.warning("%s is of another key with the same short name", path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Unsigned as e:
                reason = "unsigned"
                self._warn_once((layer.root, str(e)), "%s is not used: %s", path, e)
            except Damaged as e:
                reason = "damaged"
                _log.warning("%s is damaged (%s); compiling it again", path, e)
                if layer.own and e.path:
                    self._quarantine(e.path)
            except (OSError, ValueError, CacheError) as e:
                reason = "unreadable"
                self._warn_once((path, str(e)), "%s could not be read (%s)", path, e)
        return Found(None, reason=reason)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory to build in; whatever is left in it afterwards is removed.

        Raises CacheError.
        """
        with self._writing():
            self._create_root()
            path = self.root / VERSION / "tmp" / uuid.uuid4().hex
            path.mkdir(mode=0o700)
            self._sweep(path.lstat().st_mtime)
        try:
            yield path
        finally:
            durable.delete(path)

    def publish(self, key: Key, staging: Path, manifest: Manifest) -> Entry:
        """Make the files of `staging` the entry of `key` by one rename.

        The manifest is completed with their hashes. If another process published first, its entry
        is returned. Raises CacheError.
        """
        with self._writing():
            ready = staging / ".entry"  # only what belongs there: cleaning up cannot fail a publish
            ready.mkdir()
            artifacts = {}
            for path in sorted(staging.iterdir()):
                if path.is_file() and not path.is_symlink():
                    if path.suffix != ".log":
                        artifacts[path.name] = Artifact.of(path.read_bytes())
                    path.rename(ready / path.name)
            manifest = manifest._replace(artifacts=artifacts)
            (ready / NAME).write_bytes(self._encoded(key, manifest))
            return self._install(ready, key.target, key.name, manifest)

    def _encoded(self, key: Key, manifest: Manifest) -> bytes:
        """The bytes of a manifest that every reader takes. Raises CacheError for any other."""
        data = manifest.encode()
        try:
            Manifest.decode(data)
            layout.check_place(key.target, key.name)
        except ValueError as e:
            raise CacheError(
                f"{key.name} cannot be kept in a cache: of its manifest, {e}. If it lists very "
                "many headers, name their root with a version, Include(path, version=...)",
                path=str(self.root),
                errno=None,
            ) from e
        return data

    def adopt(self, target: str, name: str, files: Mapping[str, bytes]) -> Entry:
        """Make an entry of the files of another cache's, its manifest and signature unchanged.

        Raises CacheError, and ValueError where they are not a whole entry of that name.
        """
        from jitkern import signature

        manifest = Manifest.decode(files[NAME])
        place = (str(manifest.inputs["target"]), name.rpartition("-")[2])
        if place != (target, manifest.digest[:16]):
            raise ValueError(f"{name} is not what its manifest describes")
        layout.check_place(target, name)
        for file, artifact in manifest.artifacts.items():
            if file not in files or Artifact.of(files[file]) != artifact:
                raise ValueError(f"{file} of {name} is not what was published")
        with self.staging() as staging, self._writing():
            for file in (*manifest.artifacts, *{signature.NAME} & {*files}, NAME):
                (staging / file).write_bytes(files[file])
            return self._install(staging, target, name, manifest)

    def list_plan(self, entry: Entry) -> None:
        """Put a plan into the list of its label, so that nobody lists a target to find it.

        One that cannot be put there is made again.
        """
        if "plan" in entry.manifest.inputs and entry.root == self.root:
            listed = layout.in_list(entry.path)
            with contextlib.suppress(OSError):
                durable.make_directory(listed.parent, 0o755, fsync=False)
                listed.touch()

    def remove(self, path: Path) -> bool:
        """Put an entry of the user root into the trash, from where it is purged later.

        A reader has it whole or not at all. Returns False, and leaves alone what is there, if that
        is no entry of the user root. Raises CacheError.
        """
        if path.parent.parent != self.root / VERSION or not layout.is_entry(path):
            return False
        with self._writing(), contextlib.suppress(FileNotFoundError):
            self._trash(path)
            with contextlib.suppress(OSError):
                layout.in_list(path).unlink()
                layout.in_list(path).parent.rmdir()
            return True
        return False

    def claim(self) -> bool:
        """Whether the user root bears our tag; one that holds nothing but a cache is given it now.

        Raises CacheError.
        """
        tag = self.root / layout.TAG
        if layout.is_tagged(self.root):
            return True
        with self._writing():
            if layout.has_other_tag(self.root) or not layout.holds_only_a_cache(self.root):
                return layout.is_tagged(self.root)  # by another process, since it was asked
            staging = self.root / VERSION / "tmp"
            durable.write(tag, layout.TAG_TEXT.encode(), staging=staging, fsync=self.fsync)
        return True

    def purge(self, older_than: float = GRACE) -> None:
        """Delete what has been in the trash, or put aside in place of `v1`, for so many seconds."""
        if not layout.is_tagged(self.root):
            return
        trash = self.root / VERSION / "trash"
        put_away = {trash / name: layout.set_aside_at(name) for name in layout.names(trash)}
        for name in _listed(self.root):
            path = self.root / name
            if name.startswith(f"{VERSION}.bad.") and not layout.is_folder(path):
                put_away[path] = layout.set_aside_at(name.removeprefix(f"{VERSION}.bad."))
        for path, when in put_away.items():
            if when is not None and not 0 <= time.time() - when < older_than:
                durable.delete(path)

    def quarantine(self, entry: Entry) -> None:
        """Put an entry that would not load out of the way, if it lies in the user root."""
        if entry.path.is_relative_to(self.root):
            self._quarantine(entry.path)

    def entries(self, verify: str = "size") -> Iterator[tuple[Path, Entry | ValueError]]:
        """(path, entry or what is wrong with it) of all in the user root and layers, in order."""
        for layer, path in self.places():
            if (found := self.entry_at(layer, path, verify)) is not None:
                yield path, found

    def places(
        self, named: Callable[[str, str], bool] | None = None
    ) -> Iterator[tuple[Layer, Path]]:
        """Where the entries in the user root and the layers lie, in order; nothing is read."""
        for layer in self.trusted_layers():
            for path in self.paths(layer.root, named):
                yield layer, path

    def entry_at(self, layer: Layer, path: Path, verify: str) -> Entry | ValueError | None:
        """The entry at a path, or what is wrong with it; None for one that was removed since."""
        try:
            return self._read(layer, path.parent.name, path.name, verify=verify)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            return e if isinstance(e, ValueError) else ValueError(str(e))

    def paths(
        self, root: Path | None = None, named: Callable[[str, str], bool] | None = None
    ) -> Iterator[Path]:
        """Where the entries of a root lie, by default of the user root; nothing is read.

        named: whether entries of this target and folder name are wanted; by default all are.
        """
        version = (root or self.root) / VERSION
        for target in layout.folders(version, layout.is_target):
            wanted = functools.partial(named, target) if named else bool
            for name in filter(layout.is_entry_name, layout.folders(version / target, wanted)):
                yield version / target / name

    def trusted_layers(self) -> Iterator[Layer]:
        """The user root, and the layers that may be used; one that may not is warned of once."""
        yield self._own
        for root in self.layers:
            if not os.path.isdir(root):  # noqa: PTH112  False for one that cannot be reached
                continue
            found = trust.layer_of(root, self.rules)
            if isinstance(found, Layer):
                yield found
            else:
                self._warn_once(root, "the read-only cache %s is not used: %s", root, found)

    def write_error(self, e: OSError) -> CacheError:
        """The error for a write that failed: why, and what to do."""
        return CacheError(
            f"the cache {self.root} cannot be written: {reason_of(e)}",
            path=str(self.root),
            errno=e.errno,
        )

    def keep_log(self, key: Key, staging: Path) -> Path:
        """Keep the log of a build that failed, beside the damaged entries; returns its path."""
        kept = self._bad(key.name)
        with contextlib.suppress(OSError):
            durable.make_directory(kept.parent, 0o700, fsync=False)
            kept.mkdir()
            shutil.copy(staging / LOG, kept / LOG)
            self._bound_quarantine()
        return kept / LOG

    def _install(self, ready: Path, target: str, name: str, manifest: Manifest) -> Entry:
        """Publish a directory of finished files."""
        for path in sorted(ready.iterdir(), key=lambda path: path.name == NAME):
            path.chmod(0o644)
            self._sync(path)
        ready.chmod(0o755)
        self._sync(ready)
        final = self.root / VERSION / target / name
        self._make_own(final.parent)
        try:
            ready.rename(final)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            found = self.look_up(target, name, manifest.digest).entry
            return found or self._after_losing(ready, final, manifest)
        self._sync(final.parent)
        entry = Entry(final, manifest)
        self.list_plan(entry)
        self._keep_to_limits(final)
        return entry

    def _keep_to_limits(self, new: Path) -> None:
        """Evict, where a new entry takes the user root over its limits."""
        if self.limits:
            from jitkern.cache_tools.prune import Use, after_publish

            max_size, max_age = self.limits
            with contextlib.suppress(OSError):
                after_publish(self, Use.of(new).bytes, max_size=max_size, max_age=max_age)

    def _after_losing(self, ready: Path, final: Path, manifest: Manifest) -> Entry:
        try:
            ready.rename(final)  # what stood there was damaged, and is in quarantine now
        except OSError:
            from jitkern.private import private_root

            # The winner exists but cannot be seen yet (NFS caches lookups): use our own copy.
            final = private_root() / final.name
            shutil.copytree(ready, final, dirs_exist_ok=True)
        return Entry(final, manifest)

    def _copied(self, entry: Entry) -> Entry:
        """A copy in the user root, or where that cannot be written a private one."""
        files = entry.files()
        target, name = entry.path.parent.name, entry.path.name
        try:
            return self.adopt(target, name, files)
        except CacheError:
            from jitkern.private import private_root

            return Cache(private_root(), fsync=False).adopt(target, name, files)

    def _trash(self, path: Path) -> None:
        trash = self.root / VERSION / "trash" / f"{time.time_ns()}.{path.name}"
        durable.make_directory(trash.parent, 0o700, fsync=False)
        _move(path, trash)

    def _bad(self, name: str) -> Path:
        return self.root / VERSION / "bad" / f"{time.time_ns()}.{name}"

    def _bound_quarantine(self) -> None:
        bad = self.root / VERSION / "bad"
        kept = [name for name in layout.names(bad) if layout.set_aside_at(name) is not None]
        for name in kept[:-QUARANTINED] if layout.is_tagged(self.root) else ():
            durable.delete(bad / name)

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
                    raise  # else it was replaced while it was read: look again
                seen = e
        raise ValueError(f"{seen}, and whether it was replaced cannot be told")

    def _quarantine(self, path: Path) -> None:
        """Put what is damaged, or in the way of what is ours, out of the way."""
        if not layout.is_tagged(self.root) and not layout.is_entry(path):
            return  # it may be somebody's
        with contextlib.suppress(OSError):
            bad = self._bad(path.name)
            if path.name == VERSION:  # what holds the quarantine: beside it
                bad = path.with_name(f"{VERSION}.bad.{time.time_ns()}")
            else:
                durable.make_directory(bad.parent, 0o700, fsync=False)
            try:
                _move(path, bad)
            except PermissionError:  # a directory moves only if it can be written
                if not path.is_symlink():
                    path.chmod(0o700)
                    _move(path, bad)
            self._bound_quarantine()

    def _create_root(self) -> None:
        if not self.root.is_dir():
            durable.make_directory(self.root, 0o700, fsync=self.fsync)
        self._make_own(self.root / VERSION)
        self._make_own(self.root / VERSION / "tmp")
        if not self.claim():
            self._warn_once(
                layout.TAG,
                "%s holds other files than jitkern's, so nothing in it is ever evicted or cleared: "
                "point JITKERN_CACHE_DIR at a directory of its own, %s/jitkern say",
                self.root,
                self.root,
            )

    def _make_own(self, path: Path) -> None:
        """Make a directory of ours; what is in its way, a link say, is put aside."""
        try:
            durable.make_directory(path, 0o755, fsync=self.fsync)
        except FileExistsError:
            self._quarantine(path)
            durable.make_directory(path, 0o755, fsync=self.fsync)
        if self._own.owners and not self._own.vouched:
            status = path.stat()
            if status.st_mode & 0o022 and status.st_uid in self._own.owners:
                path.chmod(0o755)  # what others may write is not read from

    def _sweep(self, now: float) -> None:
        """Take out the staging of builders that were killed long ago.

        now: the time by the clock of the file system, which may not be that of this process.
        """
        if not layout.is_tagged(self.root):
            return
        self.purge()
        staged = self.root / VERSION / "tmp"
        for path in (staged / name for name in layout.names(staged) if layout.is_staged(name)):
            with contextlib.suppress(OSError):
                if now - path.lstat().st_mtime > STALE_STAGING:
                    self._trash(path)  # whole: its builder may live, if the clock jumped

    def _sync(self, path: Path) -> None:
        if self.fsync:
            durable.sync(path)

    def _warn_once(self, what: object, message: str, *values: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(message, *values)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise self.write_error(e) from e


def _labelled(root: Path, target: str, label: str) -> list[str]:
    """The names of the entries of a label in a root: by its lists, where it has them."""
    version = root / VERSION
    if os.path.isdir(version / layout.LISTS / target):  # noqa: PTH112  False if out of reach
        return [f"{label}-{digest}" for digest in _listed(version / layout.LISTS / target / label)]
    return [name for name in _listed(version / target) if name.rpartition("-")[0] == label]


def _move(path: Path, to: Path) -> None:
    """Move what lies in the user root; what cannot be moved is deleted, its manifest first.

    In a container, a directory that its image brought cannot be renamed: overlayfs says EXDEV.
    Raises OSError.
    """
    try:
        path.rename(to)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        (path / NAME).unlink(missing_ok=True)
        durable.delete(path)
        if os.path.lexists(path):
            raise


def _listed(directory: Path) -> list[str]:
    """What a directory holds, sorted; nothing for one that is gone or none."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def reason_of(e: OSError) -> str:
    """Why the system refused, and what to do."""
    if e.errno in _REASONS:
        return _REASONS[e.errno]
    if e.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{e.filename} is a file; remove it, or point JITKERN_CACHE_DIR at a directory"
    if e.errno in _NOT_WRITABLE:
        return f"{e.strerror}; make it writable, or point JITKERN_CACHE_DIR at a directory that is"
    return f"{e.strerror or e}; point JITKERN_CACHE_DIR elsewhere if it stays so"


_NO_SPACE = "no space is left; free some, or point JITKERN_CACHE_DIR elsewhere"
_TOO_MANY = "too many files are open; close some, or raise the limit (`ulimit -n`)"
_REASONS = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EMFILE: _TOO_MANY,
    errno.ENFILE: _TOO_MANY,
    errno.EFBIG: "a file is larger than this process may write; raise the limit (`ulimit -f`)",
    errno.ENAMETOOLONG: "its path is too long; point JITKERN_CACHE_DIR at a shorter one",
}
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
