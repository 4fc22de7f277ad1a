"""Settings, read once from the environment. No other file reads `os.environ`.

Variables for compilers (CC, CXX, CPATH and the like) are read at the same time, and again at each
call of `load_inline` and `load`, as Torch does: see `renew`. Later builds of this process get the
renewed values.

Precedence, highest first:
1. arguments (command-line options, `config.using(...)`, which counts in its own context alone)
2. environment variables
3. the user's settings file, `~/.config/jitkern/config.toml` (or below `$XDG_CONFIG_HOME`)
4. the system's settings file, `/etc/jitkern/config.toml`
5. the defaults of `Config`
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jitkern import config, files
from jitkern.errors import SettingError

SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")  # directories for `#include`
# Variables that a compiler's child process may see; all others (CFLAGS, CPATH, NVCC_*_FLAGS,
# TRITON_*) are removed, so that a builder and a server agree on the artifact.
BUILD_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT", "USER", "LOGNAME")
_TOOL_VARIABLES = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "PYTORCH_NVCC", "MAX_JOBS")
PREFERENCES = ("", "nvrtc", "triton", "extension", "cc")  # kinds of source
SYSTEM_FILE = Path("/etc/jitkern/config.toml")
SETTINGS = (
    "CACHE_DIR", "SYSTEM_CACHE", "COMPILE", "FALLBACK", "COMPILER", "PREFER", "VERIFY", "FSYNC",
    "MAX_SIZE", "MAX_AGE", "JOBS", "LOCK_TIMEOUT", "RECORD", "LOG",
)  # fmt: skip
_SIZES = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"": 1, "S": 1, "MIN": 60, "H": 3600, "D": 86400, "W": 7 * 86400}


class _Snapshot(dict[str, str]):
    """A copy of the environment of this process."""


class Config:  # not a dataclass: making a dataclass takes 2 ms of every import
    """An immutable set of settings: `Config.from_env()` makes it, `current()` returns it.

    The constructor raises TypeError for an unknown name, and SettingError for an invalid value.

    max_size: bytes that the user root may hold (0 = no limit).
    max_age: seconds without use after which an entry is evicted (0 = no limit).
    trusted: roots that are used although others could write them.
    trusted_keys: public keys whose signature makes an entry trusted.
    signed: roots of which only entries with a trusted signature are used.
    """

    cache_dir: Path
    origins: Mapping[str, str] = MappingProxyType({})  # of settings that differ from the defaults
    system_cache: tuple[Path, ...] = ()
    trusted: tuple[Path, ...] = ()
    trusted_keys: tuple[str, ...] = ()
    signed: tuple[Path, ...] = ()
    max_size: int = 10 << 30
    max_age: int = 60 * 86400
    compile: str = "auto"
    fallback: str = ""  # "" = the reference where no source fits, an error where a build failed
    compiler: str = "any"
    prefer: str = ""
    verify: str = "always"
    fsync: bool = True
    jobs: int = 0  # 0 = as many as cores and free memory allow
    lock_timeout: float = 1800.0
    record: Path | None = None  # file that the calls of a run are appended to
    log: str = "warning"
    cuda_home: Path | None = None
    cc: str = "cc"
    cxx: str = "c++"
    visible_devices: str | None = None
    runtime_dir: Path | None = None
    color: bool = True
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self, **settings: object) -> None:
        unknown = settings.keys() - Config.__annotations__.keys()
        if unknown:
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
        for name, value in settings.items():
            self.__dict__[name] = _checked(name, value, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"settings cannot be changed: use `with jitkern.using({name}=...)`")

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, files: Sequence[Path] | None = None
    ) -> Config:
        """Return the settings in `environ` and `files` (later files win).

        The default is the process environment and the two settings files. Raises SettingError for
        an invalid value; the message names the variable or file, and the values that are allowed.
        """
        environment = _Snapshot(os.environ) if environ is None else dict(environ)
        if files is None:
            files = (SYSTEM_FILE, user_file(environment)) if environ is None else ()
        settings, origins = _gathered(environment, files)
        runtime = environment.get("XDG_RUNTIME_DIR", "")
        return cls(**{
            "cache_dir": _default_cache_dir(),
            **settings,
            "origins": origins,
            "visible_devices": environment.get("CUDA_VISIBLE_DEVICES"),
            "runtime_dir": runtime if os.path.isabs(runtime) else None,  # noqa: PTH117  imports less
            "color": not environment.get("NO_COLOR"),
            "environment": environment,
            **_tools(environment),
        })  # fmt: skip

    @property
    def cache_dir_origin(self) -> str:
        """The variable or file that names the cache directory, or "default"."""
        return self.origins.get("JITKERN_CACHE_DIR", "default")

    def build_environment(self, extra: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the environment for a compiler: BUILD_VARIABLES, and those a source declares."""
        variables = {
            name: self.environment[name]
            for name in (*BUILD_VARIABLES, *extra)
            if name in self.environment
        }
        return {"PATH": os.defpath, **variables, "LC_ALL": "C.UTF-8"}


