"""The remote that a command works on, and errors of the remote as errors of the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jitkern import config, remote
from jitkern.cli.parser import UsageError
from jitkern.config import values
from jitkern.errors import JitkernError, SettingError
from jitkern.remote.store import Readable, Refused, Store, Throttled, Unavailable, shown
from jitkern.target import Target

PATIENCE = 60.0  # seconds for a request that carries a bundle


def url_of(named: str | None) -> str:
    """Return the URL that a command names, or the first of the settings. Raises UsageError."""
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
def connected(url: str, *, patience: float = PATIENCE) -> Iterator[Readable]:
    """Yield the store at a URL. Raises JitkernError where the block meets Unavailable.

    patience: seconds for one request, at least; the settings may say more.
    """
    seconds = max(patience, config.current().remote_timeout)
    try:
        with config.using(remote_timeout=seconds):
            yield remote.store.opened(url)
    except Unavailable as e:
        raise JitkernError(trouble(url, e)) from e


def trouble(url: str, e: Unavailable) -> str:
    """Return an error of a store as text that says what to do."""
    if isinstance(e, Refused):
        return (
            f"{shown(url)} refuses: {e}; check the credentials and their permissions, "
            "and of S3 that they allow s3:ListBucket too"
        )
    if isinstance(e, Throttled):
        return f"{shown(url)} is asked too often: {e}; try again later"
    return f"{shown(url)} did not answer as a remote: {e}"


def writable(store: Readable) -> Store:
    """Return a store that can be written. Raises UsageError."""
    if isinstance(store, Store):
        return store
    raise UsageError(
        f"{store.url} can only be read: name the bucket (s3://, gs://, az://) or the directory "
        "(file://) behind it"
    )


def machines_of(targets: list[str]) -> list[str]:
    """Return the machines of targets, by default those of this machine. Raises TargetError."""
    named = [str(Target.parse(text)) for text in targets] or map(str, Target.visible())
    return list(dict.fromkeys(map(remote.layout.machine_of, named)))
