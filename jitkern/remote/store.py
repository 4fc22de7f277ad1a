"""The contract of stores, and the store that a URL names.

A store holds objects: bytes under names such as `v1/<machine>/index.json`. Objects are whole: a
reader sees all bytes that one writer wrote, or none. A tag tells versions of an object apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from jitkern import remote
from jitkern.config.values import REMOTES
from jitkern.errors import SettingError
from jitkern.named_tuple import NamedTuple

VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}  # how those of a bucket's scheme begin
Tag = Any  # of the store's own type; equal tags are equal versions


class Unavailable(Exception):
    """The store did not answer in time, or its answer makes no sense."""


class Throttled(Unavailable):
    """The store asked its clients to slow down (429, 503)."""


class Refused(Unavailable):
    """The store knows this client, or does not, and lets it not in (401, 403)."""


class Unchanged(Exception):
    """The object still has the tag that the caller named."""


class Object(NamedTuple):
    """An object as it was read. tag: None if the store has none."""

    data: bytes
    tag: Tag


class Listed(NamedTuple):
    """An object in a listing. modified: Unix time by the clock of the store."""

    name: str
    bytes: int
    modified: float


class Readable(Protocol):
    """What can be read below a URL. Each method raises Unavailable, and may block: see `patience`.

    url: for messages, without user name, password and token.
    """

    url: str

    def get(self, name: str, *, limit: int, unless: Tag = None) -> Object | None:
        """Return an object of at most `limit` bytes, or None if there is none.

        unless: raise Unchanged if the object has this tag. Raises Unavailable for a larger object,
        before reading it wherever the store announces the size.
        """
        ...


@runtime_checkable
class Store(Readable, Protocol):
    """A store that can be written: a bucket or a directory."""

    def stat(self, name: str) -> Listed | None:
        """Return size and age of an object, or None if there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there yet; return False, and write nothing, if it is."""
        ...

    def replace(self, name: str, data: bytes, tag: Tag) -> bool:
        """Replace the version that has this tag; return False if the object was changed or gone."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """Yield the objects whose names begin with `prefix`, in any order."""
        ...


def shown(url: str) -> str:
    """Return a URL for messages, without user name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def opened(url: str) -> Readable:
    """Return the store that a URL names; nothing is connected yet.

    Raises SettingError for a URL of another scheme, and JitkernError if a package is missing.
    """
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return remote.directory.DirectoryStore(url)
    if scheme in VARIABLES:
        return remote.objects.ObjectStore(url)
    raise SettingError(f"`{url}` names no remote: expected {REMOTES}")
