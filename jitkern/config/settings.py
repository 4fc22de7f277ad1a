"""Settings, read once from the environment. No other file reads `os.environ`.

What compilers are told beside the settings, CC, CXX, CPATH and the like, is read then, too, and
anew at each call of `load_inline` and `load`, as by Torch's: see `renew`. Whatever this process
builds later is told the same.

Precedence, highest first:
1. arguments (command-line options, `config.using(...)`, which counts in its own context alone)
2. environment variables
3. the user's settings file, `~/.config/jitkern/config.toml` (or below `$XDG_CONFIG_HOME`)
4. the system's, `/etc/jitkern/config.toml`
5. the defaults below
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
# What a compiler's child process may see; all else (CFLAGS, CPATH, NVCC_*_FLAGS, TRITON_*) is
# scrubbed, so that a builder and a server agree on the artifact.
BUILD_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT", "USER", "LOGNAME")
_OF_TOOLS = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "PYTORCH_NVCC", "MAX_JOBS")  # read for builds
PREFERENCES = ("", "nvrtc", "triton", "extension", "cc")  # kinds of source
SYSTEM_FILE = Path("/etc/jitkern/config.toml")
SETTINGS = (
    "CACHE_DIR", "SYSTEM_CACHE", "COMPILE", "FALLBACK", "COMPILER", "PREFER", "VERIFY", "FSYNC",
    "MAX_SIZE", "MAX_AGE", "JOBS", "LOCK_TIMEOUT", "RECORD", "LOG",
)  # fmt: skip
_SIZES = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"": 1, "S": 1, "MIN": 60, "H": 3600, "D": 86400, "W": 7 * 86400}


class _Snapshot(dict[str, str]):
    """The environment of this process, as it was read."""


class Config:  # not a dataclass: making one takes 2 ms of every import
    """One immutable set of settings; `Config.from_env()` makes it, `current()` holds it.

    Making one raises TypeError for an unknown name, and SettingError for a value it does not take.

    max_size: bytes, and max_age: seconds, that the user root is kept to (0 = no limit).
    trusted: roots that may be read though others could write them; trusted_keys: public keys whose
    signature makes an entry trusted; signed: roots of which only such entries are used.
    """

    cache_dir: Path
    origins: Mapping[str, str] = MappingProxyType({})  # of settings that are no defaults
    system_cache: tuple[Path, ...] = ()
    trusted: tuple[Path, ...] = ()
    trusted_keys: tuple[str, ...] = ()
    signed: tuple[Path, ...] = ()
    max_size: int = 10 << 30
    max_age: int = 60 * 86400
    compile: str = "auto"
    fallback: str = ""  # "" = reference where nothing fits, raise where a build failed
    compiler: str = "any"
    prefer: str = ""
    verify: str = "always"
    fsync: bool = True
    jobs: int = 0  # 0 = from cores and free memory
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
        raise AttributeError(f"settings do not change; `config.using({name}=...)` takes others")

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, files: Sequence[Path] | None = None
    ) -> Config:
        """The settings that `environ` and `files` (later ones win) ask for.

        Default: the process environment and the two settings files. Raises SettingError, naming
        the variable or file and what it accepts, for a value it cannot use.
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
        """What names the cache directory."""
        return self.origins.get("JITKERN_CACHE_DIR", "default")

    def build_environment(self, extra: tuple[str, ...] = ()) -> dict[str, str]:
        """The scrubbed environment for a compiler, with the variables that a source declares."""
        kept = {
            name: self.environment[name]
            for name in (*BUILD_VARIABLES, *extra)
            if name in self.environment
        }
        return {"PATH": os.defpath, **kept, "LC_ALL": "C.UTF-8"}


_current: Config | None = None  # those of the process
_using: contextvars.ContextVar[Config | None] = contextvars.ContextVar("jitkern", default=None)
_listeners: list[Callable[[], None]] = []
_lock = threading.Lock()
_own_blocks = threading.local()  # `count`: those of this thread, as of `_blocks`
_blocks = 0  # blocks of `using`, of all threads, whose `prefer` is not that of the process


def current() -> Config:
    """The settings in force here; the environment is read on the first call."""
    return _using.get() or _of_process()


def _of_process() -> Config:
    global _current  # noqa: PLW0603  the one process-wide value, set once
    if _current is None:
        _current = Config.from_env()
        _configure_log(_current.log)
    return _current


