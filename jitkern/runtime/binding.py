"""The launch runtime in this process: `runtime.c`, bound to Torch by a table of addresses.

The runtime is compiled once per platform, cached like any artifact, and loaded at the first call of
an op. A process that finds no cached runtime fetches or builds one in the background, while calls
go through Python, and uses the runtime as soon as it is there.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import logging
import threading
from collections.abc import Sequence
from ctypes import Structure, c_char_p, c_int, c_longlong, c_ulonglong, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, jit, trace
from jitkern._fork import after_fork
from jitkern.errors import CompilerNotFound, JitkernError, LoadError, NotCached, TargetError
from jitkern.runtime import code_page
from jitkern.runtime.guards import Guards
from jitkern.runtime.symbols import symbols
from jitkern.runtime.trampoline import Slot, has_compiler, registry
from jitkern.source.kinds import Generated, Variant
from jitkern.trace.scope import Scope

if TYPE_CHECKING:
    from jitkern.launch.resources.workspaces import Block
    from jitkern.trace.program import Program

_REFUSED = (JitkernError, AttributeError, KeyError, OSError, ValueError)
OP = "jitkern::runtime"  # which the cache calls the entry of the runtime by
REMEDY = "apt-get install gcc (or set CC)"
_log = logging.getLogger(__name__)


def variant() -> Variant:
    """Return the variant from which the runtime is compiled."""
    text = trace.program.declarations() + _text("program.c") + _text("runtime.c")
    return Variant(OP, Generated("runtime.c", text=text))


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


class _Text(Structure):
    _fields_ = (("text", c_char_p), ("bytes", c_longlong))


class _Program(Structure):
    _fields_ = (
        ("words", c_void_p), ("constants", c_void_p), ("texts", c_void_p), ("parameters", c_void_p),
        ("length", c_int), ("fixed", c_int), ("text_count", c_int), ("kernels", c_int),
        ("registers", c_int), ("tensors", c_int), ("owned", c_int), ("memory", c_int),
        ("given", c_int), ("passes", c_int), ("room", c_int),
    )  # fmt: skip


def _in_c(program: Program, passed: Sequence[Sequence[str]]) -> _Program:
    """Return a program as C takes it. passed: the codes of what is passed to each kernel."""
    kinds = [[*map(trace.program.parameter_kind, codes), 0] for codes in passed]
    texts = [text.encode() for text in program.texts]
    arrays: tuple[ctypes.Array[Any], ...] = (
        (c_int * len(program.words))(*program.words),
        (c_ulonglong * len(program.constants))(*program.constants),
        (_Text * len(texts))(*[_Text(text, len(text)) for text in texts]),
        (c_int * sum(map(len, kinds)))(*itertools.chain(*kinds)),
    )
    addresses = [ctypes.addressof(array) for array in arrays]
    lengths = [*map(len, arrays[:3]), len(passed)]
    made = _Program(*addresses, *lengths, *program[3:])
    made.alive = arrays
    return made


class _LoadedProgram(Structure):
    _fields_ = (
        ("program", c_void_p), ("kernels", c_void_p), ("scope", c_void_p), ("index", c_int),
        ("generation", c_int), ("used", c_int),
    )  # fmt: skip


class Runtime:
    """The loaded runtime. Its functions are called under `lock` where they change a table."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if symbols().missing:
            raise LoadError(f"cannot load the runtime: this Torch has no `{symbols().missing}`")
        self.library = library
        self.lock = threading.Lock()
        after_fork(self.lock)
        self._guards = Guards(library)
        # By the slot: the objects that C holds pointers into, by their place, and those replaced
        # since the last two times that jitkern_quiet returned 1.
        self._held: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        self._replaced: dict[int, tuple[list[Any], list[Any]]] = {}
        library.jitkern_misses.restype = c_ulonglong
        self._bind()
        library.jitkern_autograd(*symbols().autograd())
        config.follow_blocks(self._follow)

    def lead(self, entry: c_void_p) -> None:
        """Make all trampolines, which jump to the address in `entry`, jump to C from now on."""
        self.library.jitkern_lead(ctypes.byref(entry))

    def declare(self, slot: Slot) -> None:
        """Declare a slot in C."""
        names = (text.encode() for text in (slot.kinds, slot.results, slot.name, slot.fallback))
        self.library.jitkern_declare(slot.number, *names, int(slot.cuda), int(slot.autograd))
        self.library.jitkern_backends(slot.number, *slot.backends)

    def append(
        self,
        slot: int,
        program: Program,
        kernels: Sequence[Any],
        device: torch.device,
        scope: Scope,
        instead: int = -1,
    ) -> int | None:
        """Add a program that serves `device` while `scope` holds.

        kernels: those that the program launches, loaded. instead: the place of the program that
        this one replaces, or -1. Returns its place, where it may replace another; None if C cannot
        check `scope`. Raises ValueError for a program that is not sound.
        """
        if device.type == "cuda" and not symbols().addresses["cuLaunchKernelEx"]:
            symbols().add_driver()
            self._bind()
        with self.lock:
            guard = self._guards.of(scope)
            if guard is None:
                return None
            table = (c_void_p * len(kernels))(*(kernel.address for kernel in kernels))
            in_c = _in_c(program, [kernel.passed for kernel in kernels])
            loaded = _LoadedProgram(
                ctypes.addressof(in_c), ctypes.addressof(table), ctypes.addressof(guard),
                device.index or 0,
            )  # fmt: skip
            place = int(self.library.jitkern_append(slot, ctypes.byref(loaded), instead))
            if place < 0:
                raise ValueError("a program is not sound")
            self._hold(slot, place, (in_c, table, loaded, kernels, guard))
            return place

    def _hold(self, slot: int, place: int, held: Any) -> None:
        """Keep what C uses, and let go what it has stopped to use."""
        before, earlier = self._replaced.get(slot, ([], []))
        before.append(self._held[slot].get(place))
        self._held[slot][place] = held
        if self.library.jitkern_quiet(slot):
            before, earlier = [], before
        self._replaced[slot] = before, earlier

    def share(self, block: Block) -> bool:
        """Register the workspace of a stream with C; returns whether it is new there."""
        address, size = c_void_p(block.memory.data_ptr()), c_longlong(block.memory.numel())
        with self.lock:
            found = self.library.jitkern_workspace(
                block.device, c_void_p(block.stream), int(block.zeroed), address, size
            )
        return bool(found)

    def forget(self, slot: int) -> None:
        """Stop all present programs of an op, whose launch function was declared again."""
        self.library.jitkern_forget(slot)

    def record(self, slot: int, recorder: int, gradient: int) -> None:
        """Set the C++ function that records a slot's calls; gradient: its handle, 0 for Python."""
        self.library.jitkern_record(slot, c_void_p(recorder), c_void_p(gradient))

    def misses(self, slot: int) -> int:
        """Return how many calls of an op went to Python."""
        return int(self.library.jitkern_misses(slot))

    def fail(self, message: str, *, interrupted: bool) -> None:
        """Make the trampoline that called Python raise a RuntimeError.

        interrupted: whether Python raises a KeyboardInterrupt as soon as it catches that error.
        """
        self.library.jitkern_fail(message.encode(), int(interrupted))

    def _bind(self) -> None:
        array = symbols().table()
        self.library.jitkern_bind(array, c_ulonglong(ctypes.sizeof(array)))

    def _follow(self) -> None:
        """Let C serve calls, or leave all to Python."""
        self.library.jitkern_to_python(int(not config.c_may_serve()))


