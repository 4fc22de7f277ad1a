"""Trust in a remote: the keys that must have signed what comes from a URL.

A URL may come from the environment, and trust may not: the settings `trusted_keys` and
`trusted_remotes` stand in settings files alone.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jitkern.config import Config
from jitkern.config.settings import user_file
from jitkern.errors import SettingError
from jitkern.remote.store import VARIABLES, is_loopback, shown

_AZURITE = "AZURITE_BLOB_STORAGE_URL"  # where obstore finds the emulator, by http
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def keys_for(url: str, config: Config, root: Path | None = None) -> tuple[str, ...]:
    """Return the public keys, one of which must have signed each entry that comes from `url`.

    The result is empty for a URL in `trusted_remotes`, whose entries need no signature.
    root: the root of the cache that adopts the entries, which may hold signed entries alone. Raises
    SettingError where nothing says that the remote can be trusted.
    """
    named = shown(url) in map(shown, config.trusted_remotes) and root not in config.signed
    if named and not _can_be_changed_on_the_way(url, config):
        return ()
    if config.trusted_keys:
        return config.trusted_keys
    file = user_file(config.environment)
    if named:
        raise SettingError(
            f"the remote {shown(url)} is not trusted: `trusted_remotes` does not cover plain http, "
            "whose answers anybody on the network could change. Use https, or add the signer's "
            f"public key (the line of its .pub file) to `trusted_keys` in {file}"
        )
    raise SettingError(
        f"the remote {shown(url)} is not trusted: in {file}, add the signer's public key (the line "
        "of its .pub file) to `trusted_keys` (recommended), or the URL to `trusted_remotes`, if "
        "you trust all who can write there"
    )


def _can_be_changed_on_the_way(url: str, config: Config) -> bool:
    """Return whether a URL is of http to another machine, or of a bucket that is reached so."""
    scheme = urlsplit(url).scheme
    if scheme not in VARIABLES:
        return scheme == "http" and not is_loopback(url)
    about, prefix = config.environment, VARIABLES[scheme]
    emulated = scheme == "az" and any("EMULATOR" in n and v for n, v in about.items())
    if about.get(f"{prefix}_ALLOW_HTTP", "").lower() not in ("1", "true") and not emulated:
        return False
    endpoints = [
        value for name, value in about.items()
        if (name.startswith(prefix) and "ENDPOINT" in name) or (emulated and name == _AZURITE)
    ]  # fmt: skip
    return not endpoints or not all(
        value.startswith("https:") or _is_reached_here(value, about) for value in endpoints
    )


def _is_reached_here(url: str, environment: Mapping[str, str]) -> bool:
    """Return whether a URL of http leads to this machine, without a proxy."""
    proxied = any(environment.get(name) for name in _PROXIES)
    spared = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    host = urlsplit(url).hostname or ""
    request: Any = urllib.request  # whose public function of this name is in no stub
    return is_loopback(url) and (
        not proxied or bool(request.proxy_bypass_environment(host, {"no": spared}))
    )
