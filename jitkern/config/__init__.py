"""The settings of the user: read once, frozen, and validated whatever their origin.

Variables for compilers (CC, CXX, CPATH and the like) are read at the same time, and again at each
call of `load_inline` and `load`, as Torch does: see `renew`. Later builds of this process get the
renewed values.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jitkern._fork import after_fork
from jitkern._lazy import on_first_use
from jitkern.config.settings import (
    BUILD_VARIABLES,
    KINDS,
    SEARCHED,
    SETTINGS,
    TOOL_VARIABLES,
    Config,
    Setting,
    Snapshot,
    cuda_arch_list,
    present,
    tools_in,
)
from jitkern.config.values import duration_of, size_of
from jitkern.errors import meant, nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from jitkern.config import (
        background as background,
        file as file,
        settings as settings,
        values as values,
    )
    from jitkern.config.values import Settings
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "BUILD_VARIABLES",
    "KINDS",
    "SEARCHED",
    "SETTINGS",
    "Config",
    "Setting",
    "c_may_serve",
    "cuda_arch_list",
    "current",
    "duration_of",
    "follow_blocks",
    "preferred",
    "renew",
    "size_of",
    "unknown_variables",
    "using",
]  # fmt: skip

_current: Config | None = None  # the settings of the process
_using: contextvars.ContextVar[Config | None] = contextvars.ContextVar("jitkern", default=None)
_listeners: list[Callable[[], None]] = []
_lock = threading.Lock()
_blocks: list[int] = []  # the threads of blocks of `using` that C code must know of


def current() -> Config:
    """Return the settings in force here; the first call reads the environment."""
    return _using.get() or _current or _process_settings()


def _process_settings() -> Config:
    global _current  # noqa: PLW0603  the one process-wide value, set once
    if _current is None:
        _current = Config.from_env()
        _configure_log(_current.log)
        for name, meant_one in unknown_variables(_current.environment):
            if meant_one:
                says = "%s is not a setting and has no effect: did you mean %s?"
                logging.getLogger("jitkern").warning(says, name, meant_one)
    return _current


def unknown_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable that looks like a setting and is none, and the one it is most like."""
    known = {setting.variable for setting in SETTINGS}
    for name in sorted(environment):
        head, _, key = name.partition("_")
        if head == "JITKERN" and name not in known:
            near = nearest(key, (variable.removeprefix("JITKERN_") for variable in known))
            yield name, near and f"JITKERN_{near}"


def renew(also: Sequence[str] = ()) -> None:
    """Read the variables again that every build depends on, and the variables named in `also`.

    Settings, overrides by `using`, and variables that sources name stay as they are. Where no
    variable changed, `current()` returns the same object as before.
    """
    global _current  # noqa: PLW0603
    settings = current()
    before = settings.environment
    if not isinstance(before, Snapshot):
        return
    values = present(*BUILD_VARIABLES, *TOOL_VARIABLES, *also)
    if all(before.get(name) == value for name, value in values.items()):
        return
    after = Snapshot({k: v for k, v in {**before, **values}.items() if v is not None})
    old = tools_in(before)
    tools = {k: tool for k, tool in tools_in(after).items() if vars(settings)[k] == old[k]}
    renewed = settings.with_changes(**tools, environment=after)
    if _using.get():
        _using.set(renewed)
    else:
        _current = renewed


@contextlib.contextmanager
def using(**settings: Unpack[Settings]) -> Iterator[Config]:
    """Run a block under changed settings, e.g. `with using(compile="never"):`.

    The changed settings hold in this thread and context, and in background builds for its calls. A
    thread that other code starts, as Torch does for gradients on a GPU, has the settings of the
    process. A value is text, as in the environment, or has the type of the setting. Raises
    TypeError for an unknown name, and SettingError for an invalid value.
    """
    changes: dict[str, Any] = {**settings}
    before, outer = _using.get(), current()
    for name in changes.keys() - vars(outer).keys():
        raise TypeError(f"there is no setting {name}{meant(name, vars(outer))}")
    origins = {**outer.origins, **dict.fromkeys(changes, "using"), **changes.get("origins", {})}
    changed = outer.with_changes(**{**changes, "origins": origins})
    differs = _matters_to_c(changed) != _matters_to_c(_process_settings())
    thread = threading.get_ident()
    _using.set(changed)
    with _lock:
        _blocks.extend([thread] * differs)
        _tell()
    try:
        yield changed
    finally:
        _using.set(before)
        with _lock:
            if differs and thread in _blocks:
                _blocks.remove(thread)
            _tell()


def _matters_to_c(settings: Config) -> object:
    """Return what makes C code leave a call to Python, where it is not as for the process."""
    return settings.prefer, settings.record


def _tell() -> None:
    for listener in _listeners:
        listener()


def preferred() -> str:
    """Return the kind of source that the settings prefer, or "".

    Raises SettingError if there is no such kind. A variable or a file may name a kind that is
    declared after the settings are read, so this is asked when an op is called.
    """
    settings = current()
    settings.check_kind()
    return settings.prefer


def follow_blocks(listener: Callable[[], None]) -> None:
    """Call `listener` now, and whenever `c_may_serve` may return another answer."""
    with _lock:
        _listeners.append(listener)
        listener()


def c_may_serve() -> bool:
    """Return whether C, which knows no contexts, may serve the calls of this process.

    It may not while any block of any thread prefers another kind of source than the process does,
    or records calls.
    """
    return not _blocks


def _forget_blocks() -> None:
    """Forget the blocks of the parent's other threads, which a forked child does not have."""
    _blocks[:] = [thread for thread in _blocks if thread == threading.get_ident()]
    _tell()


after_fork(_lock, _forget_blocks)


class _Unhandled(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler of records that no handler of the program takes: lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        self.stream = sys.stderr  # which a program may replace
        super().emit(record)


_unhandled = _Unhandled(logging.WARNING)
_unhandled.setFormatter(logging.Formatter("jitkern: %(message)s"))
logging.getLogger("jitkern").addHandler(_unhandled)


def _configure_log(level: str) -> None:
    logger = logging.getLogger("jitkern")
    if level != "warning" and logger.handlers == [_unhandled]:
        logger.setLevel(level.upper())
        _unhandled.setLevel(level.upper())
