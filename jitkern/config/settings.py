"""The settings and their readers. No other file reads `os.environ`.

Precedence, highest first:
1. arguments (command-line options, `config.using(...)`, which counts in its own context alone)
2. environment variables
3. the user's settings file, `~/.config/jitkern/config.toml` (or below `$XDG_CONFIG_HOME`)
4. the system's settings file, `/etc/jitkern/config.toml`
5. the defaults of `Config`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jitkern import config
from jitkern.config import values as v
from jitkern.errors import SettingError
from jitkern.named_tuple import NamedTuple

SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")  # directories for `#include`
# Variables that a compiler's child process may see; all others (CFLAGS, CPATH, NVCC_*_FLAGS,
# TRITON_*) are removed, so that a builder and a server agree on the artifact.
BUILD_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT", "USER", "LOGNAME")
TOOL_VARIABLES = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "PYTORCH_NVCC", "MAX_JOBS")
KINDS: dict[str, Any] = {}  # what `prefer` may name; `source.kinds.SOURCES` is this table
T = TypeVar("T")
SYSTEM_FILE = Path("/etc/jitkern/config.toml")


class Snapshot(dict[str, str]):
    """A copy of the environment of this process."""


def present(*names: str) -> dict[str, str | None]:
    """Return the values that variables of this process have now."""
    return {name: os.environ.get(name) for name in names}


def _default_cache_dir() -> Path:
    if sys.platform == "linux":  # the path of platformdirs, whose import takes 3 ms
        base = os.environ.get("XDG_CACHE_HOME", "")
        path = Path(base) if base.startswith("/") else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111
        path /= "jitkern"
    else:
        import platformdirs

        path = platformdirs.user_cache_path("jitkern", appauthor=False)
    if path.is_absolute():
        return path
    import tempfile  # the user has no home, as in many containers

    return Path(tempfile.gettempdir(), f"jitkern-cache-{os.geteuid()}")


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    def frozen(cls: type[T]) -> type[T]: ...
else:

    def frozen(cls: type) -> type:
        """Return the class, as it is."""
        return cls


class _Field(NamedTuple):
    """A field of `Config`. takes, shown: its values and its default, for readers; "" if internal.

    file_only: whether no variable sets it, since it decides where native code is loaded from, or
    names a file with a secret.
    """

    check: Callable[[object], object] | None
    takes: str
    shown: str
    default: Any
    file_only: bool = False


_setting: Any = _Field  # which type checkers take for a value of the setting


def _internal(default: Any, check: Callable[[object], object] | None = None) -> Any:
    return _Field(check, "", "", default)


# A dataclass for type checkers alone: an import makes this class, which would take 2 ms.
@frozen
class Config:
    """An immutable set of settings: `Config.from_env()` makes it, `current()` returns it.

    Each value comes as text or in the type of its setting, and is checked whatever its origin.
    Raises SettingError, which names the origin, and TypeError for an unknown name.

    max_size: bytes that the user root may hold (0 = no limit).
    max_age: seconds without use after which an entry is evicted (0 = no limit).
    trusted: roots that are used although others could write them.
    trusted_keys: public keys whose signature makes an entry trusted.
    signed: roots of which only entries with a trusted signature are used.
    trusted_remotes: remotes whose entries are used although no trusted key has signed them.
    origins: where fields come from that are not at their default: "environment", "using", a path.
    """

    cache_dir: Path = _setting(
        v.path, "path of the user root", "the user's cache directory", _default_cache_dir
    )
    system_cache: tuple[Path, ...] = _setting(
        v.paths, "read-only roots, separated like `PATH`", "none", ()
    )
    compile: str = _setting(*v.choice("auto", "never", "background"), "`auto`", "auto")
    fallback: str = _setting(
        *v.choice("reference", "raise", ""),
        "the reference where no kernel or no compiler is there; a failed compile always raises", "",
    )  # fmt: skip
    compiler: str = _setting(*v.choice("any", "exact"), "`any`", "any")
    prefer: str = _setting(
        v.word, "a kind: `nvrtc`, `cc`, `triton`, `cutile`, `cute`, `extension`",
        "the first declared", "",
    )  # fmt: skip
    verify: str = _setting(*v.choice("always", "size"), "`always`", "always")
    fsync: bool = _setting(v.switch, "`1`, `0`", "`1`", True)
    max_size: int = _setting(*v.quantity(v.size_of, "10 GiB"), "10 GiB", 10 << 30)
    max_age: int = _setting(*v.quantity(v.duration_of, "60 d"), "60 days", 60 * 86400)
    jobs: int = _setting(v.number(int), "number", "`MAX_JOBS`, else cores and memory", 0)
    lock_timeout: float = _setting(v.number(float), "seconds", "1800", 1800.0)
    record: Path | None = _setting(
        v.path_or_none, "a file that the calls of a run are appended to", "none", None
    )
    remote: tuple[str, ...] = _setting(
        v.urls, "URLs of remotes, asked in this order, separated by spaces", "none", ()
    )
    remote_timeout: float = _setting(v.number(float), "seconds for one request", "5", 5.0)
    remote_budget: float = _setting(v.number(float), "most seconds for one miss", "30", 30.0)
    offline: bool = _setting(v.switch, "`1`: no remote is asked", "`0`", False)
    log: str = _setting(*v.choice("warning", "info", "debug"), "warnings only", "warning")
    verbose: bool = _setting(v.switch, "`1`: show what compilers run and print", "`0`", False)
    trusted: tuple[Path, ...] = _setting(v.paths, "roots", "none", (), file_only=True)
    trusted_keys: tuple[str, ...] = _setting(v.keys, "public keys", "none", (), file_only=True)
    signed: tuple[Path, ...] = _setting(v.paths, "roots", "none", (), file_only=True)
    trusted_remotes: tuple[str, ...] = _setting(v.urls, "URLs", "none", (), file_only=True)
    remote_token_file: Path | None = _setting(
        v.path_or_none, "a file with the token for https remotes", "none", None, file_only=True
    )
    sign_key: Path | None = _setting(
        v.path_or_none, "the private key that signs what is pushed", "none", None, file_only=True
    )
    # What follows is read from the environment as it is, and stands in no settings file.
    cuda_home: Path | None = _internal(None, v.path_or_none)
    cc: str = _internal("cc", v.command)
    cxx: str = _internal("c++", v.command)
    visible_devices: str | None = _internal(None)
    runtime_dir: Path | None = _internal(None, v.path_or_none)
    color: bool = _internal(True)
    environment: Mapping[str, str] = _internal({})
    origins: Mapping[str, str] = _internal({})

    def __init__(self, **values: Any) -> None:
        for name, field in _FIELDS.items():
            if name not in values:
                default = field.default
                self.__dict__[name] = default() if callable(default) else default
        self._take(values)

    def _take(self, values: Mapping[str, Any]) -> None:
        """Check and set values. Raises SettingError and TypeError."""
        if unknown := values.keys() - _FIELDS.keys():
            raise TypeError(f"there is no setting {min(unknown)}")
        chosen = self.__dict__
        chosen.update(values)
        for name, value in values.items():
            check = _FIELDS[name].check
            if check:
                try:
                    chosen[name] = check(value)
                except ValueError as e:
                    raise self._refusal(name, value, e) from None
        if KINDS and self.origins.get("prefer", "using") == "using":
            self.check_kind()  # but not of the process: it may name a kind that is declared later

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f"settings do not change: use jitkern.using({name}=...)")

    def with_changes(self, **changes: Any) -> Config:
        """Return these settings with some changed. Raises SettingError and TypeError."""
        changed = Config.__new__(Config)
        changed.__dict__.update(self.__dict__)
        changed._take(changes)
        return changed

    def check_kind(self) -> None:
        """Raise SettingError if `prefer` names no kind of source that is declared by now."""
        if self.prefer and self.prefer not in KINDS:
            raise self._refusal("prefer", self.prefer, f"expected one of {', '.join(KINDS)}")

    def _refusal(self, name: str, value: object, why: object) -> SettingError:
        origin = self.origins.get(name, "")
        unset = "CUDA_HOME" if name == "cuda_home" else name
        where = {"": unset, "environment": _variable(name)}.get(origin, f"{origin}: {name}")
        shown = repr(value) if isinstance(value, (list, tuple)) else f"`{value}`"
        return SettingError(f"{where}={v.without_password(shown)} is not usable: {why}")

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, files: Sequence[Path] | None = None
    ) -> Config:
        """Return the settings in `environ` and `files` (later files win).

        The default is the process environment and the two settings files. Raises SettingError for
        an invalid value; the message names the variable or file, and the values that are allowed.
        """
        environment = Snapshot(os.environ) if environ is None else dict(environ)
        if files is None:
            files = (SYSTEM_FILE, user_file(environment)) if environ is None else ()
        runtime = environment.get("XDG_RUNTIME_DIR", "")
        around = {
            "visible_devices": environment.get("CUDA_VISIBLE_DEVICES"),
            "runtime_dir": runtime if os.path.isabs(runtime) else None,  # noqa: PTH117  imports less
            "color": not environment.get("NO_COLOR"),
            "environment": environment,
            **tools_in(environment),
        }
        return cls(**_gathered(environment, files), **around)

    @property
    def cache_dir_origin(self) -> str:
        """The origin of the cache directory: "environment", a file, an option, or "default"."""
        return self.origins.get("cache_dir", "default")

    @property
    def remotes(self) -> tuple[str, ...]:
        """The remotes to ask: none under `offline`."""
        return () if self.offline else self.remote

    def build_environment(self, extra: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the environment for a compiler: BUILD_VARIABLES, and those a source declares."""
        variables = {
            name: self.environment[name]
            for name in (*BUILD_VARIABLES, *extra)
            if name in self.environment
        }
        return {"PATH": os.defpath, **variables, "LC_ALL": "C.UTF-8"}