class _RuntimeState:
    """The state of the runtime in this process."""

    runtime: Runtime | None = None
    looked_up = False  # in the cache
    building = False


_state = _RuntimeState()
_lock = threading.Lock()


def runtime() -> Runtime | None:
    """Return the runtime, or None if it is not loaded; the first call looks it up."""
    if not _state.looked_up:
        with _lock:
            if not _state.looked_up:
                _state.looked_up = True
                _take(may_compile=False)
    return _state.runtime


def say_why_not() -> None:
    """Log why no C code serves the calls of this process."""
    if not code_page.supported():
        _log.info("calls go through the Python launcher: C code serves calls on Linux only")
    elif config.current().compile == "never":
        _log.info("calls go through the Python launcher: the launch runtime is not cached")
    elif not has_compiler():
        announce(CompilerNotFound(f"no C compiler `{config.current().cc}` on PATH: {REMEDY}"))
    elif registry().pages is None:
        _log.warning(
            "calls go through the Python launcher: this system allows no executable memory"
        )


def prepare() -> None:
    """Load the runtime from the cache, or fetch or build it in the background, once."""
    settings = config.current()
    may_come = settings.compile != "never" or settings.remotes
    if runtime() is None and may_come and not _state.building:
        jit.current_call.text()  # for the copy of the context, which keeps no tensor
        _state.building = config.background.BUILDS.later(lambda: _take(may_compile=True))


def is_looked_up() -> bool:
    """Return whether a runtime was looked for in the cache."""
    return _state.looked_up


def adopt(library: ctypes.CDLL) -> None:
    """Use the runtime in a loaded library, unless one was looked up."""
    with _lock:
        if not _state.looked_up and code_page.supported():
            try:
                _use(library)
            except _REFUSED as e:
                _log.warning("%s is not a launch runtime: %s", library, e)
            else:
                _state.looked_up = True


def _use(library: ctypes.CDLL) -> None:
    """Bind the runtime of a loaded library, and point all trampolines at it."""
    _state.runtime = loaded = Runtime(library)
    registry().load(loaded)


def _take(*, may_compile: bool) -> None:
    """Load the runtime and bind it; log why that is not possible."""
    if not code_page.supported():
        return
    try:
        _use(jit.load.loaded_here(variant(), may_compile=may_compile))
    except (NotCached, TargetError) as e:
        _log.debug("calls go through the Python launcher: %s", e)
    except CompilerNotFound as e:
        announce(e)
    except _REFUSED as e:
        _log.warning("calls go through the Python launcher, which is slower: %s", e)


def announce(why: CompilerNotFound) -> None:
    """Log once per message that the runtime has no compiler."""
    message = f"calls go through the Python launcher, which is slower: {why}"
    if message not in _announced:
        _announced.add(message)
        _log.warning("%s", message)


_announced: set[str] = set()


def _forget_build() -> None:
    """Forget, in a forked child, the build of a thread of its parent."""
    _state.building = False


after_fork(_lock, _forget_build)
