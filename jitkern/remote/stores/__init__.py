"""Stores of remotes: a directory, a web server, or a bucket. `remote.store` is their contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.remote.stores import directory as directory, http as http, objects as objects
else:
    __getattr__ = on_first_use(__name__)
