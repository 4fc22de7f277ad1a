"""Trust in a remote: the keys that must have signed what comes from a URL.

A URL may come from the environment, and trust may not: the settings `trusted_keys` and
`trusted_remotes` stand in settings files alone.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from jitkern.config import Config
from jitkern.config.settings import SYSTEM_FILE
from jitkern.errors import JitkernError
from jitkern.remote.store import shown


def keys_for(url: str, config: Config) -> tuple[str, ...]:
    """Return the public keys, one of which must have signed each entry that comes from `url`.

    The result is empty for a URL in `trusted_remotes`, whose entries need no signature. Raises
    JitkernError where nothing says that the remote can be trusted.
    """
    url = url.rstrip("/")
    if url not in config.trusted_remotes:
        if config.trusted_keys:
            return config.trusted_keys
        raise JitkernError(
            f"the remote {shown(url)} is not used: nobody vouches for it. Add the public key of "
            "its signer to `trusted_keys`, or the URL to `trusted_remotes`, in "
            f"~/.config/jitkern/config.toml or {SYSTEM_FILE}"
        )
    if _can_be_changed_on_the_way(url):
        raise JitkernError(
            f"the remote {shown(url)} is not used: `trusted_remotes` names it, and others could "
            "change what comes over http. Name an https:// URL there, or sign with a key in "
            "`trusted_keys`"
        )
    return ()


def _can_be_changed_on_the_way(url: str) -> bool:
    """Return whether a URL is of http to another machine."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True