class Setting(NamedTuple):
    """A row of the table of settings. variable: "" if only a settings file sets it."""

    name: str
    type: str
    variable: str
    takes: str
    default: str


def _variable(name: str) -> str:
    return f"JITKERN_{name.upper()}"


_FIELDS: dict[str, _Field] = {name: vars(Config)[name] for name in Config.__annotations__}
# Made of the fields of `Config`: what files, variables, `doctor` and the docs know of settings.
SETTINGS = tuple(
    Setting(name, type_, "" if f.file_only else _variable(name), f.takes, f.shown)
    for (name, f), type_ in zip(_FIELDS.items(), Config.__annotations__.values()) if f.takes
)  # fmt: skip


def _gathered(environment: Mapping[str, str], files: Sequence[Path]) -> dict[str, Any]:
    """Return the values of all settings that are set, as they were read, with `origins`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files:
        if os.path.isfile(path):  # noqa: PTH113  False where the home cannot be read
            found = config.file.read(path, [setting.name for setting in SETTINGS])
            Config(**found, origins=dict.fromkeys(found, str(path)))  # one that is overridden, too
            values |= found
            origins |= dict.fromkeys(found, str(path))
    for setting in SETTINGS:
        if setting.variable and (text := environment.get(setting.variable)):
            several = setting.type == "tuple[Path, ...]"
            values[setting.name] = list(filter(None, text.split(os.pathsep))) if several else text
            origins[setting.name] = "environment"
    return {**values, "origins": origins}


def user_file(environment: Mapping[str, str]) -> Path:
    """The path of the user's settings file, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117  the XDG specification ignores relative paths
        base = os.path.expanduser("~/.config")  # noqa: PTH111  raises nothing without a home
    return Path(base, "jitkern", "config.toml").absolute()


def tools_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `Config` that the variables of compilers set."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    return {
        "cuda_home": Path(home) if home else None,
        "cc": environment.get("CC", "").strip() or "cc",
        "cxx": environment.get("CXX", "").strip() or "c++",
    }


def cuda_arch_list() -> str:
    """Return the current `TORCH_CUDA_ARCH_LIST`, which programs set late, as for Torch."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")
