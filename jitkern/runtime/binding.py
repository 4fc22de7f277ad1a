"""The launch runtime in this process: `runtime.c`, bound to Torch by a table of addresses.

It is compiled once per platform and cached like any artifact, and loaded at the first call of an
op. A process that starts before it exists builds it beside its first calls, which go through
Python, and uses it as soon as it is there.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import threading
from collections.abc import Callable
from ctypes import Structure, c_int, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import torch

from jitkern import config, jit
from jitkern.errors import CompilerNotFound, JitkernError, LoadError, NotCached, TargetError
from jitkern.runtime import builds, code_page
from jitkern.runtime.guards import Guards
from jitkern.runtime.registry import Declared, has_compiler, registry
from jitkern.runtime.symbols import symbols
from jitkern.source.kinds import Generated, Variant
from jitkern.target import Target
from jitkern.trace.shim import shim
from jitkern.trace.world import World

REMEDY = "apt-get install gcc (or set CC)"
_log = logging.getLogger(__name__)


def variant() -> Variant:
    """What the runtime is compiled from."""
    text = shim() + "\n" + Path(__file__).with_name("runtime.c").read_text(encoding="utf-8")
    return Variant("jitkern::runtime", Generated("runtime.c", text=text))


class _Variant(Structure):
    _fields_ = (
        ("stub", c_void_p), ("kernels", c_void_p), ("world", c_void_p), ("index", c_int),
        ("preference", c_int), ("generation", c_int), ("used", c_int),
    )  # fmt: skip


class Runtime:
    """The loaded runtime. Its functions are called under `lock` where they change a table."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if symbols().missing:
            raise LoadError(f"this Torch has no `{symbols().missing}`, which the runtime needs")
        self.library = library
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        self._guards = Guards(library)
        self._kept: list[Any] = []  # what C holds pointers into
        library.jitkern_misses.restype = c_ulonglong
        self.enter: int = ctypes.cast(library.jitkern_enter, c_void_p).value or 0
        self._bind()
        library.jitkern_autograd(*symbols().autograd())
        config.follow_preferences(self._follow)

    def declare(self, slot: Declared) -> None:
        """Make the slot known to C."""
        names = (text.encode() for text in (slot.kinds, slot.name, slot.sibling))
        self.library.jitkern_declare(slot.number, *names, int(slot.cuda), int(slot.autograd))
        self.library.jitkern_backends(slot.number, *slot.backends)

    def append(
        self,
        slot: int,
        stub: Any,
        kernels: list[int],
        device: torch.device,
        settings: config.Config,
        world: World,
    ) -> int | None:
        """Add a variant that serves `device` under these settings while `world` holds.

        Returns its place, which may have been another's; None where C cannot tell if `world` holds.
        """
        if device.type == "cuda" and not symbols().addresses["cuLaunchKernelEx"]:
            symbols().add_driver()
            self._bind()
        with self.lock:
            guard = self._guards.of(world)
            if guard is None:
                return None
            table = (c_void_p * max(1, len(kernels)))(*kernels)
            made = _Variant(
                ctypes.cast(stub.stub, c_void_p), ctypes.addressof(table), ctypes.addressof(guard),
                device.index or 0, config.PREFERENCES.index(settings.prefer),
            )  # fmt: skip
            self._kept += [stub, table, made]
            return int(self.library.jitkern_append(slot, ctypes.byref(made)))

    def forget(self, slot: int) -> None:
        """Let no variant of before serve any more: the op's launch function is another."""
        self.library.jitkern_forget(slot)

    def misses(self, slot: int) -> int:
        """How many calls of an op asked Python."""
        return int(self.library.jitkern_misses(slot))

    def fail(self, message: str, *, interrupted: bool) -> None:
        """Make the trampoline that called Python raise a RuntimeError.

        interrupted: have Python raise a KeyboardInterrupt as soon as it catches that error.
        """
        self.library.jitkern_fail(message.encode(), int(interrupted))

    def _after_fork(self) -> None:
        self.lock = threading.Lock()  # another thread of the parent may have held it

    def _bind(self) -> None:
        array = symbols().table()
        self.library.jitkern_bind(array, c_ulonglong(ctypes.sizeof(array)))

    def _follow(self) -> None:
        """Variants serve while the settings prefer the source that they were made under."""
        kinds = config.PREFERENCES
        everywhere, here = (
            -1 if kind is None else kinds.index(kind) for kind in config.preferences()
        )
        self.library.jitkern_prefer(everywhere, here)


class _State:
    """What this process has of the runtime."""

    runtime: Runtime | None = None
    asked = False  # of the cache
    building = False


_state = _State()
_lock = threading.Lock()
_waiting: collections.deque[Callable[[Runtime], None]] = collections.deque()


def runtime() -> Runtime | None:
    """The runtime, if it is there by now; the cache is asked for it at the first call of an op."""
    if not _state.asked:
        with _lock:
            if not _state.asked:
                _state.asked = True
                _take(may_compile=False)
    return _state.runtime


def say_why_not() -> None:
    """Say, once, why no C code serves the calls of this process."""
    if not code_page.supported():
        _log.info("calls go through the Python launcher: C code serves them on Linux alone")
    elif config.current().compile == "never":
        _log.info("calls go through the Python launcher: the launch runtime is not cached")
    elif not has_compiler():
        announce(CompilerNotFound(f"no C compiler `{config.current().cc}` on PATH: {REMEDY}"))
    elif registry().pages is None:
        _log.warning("calls go through the Python launcher: no memory may be made executable here")


def prepare() -> None:
    """Have the runtime of the cache, or have it built beside the calls, once."""
    if _state.building or runtime() or config.current().compile == "never":
        return
    _state.building = builds.RUNTIME.later(lambda: _take(may_compile=True))


def _take(*, may_compile: bool) -> None:
    """Load the runtime and let the ops use it."""
    if not code_page.supported():
        return
    try:
        found = jit.loaded(variant(), Target.current("cpu"), may_compile=may_compile)
        _state.runtime = loaded = Runtime(found)
        registry().load(loaded)
        _tell(loaded)
    except (NotCached, TargetError) as e:
        _log.debug("calls go through the Python launcher: %s", e)
    except CompilerNotFound as e:
        announce(e)
    except (JitkernError, AttributeError, KeyError, OSError, ValueError) as e:
        _log.warning("calls go through the Python launcher, which is slower: %s", e)


def when_loaded(use: Callable[[Runtime], None]) -> None:
    """Have this called with the runtime: now, or as soon as it is loaded."""
    _waiting.append(use)
    if _state.runtime:
        _tell(_state.runtime)


def _tell(loaded: Runtime) -> None:
    while _waiting:
        try:
            use = _waiting.popleft()
        except IndexError:  # another thread took the last one
            return
        use(loaded)


def announce(why: CompilerNotFound) -> None:
    """Say, once, that there is no compiler for stubs and the runtime."""
    message = f"calls go through the Python launcher, which is slower: {why}"
    if message not in _announced:
        _announced.add(message)
        _log.warning("%s", message)


_announced: set[str] = set()


def _after_fork() -> None:
    """A child has none of its parent's threads, which may have held the lock or been building."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _state.building = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
