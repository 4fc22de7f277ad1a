"""S3, GCS and Azure as stores, by the synchronous calls of the package obstore.

obstore itself reads credentials and endpoints from the environment: AWS_*, GOOGLE_* and AZURE_*.
Its asynchronous calls can abort the interpreter at exit, so none of them is used.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from jitkern import config
from jitkern.errors import JitkernError, SettingError
from jitkern.remote.layout import cache_control
from jitkern.remote.store import (
    VARIABLES,
    AccessDenied,
    Forked,
    Listed,
    Object,
    Tag,
    Throttled,
    TooLarge,
    Unavailable,
    Unchanged,
    shown,
)

REMEDY = 'pip install "jitkern[remote]"'
_STATUS = re.compile(r"status code: (\d{3})")
_ERRORS = {"401": AccessDenied, "403": AccessDenied, "429": Throttled, "503": Throttled}
_owner = 0  # the first process that asked: obstore's threads stay in it


class ObjectStore:
    """A bucket, or what lies below a prefix in it.

    A tag is what an update is conditional on: the ETag in S3 and Azure, the generation in GCS.
    """

    def __init__(self, url: str) -> None:
        """Raise SettingError for a URL without a bucket, and JitkernError without obstore."""
        parts = urlsplit(url)
        if not parts.netloc:
            raise SettingError(f"`{url}` names no bucket: expected {parts.scheme}://BUCKET/PREFIX")
        self.url = shown(url)
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as e:
            text = f"a bucket needs the package obstore: {REMEDY}"
            raise JitkernError(text, remedy=REMEDY) from e
        self._obs: Any = obstore
        self._errors = self._obs.exceptions
        self._lost = (self._errors.AlreadyExistsError, self._errors.PreconditionError)
        settings = config.current()
        allowed = settings.environment.get(f"{VARIABLES[parts.scheme]}_ALLOW_HTTP", "")
        options = {  # given options replace all that the environment says, so one is repeated here
            "timeout": f"{max(1, int(settings.remote_timeout * 1000))}ms",
            "allow_http": allowed.lower() in ("1", "true"),
        }
        try:
            self._store = self._obs.store.from_url(
                url, client_options=options, retry_config={"max_retries": 0}
            )
        except (self._errors.BaseError, ValueError) as e:
            raise SettingError(f"`{self.url}` cannot be used: {_reason(e)}") from e

    def get(self, name: str, *, limit: int, unless: Tag = None) -> Object | None:
        """Return an object, as Readable says. A missing bucket looks like a missing object."""
        options = {"if_none_match": unless["e_tag"]} if unless and unless.get("e_tag") else {}
        with self._raising_unavailable(name):
            try:
                found = self._obs.get(self._store, name, options=options)
                size = found.meta["size"]  # which is known before the content
                if size > limit:
                    raise TooLarge(f"{name} has {size} bytes, over {limit}")
                # obstore refuses None in what an update is conditional on
                tag = {key: found.meta[key] for key in ("e_tag", "version") if found.meta.get(key)}
                return Object(bytes(found.bytes()), tag)
            except FileNotFoundError:
                return None
            except self._errors.NotModifiedError:
                if unless:
                    raise Unchanged from None
                raise

    def stat(self, name: str) -> Listed | None:
        """Return size and age of an object, as Store says."""
        with self._raising_unavailable(name):
            try:
                return _listed(self._obs.head(self._store, name))
            except FileNotFoundError:
                return None

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object, as Store says."""
        try:
            return self._put(name, data, "create")
        except FileNotFoundError:
            raise Unavailable(f"{name}: there is no such bucket") from None

    def replace(self, name: str, data: bytes, tag: Tag) -> bool:
        """Replace a version of an object, as Store says."""
        try:
            return self._put(name, data, tag)
        except FileNotFoundError:
            return False  # the object was deleted

    def list(self, prefix: str) -> Iterator[Listed]:
        """Yield the objects whose names begin with `prefix`."""
        folder = prefix.rpartition("/")[0]  # obstore compares whole parts of names
        with self._raising_unavailable(prefix):
            try:
                for batch in self._obs.list(self._store, folder or None):
                    yield from map(_listed, (m for m in batch if m["path"].startswith(prefix)))
            except FileNotFoundError:
                raise Unavailable("there is no such bucket") from None

    def _put(self, name: str, data: bytes, mode: Any) -> bool:
        attributes = {"Cache-Control": cache_control(name)}
        with self._raising_unavailable(name):
            try:
                self._obs.put(
                    self._store, name, data, mode=mode, attributes=attributes, use_multipart=False
                )
            except self._lost:  # also 409, by which S3 says that another writer is faster
                return False
        return True

    @contextlib.contextmanager
    def _raising_unavailable(self, name: str) -> Iterator[None]:
        """Raise Unavailable for each error of obstore, but for FileNotFoundError."""
        global _owner  # noqa: PLW0603  one runtime serves all stores of a process
        _owner = _owner or os.getpid()
        if _owner != os.getpid():  # a call would hang for good
            raise Forked("a bucket cannot be used after a fork: its threads are in the parent")
        try:
            yield
        except FileNotFoundError:
            raise
        except (self._errors.BaseError, OSError, NotImplementedError, TypeError, ValueError) as e:
            status = _STATUS.search(str(e))  # most statuses have no type, and a listing's have none
            error = _ERRORS.get(status[1], Unavailable) if status else Unavailable
            raise error(f"{name or 'its listing'}: {_reason(e)}") from e
        except BaseException as e:
            if type(e).__name__ != "PanicException":  # of Rust code; it has no public class
                raise
            raise Unavailable(f"{name}: obstore failed: {_reason(e)}") from e


def _listed(meta: Any) -> Listed:
    return Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _reason(e: BaseException) -> str:
    """Return the first line of an error, without the query of a URL, which may hold a token."""
    line = str(e).partition("\n")[0]
    return re.sub(r"\?\S*", "", line)[:300]
