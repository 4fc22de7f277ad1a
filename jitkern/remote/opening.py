"""The store that a URL names."""

from __future__ import annotations

from urllib.parse import urlsplit

from jitkern.config.values import REMOTES
from jitkern.errors import SettingError
from jitkern.remote import stores
from jitkern.remote.store import VARIABLES, Readable, shown


def opened(url: str) -> Readable:
    """Return the store that a URL names; nothing is connected yet.

    Raises SettingError for a URL of another scheme, and JitkernError if a package is missing.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return stores.http.HttpStore(url)
    if scheme == "file":
        return stores.directory.DirectoryStore(url)
    if scheme in VARIABLES:
        return stores.objects.ObjectStore(url)
    raise SettingError(f"`{shown(url)}` names no remote: expected {REMOTES}")
