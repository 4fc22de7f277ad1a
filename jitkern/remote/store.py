"""The contract of stores.

A store holds objects: bytes under names such as `v1/<machine>/index.json`. Objects are whole: a
reader sees all bytes that one writer wrote, or none. A tag tells versions of an object apart.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

from jitkern.named_tuple import NamedTuple

VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}  # how those of a bucket's scheme begin
Tag = Any  # of the store's own type; equal tags are equal versions


class Unavailable(Exception):
    """The store did not answer in time, or its answer makes no sense.

    meaning, remedy: of errors of this kind, for messages.
    """

    meaning = "no valid answer"
    remedy = "check the URL, the bucket and the network; until then, cache misses are compiled here"


class Throttled(Unavailable):
    """The store asked its clients to slow down (429, 503)."""

    meaning = "too many requests"
    remedy = "try again later"


class AccessDenied(Unavailable):
    """The store refuses this client (401, 403)."""

    meaning = "access denied"
    remedy = (
        "check the credentials and their permissions (of S3, s3:ListBucket too), and "
        "`remote_token_file` of the settings"
    )


class TooLarge(Unavailable):
    """The object has more bytes than the caller takes; the store itself is in order."""


class Forked(Unavailable):
    """The store was used before a fork, and cannot be used in the child."""


class Unchanged(Exception):
    """The object still has the tag that the caller named."""


class Object(NamedTuple):
    """An object as it was read. tag: None if the store has none."""

    data: bytes
    tag: Tag


class Response(NamedTuple):
    """The response of a service to a `post`. retry_after: seconds, 0 if it named none."""

    status: int
    data: bytes
    retry_after: float = 0.0


class Listed(NamedTuple):
    """An object in a listing. modified: Unix time by the clock of the store."""

    name: str
    bytes: int
    modified: float


class Readable(Protocol):
    """A place to read below a URL. Each method raises Unavailable, and may block: see `patience`.

    Several threads may call it at once, and forked children, where it raises Forked at once if it
    cannot be used there.

    url: for messages, without user name, password and token.
    """

    url: str

    def get(self, name: str, *, limit: int, unless: Tag = None) -> Object | None:
        """Return an object of at most `limit` bytes, or None if there is none.

        unless: raise Unchanged if the object has this tag. Raises TooLarge for a larger object,
        before reading it wherever the store announces the size.
        """
        ...


@runtime_checkable
class Service(Readable, Protocol):
    """A server that may build what is missing.

    builds: whether its last answer said so.
    """

    builds: bool

    def post(self, name: str, data: bytes, *, limit: int) -> Response:
        """Post JSON and return the answer, of at most `limit` bytes.

        Raises Unavailable as `get` does: Throttled for 429 and 503, AccessDenied for 401 and 403.
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

    def list(self, prefix: str) -> Iterator[Listed]:
        """Yield the objects whose names begin with `prefix`, in any order."""
        ...


def shown(url: str) -> str:
    """Return a URL for messages and comparisons: without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")


def is_loopback(url: str) -> bool:
    """Return whether a URL leads to this machine itself."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
