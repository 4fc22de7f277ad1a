"""The remote that a command works on, and errors of the remote as errors of the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jitkern import config, remote
from jitkern.cache_tools import signing
from jitkern.cli.parser import UsageError
from jitkern.config import values
from jitkern.errors import JitkernError, SettingError
from jitkern.remote import layout
from jitkern.remote.patience import retry
from jitkern.remote.store import Readable, Store, Unavailable
from jitkern.target import Target

UNSIGNED = (
    "what was pushed is not signed: machines use it only if `trusted_remotes` in their settings "
    "file names the URL; --key FILE signs it"
)
PATIENCE = 60.0  # seconds for a request that carries a bundle; the settings may say more


def url_of(named: str | None) -> str:
    """Return the URL that a command names, or the first of the settings.

    Raises UsageError if there is none, and SettingError where no remote is to be asked.
    """
    if config.current().offline:
        raise SettingError(
            "`offline` is set (JITKERN_OFFLINE), so no remote is asked: unset it, and try again"
        )
    if named is None:
        urls = config.current().remote
        if not urls:
            raise UsageError("no remote is set: name a URL, or set JITKERN_REMOTE")
        return urls[0]
    try:
        return values.urls((named,))[0]
    except ValueError as e:
        raise SettingError(f"`{values.without_password(named)}` names no remote: {e}") from None


@contextlib.contextmanager
def telling(store: Readable) -> Iterator[None]:
    """Raise JitkernError where the block meets Unavailable."""
    try:
        yield
    except Unavailable as e:
        raise JitkernError(f"{store.url}: {e.meaning}: {e}; {e.remedy}") from e


@contextlib.contextmanager
def connected(url: str) -> Iterator[Readable]:
    """Yield the store at a URL, whose requests may carry bundles.

    Raises JitkernError, also where the block meets Unavailable.
    """
    with config.using(remote_timeout=max(PATIENCE, config.current().remote_timeout)):
        store = remote.opening.opened(url)
    with telling(store):
        yield store


def writable(store: Readable) -> Store:
    """Return a store that can be written. Raises UsageError."""
    if isinstance(store, Store):
        return store
    raise UsageError(
        f"{store.url} can only be read: name the bucket (s3://, gs://, az://) or the directory "
        "(file://) behind it"
    )


def pushable(url: str, key: Path | None) -> Store:
    """Return the store for a later push, which can be read now. Raises JitkernError.

    So a misspelt URL or key is known before the work for it.
    """
    if key:
        signing.public_key_of(key)
    with connected(url_of(url)) as store:
        pushed = writable(store)
        retry(pushed.get, layout.ROOT, limit=1 << 16)
    return pushed


def machines_of(targets: list[str]) -> list[str]:
    """Return the machines of targets, by default for this machine. Raises TargetError."""
    named = [str(Target.parse(text)) for text in targets] or map(str, Target.visible())
    return list(dict.fromkeys(map(remote.layout.machine_of, named)))
