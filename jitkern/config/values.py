"""Checks of settings: each takes a value as text or in the type of its setting, or refuses it.

A check returns the value in the type of the setting. It raises ValueError, which says what was
expected; `Config` makes that a SettingError, which names the setting and its origin.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import files

if TYPE_CHECKING:
    from typing import Literal, TypedDict

    class Settings(TypedDict, total=False):
        """The keywords of `using`: the fields of `Config`, in each type that a check accepts."""

        cache_dir: str | Path
        system_cache: str | Path | list[str | Path] | tuple[str | Path, ...]
        trusted: str | Path | list[str | Path] | tuple[str | Path, ...]
        trusted_keys: list[str] | tuple[str, ...]
        signed: str | Path | list[str | Path] | tuple[str | Path, ...]
        compile: Literal["auto", "never", "background"]
        fallback: Literal["", "reference", "raise"]
        compiler: Literal["any", "exact"]
        prefer: str
        verify: Literal["always", "size"]
        fsync: bool | Literal["0", "1"]
        max_size: int | str
        max_age: int | str
        jobs: int | str
        lock_timeout: float | str
        remote: str | list[str] | tuple[str, ...]
        remote_timeout: float | str
        remote_budget: float | str
        offline: bool | Literal["0", "1"]
        trusted_remotes: str | list[str] | tuple[str, ...]
        remote_token_file: str | Path | None
        sign_key: str | Path | None
        record: str | Path | None
        log: Literal["warning", "info", "debug"]
        verbose: bool | Literal["0", "1"]
        cuda_home: str | Path | None
        cc: str
        cxx: str
        visible_devices: str | None
        runtime_dir: str | Path | None
        color: bool
        environment: Mapping[str, str]
        origins: Mapping[str, str]


REMOTES = "https://…, s3://…, gs://…, az://… or file:///…"
_SIZES = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"": 1, "S": 1, "MIN": 60, "H": 3600, "D": 86400, "W": 7 * 86400}


def size_of(text: str) -> int:
    """Return the bytes that `500 MiB`, `10G` or a plain number means. Raises ValueError."""
    return _scaled(text, r"([KMGT]?)(?:I?B)?", _SIZES)


def duration_of(text: str) -> int:
    """Return the seconds that `30 d`, `12h` or a plain number means. Raises ValueError."""
    return _scaled(text, "(S|MIN|H|D|W)?", _TIMES)


def _scaled(text: str, unit: str, units: Mapping[str, int]) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text.strip().upper())
    if not match:
        raise ValueError(text)
    return int(float(match.group(1)) * units[match.group(2) or ""])


def words_of(command: str) -> list[str]:
    """Return the words of a command, as a shell reads them. Raises ValueError."""
    if {*command}.isdisjoint("'\"\\"):
        return command.split()
    import shlex  # 0.3 ms of an import of ops, for commands that need it

    return shlex.split(command)


def command(value: object) -> str:
    """Check a command."""
    with contextlib.suppress(ValueError):
        if isinstance(value, str) and words_of(value):
            return value
    raise ValueError("expected a command such as `g++`: set CC and CXX to one each")


def quantity(parse: Callable[[str], int], example: str) -> tuple[Callable[[object], int], str]:
    """Return a check of sizes or durations, and its words for the table of settings."""

    def check(value: object) -> int:
        if type(value) is int and value >= 0:
            return value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return parse(value)
        raise ValueError(f"expected something like `{example}`")

    return check, f"like `{example}`; 0 for no limit"


def choice(*allowed: str) -> tuple[Callable[[object], object], str]:
    """Return a check of settings with few values, and its words for the table of settings."""
    named = [value for value in allowed if value]

    def check(value: object) -> object:
        if value not in allowed:
            raise ValueError(f"expected one of {', '.join(named)}")
        return value

    return check, ", ".join(f"`{value}`" for value in named)


def number(kind: type[int | float]) -> Callable[[object], float]:
    """Return a check of numbers from 0 up."""

    def check(value: object) -> float:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                number = kind(value)
                if 0 <= number < 1e9 and (isinstance(value, str) or number == value):
                    return number
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'} from 0 up")

    return check


def switch(value: object) -> bool:
    """Check a boolean."""
    if value in ("1", "0"):
        return value == "1"
    if not isinstance(value, bool):
        raise ValueError("expected one of 1, 0")  # noqa: TRY004  callers report ValueErrors
    return value


def word(value: object) -> str:
    """Check a name of a kind of source; `Config.check_kind` checks that it exists."""
    if not isinstance(value, str):
        raise ValueError("expected a kind of source")  # noqa: TRY004
    return value


def path(value: object) -> Path:
    """Check a path, and make it absolute, with `~` and `~user` as a shell reads them."""
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("expected a path")  # noqa: TRY004
    expanded = os.path.expanduser(value)  # noqa: PTH111  raises nothing without a home
    first = str(expanded).partition("/")[0]
    if first.startswith("~"):
        who = f"no user `{first[1:]}`" if first[1:] else "no home of this user"
        raise ValueError(f"there is {who}: write a path from /, or ./{first} for a folder here")
    return Path(expanded).absolute()


def path_or_none(value: object) -> Path | None:
    """Check a path that may be left out."""
    return None if value is None else path(value)


def paths(value: object) -> tuple[Path, ...]:
    """Check a list of paths, or a single path."""
    is_path = isinstance(value, (str, os.PathLike))
    if not is_path and not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of paths")
    return tuple(map(path, [value] if is_path else value))  # type: ignore[call-overload]


def keys(value: object) -> tuple[str, ...]:
    """Check a list of public keys, whose comments are left out."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(key, str) for key in value):
        raise ValueError("expected a list of public keys")
    bare = r"[A-Za-z0-9+/]{43}="  # a key as `public_key` returns it, already checked
    return tuple(
        key if re.fullmatch(bare, key) else files.signature.public_key(key) for key in value
    )


def urls(value: object) -> tuple[str, ...]:
    """Check a list of URLs of remotes, or a text with spaces between them."""
    several = value.split() if isinstance(value, str) else value
    if not isinstance(several, (list, tuple)) or not all(isinstance(url, str) for url in several):
        raise ValueError("expected a list of URLs")
    for url in several:
        if not re.fullmatch(r"(https?|s3|gs|az|file)://[^\s/?#]*(/[^\s?#]*)?", url):
            raise ValueError(f"expected {REMOTES}")
        if not url.isascii() or re.search(r"[\[\]]", url):  # no other URL can fail to be split
            _split(url)
    return tuple(url.rstrip("/") for url in several)


def without_password(text: str) -> str:
    """Return text for a message, without the user names and passwords of the URLs in it."""
    return re.sub(r"://[^\s'\"]*@", "://…@", text)


def _split(url: str) -> None:
    """Raise ValueError for a URL with an address that none of its readers could use."""
    from urllib.parse import urlsplit  # for odd URLs alone: a warm start needs no more than a look

    try:
        urlsplit(url)
    except ValueError as e:
        raise ValueError(f"expected {REMOTES}, and {e}") from e
