"""Settings, read once from the environment. No other file reads `os.environ`.

Precedence, highest first:
1. arguments (command-line options, `config.using(...)`)
2. environment variables
3. the defaults below
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# What a compiler's child process may see; all else (CFLAGS, CPATH, NVCC_*_FLAGS, TRITON_*) is
# scrubbed, so that a builder and a server agree on the artifact.
BUILD_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT", "USER", "LOGNAME")
PREFERENCES = ("", "nvrtc", "triton", "extension", "cc")  # kinds of source


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity; the rest costs an import
class Config:
    """One immutable set of settings; `Config.from_env()` makes it, `current()` holds it."""

    cache_dir: Path
    cache_dir_origin: str = "default"
    system_cache: tuple[Path, ...] = ()
    compile: str = "auto"
    fallback: str = ""  # "" = reference where nothing fits, raise where a build failed
    compiler: str = "any"
    prefer: str = ""
    verify: str = "always"
    fsync: bool = True
    jobs: int = 0  # 0 = from cores and free memory
    lock_timeout: float = 1800.0
    log: str = "warning"
    cuda_home: Path | None = None
    cc: str = "cc"
    cxx: str = "c++"
    visible_devices: str | None = None
    runtime_dir: Path | None = None
    color: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """The settings that `environ` (default: the process environment) asks for.

        Raises ValueError, naming the variable and what it accepts, for a value it cannot use.
        """
        env = os.environ if environ is None else environ
        home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
        runtime = env.get("XDG_RUNTIME_DIR")
        named = env.get("JITKERN_CACHE_DIR")
        return cls(
            cache_dir=Path(named).expanduser().absolute() if named else _default_cache_dir(),
            cache_dir_origin="JITKERN_CACHE_DIR" if named else "default",
            system_cache=tuple(
                Path(root).expanduser().absolute()
                for root in env.get("JITKERN_SYSTEM_CACHE", "").split(os.pathsep)
                if root
            ),
            compile=_choice(env, "JITKERN_COMPILE", "auto", ("auto", "never", "background")),
            fallback=_choice(env, "JITKERN_FALLBACK", "", ("reference", "raise")),
            compiler=_choice(env, "JITKERN_COMPILER", "any", ("any", "exact")),
            prefer=_choice(env, "JITKERN_PREFER", "", PREFERENCES[1:]),
            verify=_choice(env, "JITKERN_VERIFY", "always", ("always", "size")),
            fsync=_choice(env, "JITKERN_FSYNC", "1", ("1", "0")) == "1",
            jobs=_number(env, "JITKERN_JOBS", 0, int),
            lock_timeout=_number(env, "JITKERN_LOCK_TIMEOUT", 1800.0, float),
            log=_choice(env, "JITKERN_LOG", "warning", ("info", "debug")),
            cuda_home=Path(home) if home else None,
            cc=env.get("CC") or "cc",
            cxx=env.get("CXX") or "c++",
            visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
            runtime_dir=Path(runtime) if runtime else None,
            color=not env.get("NO_COLOR"),
            environment=dict(env),
        )

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


@contextlib.contextmanager
def using(**settings: object) -> Iterator[Config]:
    """Run a block under changed settings, e.g. `with using(compile="never"):`."""
    before = current()
    _put_in_force(replace(before, **settings))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _put_in_force(before)


def _put_in_force(settings: Config) -> None:
    global _current  # noqa: PLW0603
    _current = settings
    for listener in listeners:
        listener(settings)


def _default_cache_dir() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("jitkern", appauthor=False).absolute()


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
