"""Settings, read once from the environment. No other file reads `os.environ`.

What compilers are told beside the settings, CC, CXX, CPATH and the like, is read then, too, and
anew at each call of `load_inline` and `load`, as by Torch's: see `renew`. Whatever this process
builds later is told the same.

Precedence, highest first:
1. arguments (command-line options, `config.using(...)`)
2. environment variables
3. the user's settings file, `~/.config/jitkern/config.toml` (or below `$XDG_CONFIG_HOME`)
4. the system's, `/etc/jitkern/config.toml`
5. the defaults below
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")

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
        self.__dict__.update(settings)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"settings do not change; `config.using({name}=...)` takes others")

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, files: Sequence[Path] | None = None
    ) -> Config:
        """The settings that `environ` and `files` (later ones win) ask for.

        Default: the process environment and the two settings files. Raises ValueError, naming the
        variable or file and what it accepts, for a value it cannot use.
        """
        environment = _Snapshot(os.environ) if environ is None else dict(environ)
        if files is None:
            files = (SYSTEM_FILE, _user_file(environment)) if environ is None else ()
        env, origins = _gathered(environment, files)
        runtime = environment.get("XDG_RUNTIME_DIR")
        named = env.get("JITKERN_CACHE_DIR")
        return cls(
            cache_dir=_path(named) if named else _default_cache_dir(),
            origins=origins,
            system_cache=_paths(env, "JITKERN_SYSTEM_CACHE"),
            trusted=_paths(env, "JITKERN_TRUSTED"),
            trusted_keys=_keys(env.get("JITKERN_TRUSTED_KEYS", "")),
            signed=_paths(env, "JITKERN_SIGNED"),
            max_size=_quantity(env, "JITKERN_MAX_SIZE", cls.max_size, size_of, "10 GiB"),
            max_age=_quantity(env, "JITKERN_MAX_AGE", cls.max_age, duration_of, "60 d"),
            compile=_choice(env, "JITKERN_COMPILE", "auto", ("auto", "never", "background")),
            fallback=_choice(env, "JITKERN_FALLBACK", "", ("reference", "raise")),
            compiler=_choice(env, "JITKERN_COMPILER", "any", ("any", "exact")),
            prefer=_choice(env, "JITKERN_PREFER", "", PREFERENCES[1:]),
            verify=_choice(env, "JITKERN_VERIFY", "always", ("always", "size")),
            fsync=_choice(env, "JITKERN_FSYNC", "1", ("1", "0")) == "1",
            jobs=_number(env, "JITKERN_JOBS", 0, int),
            lock_timeout=_number(env, "JITKERN_LOCK_TIMEOUT", 1800.0, float),
            record=_path(env["JITKERN_RECORD"]) if env.get("JITKERN_RECORD") else None,
            log=_choice(env, "JITKERN_LOG", "warning", ("info", "debug")),
            visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
            runtime_dir=Path(runtime) if runtime else None,
            color=not environment.get("NO_COLOR"),
            environment=environment,
            **_tools(environment),
        )

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


_current: Config | None = None
listeners: list[Callable[[Config], None]] = []  # told when `using` changes the settings


def current() -> Config:
    """The settings in force; the environment is read on the first call."""
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
    _current = Config(**{**vars(settings), **tools, "environment": now})


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
    """Run a block under changed settings, e.g. `with using(compile="never"):`."""
    before = current()
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    _put_in_force(Config(**{**vars(before), **given}))
    try:
        yield current()
    finally:
        _put_in_force(before)


def _put_in_force(settings: Config) -> None:
    global _current  # noqa: PLW0603
    _current = settings
    for listener in listeners:
        listener(settings)


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
) -> tuple[dict[str, str], dict[str, str]]:
    """Every JITKERN_ setting as text, and what it comes from."""
    known = {f"JITKERN_{name}" for name in SETTINGS}
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    for path in files:
        if not os.path.isfile(path):  # noqa: PTH113  False where the home cannot be searched
            continue
        from jitkern import config_file

        found = config_file.read(path, known | {f"JITKERN_{name}" for name in config_file.TRUST})
        values.update(found)
        origins.update(dict.fromkeys(found, str(path)))
    found = {name: environment[name] for name in known if environment.get(name)}
    return {**values, **found}, {**origins, **dict.fromkeys(found, "environment")}


def _user_file(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CONFIG_HOME")
    return Path(base) / "jitkern/config.toml" if base else _path("~/.config/jitkern/config.toml")


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111  raises nothing without a home


def _paths(env: Mapping[str, str], name: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in env.get(name, "").split(os.pathsep) if part)


def _keys(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    from jitkern.signature import public_key

    return tuple(public_key(part) for part in text.splitlines())


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


def _quantity(
    env: Mapping[str, str], name: str, default: int, parse: Callable[[str], int], example: str
) -> int:
    text = env.get(name)
    try:
        return parse(text) if text else default
    except ValueError:
        raise ValueError(
            f"{name}=`{text}` is not usable: expected something like `{example}`"
        ) from None


def _choice(env: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name) or default
    if value != default and value not in allowed:
        raise ValueError(f"{name}=`{value}` is not usable: expected one of {', '.join(allowed)}")
    return value


def _number(env: Mapping[str, str], name: str, default: T, kind: Callable[[str], T]) -> T:
    text = env.get(name)
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not 0 <= value < 1e9:  # type: ignore[operator]
        raise ValueError(f"{name}=`{text}` is not usable: expected a number from 0 up")
    return value


def _configure_log(level: str) -> None:
    logger = logging.getLogger("jitkern")
    if level != "warning" and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("jitkern: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
