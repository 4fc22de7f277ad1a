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
from jitkern.remote.store import VARIABLES, shown


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
    if _can_be_changed_on_the_way(url, config):
        raise JitkernError(
            f"the remote {shown(url)} is not used: `trusted_remotes` names it, and others could "
            "change what comes over http. Name an https:// URL there, or sign with a key in "
            "`trusted_keys`"
        )
    return ()


def _can_be_changed_on_the_way(url: str, config: Config) -> bool:
    """Return whether a URL is of http to another machine, or of a bucket that is reached so."""
    scheme = urlsplit(url).scheme
    if scheme not in VARIABLES:
        return scheme == "http" and not _is_here(url)
    about, prefix = config.environment, VARIABLES[scheme]
    if about.get(f"{prefix}_ALLOW_HTTP", "").lower() not in ("1", "true"):
        return False
    endpoints = [v for n, v in about.items() if n.startswith(prefix) and "ENDPOINT" in n]
    return not endpoints or not all(v.startswith("https:") or _is_here(v) for v in endpoints)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