def renew(also: Sequence[str] = ()) -> None:
    """Take what variables that every build depends on, and those `also` named, are now.

    All else stays: settings, what `using` says, and variables that sources name. Where none of them
    changed, `current()` is the same object as before.
    """
    global _current  # noqa: PLW0603
    settings = current()
    before = settings.environment
    if not isinstance(before, _Snapshot):
        return
    read = {name: os.environ.get(name) for name in (*BUILD_VARIABLES, *_OF_TOOLS, *also)}
    if all(before.get(name) == value for name, value in read.items()):
        return
    now = _Snapshot({k: v for k, v in {**before, **read}.items() if v is not None})
    old = _tools(before)
    tools = {name: tool for name, tool in _tools(now).items() if vars(settings)[name] == old[name]}
    renewed = Config(**{**vars(settings), **tools, "environment": now})
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
    """`TORCH_CUDA_ARCH_LIST` as it is now: Torch reads it at each call, and so programs set it."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")


@contextlib.contextmanager
def using(**settings: object) -> Iterator[Config]:
    """Run a block under changed settings, e.g. `with using(compile="never"):`.

    They count in this thread and context alone, and in what jitkern builds beside its calls; a
    thread that somebody else starts, as Torch does for gradients on a GPU, has those of the
    process. Values are what the environment takes, or of the setting's type. Raises TypeError for a
    name that is none, SettingError for a value that is not usable.
    """
    before, outer = _using.get(), current()
    changed = Config(**{**vars(outer), **settings})
    differs = changed.prefer != _of_process().prefer
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
    """Call this now, and in each thread and at each time that `preferences` may have changed."""
    with _lock:
        _listeners.append(listener)
        listener()


def preferences() -> tuple[str | None, str | None]:
    """What `prefer` is in every thread, and in this one, as far as C code may rely on it.

    C code knows threads, but no contexts. So the first is None while any block prefers another kind
    than the process does. The second is None outside of such a block, and in the thread of an event
    loop, whose tasks have contexts of their own.
    """
    process, own = _of_process().prefer, current().prefer
    import asyncio  # Torch has it imported, and C code relies on this where Torch is

    shared = asyncio._get_running_loop() is not None
    return None if _blocks else process, None if shared or own == process else own


def _after_fork() -> None:
    """A child has none of the blocks of its parent's other threads."""
    global _lock, _blocks  # noqa: PLW0603
    _lock = threading.Lock()
    _blocks = getattr(_own_blocks, "count", 0)
    for listener in _listeners:
        listener()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def size_of(text: str) -> int:
    """Bytes, of `500 MiB`, `10G` or a plain number. Raises ValueError."""
    return _scaled(text, r"([KMGT]?)(?:I?B)?", _SIZES)


def duration_of(text: str) -> int:
    """Seconds, of `30 d`, `12h` or a plain number. Raises ValueError."""
    return _scaled(text, "(S|MIN|H|D|W)?", _TIMES)


def _scaled(text: str, unit: str, units: Mapping[str, int]) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text.strip().upper())
    if not match:
        raise ValueError(text)
    return int(float(match.group(1)) * units[match.group(2) or ""])


def _gathered(
    environment: Mapping[str, str], files: Sequence[Path]
) -> tuple[dict[str, object], dict[str, str]]:
    """Every setting that somebody names, by its field, and what each JITKERN_ name comes from."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for path in files:
        if not os.path.isfile(path):  # noqa: PTH113  False where the home cannot be searched
            continue
        for name, value in config.file.read(path, SETTINGS).items():
            values[name] = _checked(name, value, f"{path}: {name}")
            origins[f"JITKERN_{name.upper()}"] = str(path)
    for setting in SETTINGS:
        variable = f"JITKERN_{setting}"
        if text := environment.get(variable):
            name = setting.lower()
            listed = [part for part in text.split(os.pathsep) if part]
            value = listed if name == "system_cache" else text
            values[name] = _checked(name, value, variable)
            origins[variable] = "environment"
    return values, origins


def user_file(environment: Mapping[str, str]) -> Path:
    """The path of the user's settings file, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117  its specification has a relative one ignored
        base = "~/.config"
    return _path(f"{base}/jitkern/config.toml")


def _path(value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("expected a path")  # noqa: TRY004  told like every other value
    return Path(os.path.expanduser(value)).absolute()  # noqa: PTH111  raises nothing without a home


def _path_or_none(value: object) -> Path | None:
    return None if value is None else _path(value)


def _paths(value: object) -> tuple[Path, ...]:
    one = isinstance(value, (str, os.PathLike))
    if not one and not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of paths")
    return tuple(map(_path, [value] if one else value))  # type: ignore[call-overload]


def _keys(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(key, str) for key in value):
        raise ValueError("expected a list of public keys")
    if not value:
        return ()
    return tuple(key if _is_bare_key(key) else files.signature.public_key(key) for key in value)


def _is_bare_key(text: str) -> bool:
    """Whether it is what `public_key` returns."""
    return re.fullmatch(r"[A-Za-z0-9+/]{43}=", text) is not None


def _default_cache_dir() -> Path:
    if sys.platform == "linux":  # as platformdirs has it, which takes 3 ms of an import
        base = os.environ.get("XDG_CACHE_HOME", "")
        path = Path(base) if base.startswith("/") else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111
        path /= "jitkern"
    else:
        import platformdirs

        path = platformdirs.user_cache_path("jitkern", appauthor=False)
    if path.is_absolute():
        return path
    import tempfile  # a user without a home: in a container, as a rule

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


# What a value of a setting must be, given as text or as what the text means; the rest is not asked.
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
    """A value as the setting has it. Raises SettingError, which calls it `what`."""
    try:
        return _CHECKS[name](value) if name in _CHECKS else value
    except ValueError as e:
        told = f"{value!r}" if isinstance(value, (list, tuple)) else f"`{value}`"
        raise SettingError(f"{what}={told} is not usable: {e}") from None


def _configure_log(level: str) -> None:
    logger = logging.getLogger("jitkern")
    if level != "warning" and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("jitkern: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
