"""A remote in a directory: for tests, shared disks, and what a static web server serves."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from jitkern.errors import SettingError
from jitkern.remote.store import Listed, Object, Tag, TooLarge, Unavailable, Unchanged

_LOCK = ".jitkern.lock"


class DirectoryStore:
    """The store in a directory. A tag is the SHA-256 of the content."""

    def __init__(self, url: str) -> None:
        """Raise SettingError unless `url` is `file:///…` with an absolute path."""
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise SettingError(f"`{url}` names no directory: expected file:///absolute/path")
        self.url = url
        self.root = Path(unquote(parts.path))

    def get(self, name: str, *, limit: int, unless: Tag = None) -> Object | None:
        """Return an object, as Readable says."""
        with _raising_unavailable(name):
            try:
                with (self.root / name).open("rb") as file:
                    status = os.fstat(file.fileno())
                    if status.st_size > limit or not stat.S_ISREG(status.st_mode):
                        raise TooLarge(f"{name} has {status.st_size} bytes, over {limit}")
                    data = file.read(status.st_size)  # objects are never written in place
            except (FileNotFoundError, NotADirectoryError):
                return None
        tag = hashlib.sha256(data).hexdigest()
        if unless == tag:
            raise Unchanged
        return Object(data, tag)

    def stat(self, name: str) -> Listed | None:
        """Return size and age of an object, as Store says."""
        with _raising_unavailable(name):
            try:
                status = (self.root / name).lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Listed(name, status.st_size, status.st_mtime)

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object, as Store says."""
        return self._write(name, data, os.link)

    def replace(self, name: str, data: bytes, tag: Tag) -> bool:
        """Replace a version of an object, as Store says."""
        with _raising_unavailable(name), (self.root / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.get(name, limit=sys.maxsize)
            return bool(found and found.tag == tag and self._write(name, data, os.replace))

    def list(self, prefix: str) -> Iterator[Listed]:
        """Yield the objects whose names begin with `prefix`, sorted."""
        with _raising_unavailable(prefix):
            for path in sorted((self.root / prefix.rpartition("/")[0]).rglob("*")):
                name = path.relative_to(self.root).as_posix()
                if name.startswith(prefix) and not path.name.startswith("."):
                    found = self.stat(name)
                    if found:
                        yield found

    def _write(self, name: str, data: bytes, publish: Callable[[Path, Path], object]) -> bool:
        final = self.root / name
        with _raising_unavailable(name):
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary = final.with_name(f".{uuid.uuid4().hex}.tmp")
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                publish(temporary, final)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        return True


@contextlib.contextmanager
def _raising_unavailable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise Unavailable(f"{name}: {e.strerror or e}") from e