_current: Config | None = None  # the settings of the process
_using: contextvars.ContextVar[Config | None] = contextvars.ContextVar("jitkern", default=None)
_listeners: list[Callable[[], None]] = []
_lock = threading.Lock()
_own_blocks = threading.local()  # `count`: the share of this thread in `_blocks`
_blocks = 0  # blocks of `using` in all threads whose `prefer` differs from that of the process


def current() -> Config:
    """Return the settings in force here; the first call reads the environment."""
    return _using.get() or _process_settings()


def _process_settings() -> Config:
    global _current  # noqa: PLW0603  the one process-wide value, set once
    if _current is None:
        _current = Config.from_env()
        _configure_log(_current.log)
    return _current


def renew(also: Sequence[str] = ()) -> None:
    """Read the variables again that every build depends on, and the variables named in `also`.

    Settings, overrides by `using`, and variables that sources name stay as they are. Where no
    variable changed, `current()` returns the same object as before.
    """
    global _current  # noqa: PLW0603
    settings = current()
    before = settings.environment
    if not isinstance(before, _Snapshot):
        return
    values = {name: os.environ.get(name) for name in (*BUILD_VARIABLES, *_TOOL_VARIABLES, *also)}
    if all(before.get(name) == value for name, value in values.items()):
        return
    after = _Snapshot({k: v for k, v in {**before, **values}.items() if v is not None})
    old = _tools(before)
    tools = {k: tool for k, tool in _tools(after).items() if vars(settings)[k] == old[k]}
    renewed = Config(**{**vars(settings), **tools, "environment": after})
    if _using.get():
        _using.set(renewed)
    else:
        _current = renewed


def _tools(environment: Mapping[str, str]) -> dict[str, object]:
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    return {
        "cuda_home": Path(home) if home else None,
        "cc": environment.get("CC") or "cc",
        "cxx": environment.get("CXX") or "c++",
    }


def cuda_arch_list() -> str:
    """Return the present `TORCH_CUDA_ARCH_LIST`: programs set it late, as Torch reads it anew."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")


@contextlib.contextmanager
def using(**settings: object) -> Iterator[Config]:
    """Run a block under changed settings, e.g. `with using(compile="never"):`.

    The changed settings hold in this thread and context, and in background builds for its calls. A
    thread that other code starts, as Torch does for gradients on a GPU, has the settings of the
    process. A value is text, as in the environment, or has the type of the setting. Raises
    TypeError for an unknown name, and SettingError for an invalid value.
    """
    before, outer = _using.get(), current()
    changed = Config(**{**vars(outer), **settings})
    differs = changed.prefer != _process_settings().prefer
    _using.set(changed)
    _count_blocks(+differs)
    try:
        yield changed
    finally:
        _using.set(before)
        _count_blocks(-differs)


def _count_blocks(change: int) -> None:
    global _blocks  # noqa: PLW0603
    with _lock:
        _blocks += change
        _own_blocks.count = getattr(_own_blocks, "count", 0) + change
        for listener in _listeners:
            listener()


def follow_preferences(listener: Callable[[], None]) -> None:
    """Call `listener` now, and whenever `preferences` may have changed, in the thread concerned."""
    with _lock:
        _listeners.append(listener)
        listener()


def preferences() -> tuple[str | None, str | None]:
    """Return the value of `prefer` in every thread, and in this thread, as far as C may rely on it.

    C code knows threads, but no contexts. So the first value is None while any block prefers
    another kind than the process does. The second value is None outside of such a block, and in the
    thread of an event loop, whose tasks have contexts of their own.
    """
    process, own = _process_settings().prefer, current().prefer
    import asyncio  # costs nothing: C code asks only after Torch, which imports asyncio

    shared = asyncio._get_running_loop() is not None
    return None if _blocks else process, None if shared or own == process else own


def _after_fork() -> None:
    """Forget the blocks of the parent's other threads, which a forked child does not have."""
    global _lock, _blocks  # noqa: PLW0603
    _lock = threading.Lock()
    _blocks = getattr(_own_blocks, "count", 0)
    for listener in _listeners:
        listener()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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


def _gathered(
    environment: Mapping[str, str], files: Sequence[Path]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values of all settings that are set, and the origins of the JITKERN_ names."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for path in files:
        if not os.path.isfile(path):  # noqa: PTH113  False where the home cannot be read
            continue
        for name, value in config.file.read(path, SETTINGS).items():
            values[name] = _checked(name, value, f"{path}: {name}")
            origins[f"JITKERN_{name.upper()}"] = str(path)
    for setting in SETTINGS:
        variable = f"JITKERN_{setting}"
        if text := environment.get(variable):
            name = setting.lower()
            parts = [part for part in text.split(os.pathsep) if part]
            value = parts if name == "system_cache" else text
            values[name] = _checked(name, value, variable)
            origins[variable] = "environment"
    return values, origins


def user_file(environment: Mapping[str, str]) -> Path:
    """The path of the user's settings file, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117  the XDG specification ignores relative paths
        base = "~/.config"
    return _path(f"{base}/jitkern/config.toml")


def _path(value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("expected a path")  # noqa: TRY004  callers report all ValueErrors alike
    return Path(os.path.expanduser(value)).absolute()  # noqa: PTH111  raises nothing without a home


def _path_or_none(value: object) -> Path | None:
    return None if value is None else _path(value)


def _paths(value: object) -> tuple[Path, ...]:
    is_path = isinstance(value, (str, os.PathLike))
    if not is_path and not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of paths")
    return tuple(map(_path, [value] if is_path else value))  # type: ignore[call-overload]


def _keys(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(key, str) for key in value):
        raise ValueError("expected a list of public keys")
    if not value:
        return ()
    return tuple(key if _is_bare_key(key) else files.signature.public_key(key) for key in value)


def _is_bare_key(text: str) -> bool:
    """Return whether the text is a key as `public_key` returns it, already checked."""
    return re.fullmatch(r"[A-Za-z0-9+/]{43}=", text) is not None


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


def _quantity(parse: Callable[[str], int], example: str) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):
                return parse(str(value))
        raise ValueError(f"expected something like `{example}`")

    return check


def _choice(*allowed: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value not in allowed:
            raise ValueError(f"expected one of {', '.join(filter(None, allowed))}")
        return value

    return check


def _number(kind: type[int | float]) -> Callable[[object], float]:
    def check(value: object) -> float:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                number = kind(value)
                if 0 <= number < 1e9 and (isinstance(value, str) or number == value):
                    return number
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'} from 0 up")

    return check


def _switch(value: object) -> bool:
    if value in ("1", "0"):
        return value == "1"
    if not isinstance(value, bool):
        raise ValueError("expected one of 1, 0")  # noqa: TRY004
    return value


# Checks of values, which come as text or in the setting's type; other settings take any value.
_CHECKS: dict[str, Callable[[object], Any]] = {
    "cache_dir": _path,
    "system_cache": _paths,
    "trusted": _paths,
    "trusted_keys": _keys,
    "signed": _paths,
    "max_size": _quantity(size_of, "10 GiB"),
    "max_age": _quantity(duration_of, "60 d"),
    "compile": _choice("auto", "never", "background"),
    "fallback": _choice("", "reference", "raise"),
    "compiler": _choice("any", "exact"),
    "prefer": _choice(*PREFERENCES),
    "verify": _choice("always", "size"),
    "fsync": _switch,
    "jobs": _number(int),
    "lock_timeout": _number(float),
    "record": _path_or_none,
    "log": _choice("warning", "info", "debug"),
    "cuda_home": _path_or_none,
    "runtime_dir": _path_or_none,
}


def _checked(name: str, value: object, what: str) -> Any:
    """Return a value in the type of its setting. what: its name in the SettingError raised."""
    try:
        return _CHECKS[name](value) if name in _CHECKS else value
    except ValueError as e:
        shown = f"{value!r}" if isinstance(value, (list, tuple)) else f"`{value}`"
        raise SettingError(f"{what}={shown} is not usable: {e}") from None


def _configure_log(level: str) -> None:
    logger = logging.getLogger("jitkern")
    if level != "warning" and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("jitkern: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
