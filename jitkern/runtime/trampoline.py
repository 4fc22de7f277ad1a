"""The C functions that Torch calls for an op, and the Python functions for their misses.

Torch's boxed kernels have no context, so each op takes slots in the launch runtime, one for each
device type and one for Autograd: a number, a trampoline that stays registered with Torch, and the
Python function for calls which no program serves. Until the runtime is loaded, trampolines
lead to `Registry._call_python`, which does what the runtime's C does.

C calls Python through fallback ops, one for each signature, whose first argument is the slot. An
exception goes back by value: the runtime raises it on its side of Torch as a RuntimeError, and
`cause_of` finds the exception again.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import sys
import threading
import types
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_size_t, c_uint64, c_void_p
from typing import Any, TypeVar

import torch

from jitkern import config, files
from jitkern._fork import after_fork
from jitkern.cache import VERSION
from jitkern.calls.signature import Signature
from jitkern.config import values
from jitkern.errors import JitkernError, LaunchError
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import code_page
from jitkern.runtime.symbols import AUTOGRAD, LISTS, MUTATION, OPTIONALS, symbols

Fallback = Callable[[tuple[Any, ...], bool], Any]  # takes arguments, and whether Python calls
WITHOUT_RUNTIME = 1 << 32  # marks a slot's number if Python calls: `_call_python`
NAMESPACE = "jitkern_python"
MAX_TEXT = 4096  # the same as in runtime.c
T = TypeVar("T")
_TYPES = {
    "T": "Tensor", "t": "Tensor?", "W": "Tensor", "w": "Tensor?", "i": "int", "I": "int?",
    "f": "float", "F": "float?", "b": "bool", "B": "bool?",
    "s": "int", "S": "int",  # the handle of a string, or 0
    "L": "Tensor[]", "V": "Tensor[]", "n": "int[]", "N": "int[]?", "d": "float[]", "D": "float[]?",
    "z": "bool[]", "Z": "bool[]?",
}  # fmt: skip


class Slot(NamedTuple):
    """A slot as `jitkern_declare` takes it. backends: of Autograd, slots on CPU and CUDA."""

    number: int
    kinds: str
    results: str
    name: str
    fallback: str
    cuda: bool
    autograd: bool
    backends: tuple[int, int] = (-1, -1)


class Registry:
    """The slots of this process, and the code pages of their trampolines."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slots: list[Slot] = []
        self.runtime: Any = None
        self.fallbacks: dict[int, Fallback] = {}
        self.failure = threading.local()  # the text of an error that `_call_python` is to return
        self._libraries: dict[tuple[str, str], c_void_p] = {}
        self._text = threading.local()
        self._torch = symbols().library("torch_cpu")
        delete = symbols().addresses["operator_delete"]
        self._delete = ctypes.CFUNCTYPE(None, c_void_p)(delete or 0)
        check = symbols().addresses["check"]
        self.pages = None if symbols().missing else code_page.made(self._call_python, check or 0)
        after_fork(self.lock)

    def add(self, slot: Slot, fallback: Fallback, key: str, address: int) -> None:
        """Register the trampoline at an address with Torch, for an op at a dispatch key."""
        with self.lock:
            self.slots.append(slot)
            self.fallbacks[slot.number] = fallback
            if self.runtime:
                self.runtime.declare(slot)
        self._register(slot.name, key, address)

    def load(self, runtime: Any) -> None:
        """Make all trampolines jump to the launch runtime from now on."""
        with self.lock:
            for slot in self.slots:
                runtime.declare(slot)
            self.runtime = runtime
        if self.pages:
            runtime.lead(self.pages.entry)

    def call(self, slot: int, args: tuple[Any, ...]) -> Any:
        """Return the result of a fallback op, computed by the Python function of the slot."""
        return self.fallbacks[slot % WITHOUT_RUNTIME](args, slot >= WITHOUT_RUNTIME)

    def fail(self, text: str, *, by_python: bool, interrupted: bool) -> None:
        """Make the present call raise a RuntimeError with this text.

        interrupted: whether the error stands for a Ctrl-C that nobody else will raise. With
        `by_python` it is lost: Python would raise it again before `_call_python` has returned.
        """
        if by_python:
            self.failure.text = text
        else:
            self.runtime.fail(text, interrupted=interrupted)

    def _register(self, name: str, key: str, address: int) -> None:
        namespace, _, plain = name.partition("::")
        library = self._libraries.get((namespace, key))
        if library is None:
            library = self._libraries[namespace, key] = c_void_p()
            if self._torch.aoti_torch_library_init_impl(
                namespace.encode(), key.encode(), b"jitkern", 0, ctypes.byref(library)
            ):
                raise RuntimeError(f"cannot register {name}: Torch made no library at {key}")
        version = symbols().abi_version
        if self._torch.torch_library_impl(library, plain.encode(), c_void_p(address), version):
            raise RuntimeError(f"cannot register {name}: Torch took no kernel at {key}")

    def _call_python(self, stack: int, taken: int, returned: int, number: int) -> int:
        """Call the fallback op, as runtime.c does; returns the address of an error's text, or 0."""
        slot = self.slots[number]
        values = (c_uint64 * max(taken, returned, 1)).from_address(stack)
        passed = (c_uint64 * (1 + max(taken, returned)))(WITHOUT_RUNTIME | number, *values[:taken])
        strings = self._as_integers(slot.kinds, passed)
        self.failure.text = ""
        failed = self._torch.aoti_torch_call_dispatcher(slot.fallback.encode(), b"", passed)
        for string in strings:
            self._torch.torch_delete_string(string)
        text = self.failure.text or ("its Python fallback failed" if failed else "")
        results = [] if failed else passed[:returned]
        for i in [*range(len(results))] if "t" in slot.results else ():
            if slot.results[i] != "t":  # a fallback op returns all results as ones that may be None
                box, results[i] = results[i], c_uint64.from_address(results[i]).value
                self._delete(c_void_p(box))
        if not text:
            values[:returned] = results  # type: ignore[assignment]
            return 0
        self.failure.text = ""
        for handle in filter(None, results):  # 0: None
            self._torch.aoti_torch_delete_tensor_object(c_void_p(handle))
        self._text.kept = ctypes.create_string_buffer(text.encode())
        return ctypes.addressof(self._text.kept)

    def _as_integers(self, kinds: str, passed: Any) -> list[c_void_p]:
        """Replace strings by their handles, or 0, for a fallback op; return these handles."""
        strings = []
        for i, kind in enumerate(kinds, 1) if {*kinds} & {*"sS"} else ():
            if kind == "S" and passed[i]:
                box, passed[i] = passed[i], c_uint64.from_address(passed[i]).value
                self._delete(c_void_p(box))
            if kind in "sS" and passed[i]:
                strings.append(c_void_p(passed[i]))
        return strings


def has_compiler() -> bool:
    """Whether the C compiler of the settings is on the path."""
    settings = config.current()
    return _is_on_path(settings.cc, settings.environment.get("PATH"))


@functools.lru_cache(maxsize=16)
def _is_on_path(command: str, path: str | None) -> bool:
    return shutil.which(values.words_of(command)[0], path=path) is not None


@functools.cache
def registry() -> Registry:
    """Return the registry of this process."""
    return Registry()


def register(
    signature: Signature, key: str, fallback: Callable[..., Any],
    backends: tuple[int, int] = (-1, -1),
) -> int | None:  # fmt: skip
    """Register a trampoline as Torch's kernel for an op at a dispatch key; return its slot.

    fallback: the Python function that C calls on a miss. backends: of Autograd, see `Slot`. Returns
    None if this system runs no trampolines, if all are taken, or if C cannot serve this op: then
    Python must be registered.
    """
    if signature.parameters is None or not expected():
        return None
    kinds, results = "".join([p.kind for p in signature.parameters]), signature.results
    needed = [
        *(AUTOGRAD if key == "Autograd" else ()),
        *(MUTATION if {*kinds} & {*"WwV"} else ()),
        *(OPTIONALS if {*kinds, *results} & {*"twIFBSNDZ"} else ()),
        *(LISTS if {*kinds} & {*"LVndzsNDZS"} else ()),
    ]
    pages = registry().pages
    if pages is None or not symbols().provides(*needed) or not (made := pages.trampoline()):
        return None
    number, address = made
    slot = Slot(
        number, kinds, results, signature.name, _fallback_op(kinds, results), key == "CUDA",
        key == "Autograd", backends,
    )  # fmt: skip
    registry().add(slot, _by_value(signature, fallback), key, address)
    return number


def _by_value(signature: Signature, fallback: Callable[..., Any]) -> Fallback:
    """Return a function for a fallback op that gives errors by value."""
    settled = handled(fallback)
    strings = [i for i, p in enumerate(signature.parameters or ()) if p.kind in "sS"]

    def by_value(args: tuple[Any, ...], by_python: bool) -> Any:  # noqa: FBT001
        try:
            if strings:
                args = _with_strings(args, strings)
            positional, by_name = signature.split(args)
            return _whole(signature, settled(*positional, **by_name))
        except BaseException as e:  # noqa: BLE001  C raises it again on its side of Torch
            text, interrupted = _keep(cause_of(e) if type(e) is RuntimeError else e)
            registry().fail(text, by_python=by_python, interrupted=interrupted)
            empty = [None if r == "t" else torch.empty(0) for r in signature.results]
            return empty[0] if len(empty) == 1 else tuple(empty)

    _cause_readers.add(by_value.__code__)
    return by_value


def expected() -> bool:
    """Whether C code may at some time serve the calls of this process."""
    if not code_page.supported() or registry().pages is None:
        return False
    settings = config.current()
    compiles = settings.compile != "never" and has_compiler()
    return bool(settings.remotes) or compiles or _may_be_cached()


@functools.cache
def _may_be_cached() -> bool:
    """Whether a layer of the cache has a folder named like an entry of the launch runtime."""
    layers = files.trust.layers(config.current())
    return any(any((layer.root / VERSION).glob("*/runtime-*")) for layer in layers)


def _with_strings(args: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """Return the arguments with the strings of the handles at these places."""
    text, length, torch_cpu = c_char_p(), c_size_t(), symbols().library("torch_cpu")
    filled = [*args]
    for place in places:
        handle, filled[place] = c_void_p(filled[place]), None
        if handle:
            torch_cpu.torch_string_c_str(handle, ctypes.byref(text))
            torch_cpu.torch_string_length(handle, ctypes.byref(length))
            filled[place] = ctypes.string_at(text, length.value).decode()
    return tuple(filled)


def _whole(signature: Signature, result: Any) -> Any:
    """Return the result. Raises LaunchError for a None that C would take for a tensor."""
    if "t" in signature.results:
        results = result if isinstance(result, (tuple, list)) else (result,)
        for name, kind, value in zip(signature.outputs, signature.results, results):
            if value is None and kind != "t":
                raise LaunchError(
                    f"{signature.name} returned None for its result `{name}`: return a tensor, or "
                    "write `Tensor?` in the schema"
                )
    return result


class _Failure(threading.local):
    """The exception behind the RuntimeError that Torch is about to raise, and its text."""

    kept: tuple[BaseException | None, str] = None, ""


_failure = _Failure()
_STACK = "\nException raised from "  # what Torch appends to a message on demand
_cause_readers: set[types.CodeType] = set()  # code of the functions that call `cause_of`


def wants_cause(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function that calls `cause_of` for each RuntimeError that it catches."""
    _cause_readers.add(function.__code__)
    return function


def handled(function: Callable[..., T]) -> Callable[..., T]:
    """Return `function`, wrapped so that errors it has handled are not kept for `cause_of`."""

    def call(*args: Any, **kwargs: Any) -> T:
        before = _failure.kept
        result = function(*args, **kwargs)
        if _failure.kept is not before:
            _failure.kept = before
        return result

    return call


def cause_of(error: RuntimeError) -> BaseException:
    """Return the exception that a trampoline turned into `error`, or `error` itself."""
    (cause, kept_text), _failure.kept = _failure.kept, (None, "")
    text = str(error)
    if cause is not None and text.partition(_STACK)[0] == kept_text.partition(_STACK)[0]:
        return cause
    if re.match(r"CUDA error \d+ \(.*\) when launching ", text):
        return LaunchError(text, launched=1)
    return error


def _keep(error: BaseException) -> tuple[str, bool]:
    """Keep the exception only if a caller will need it, because it keeps its frames alive.

    Returns the text of C's message, without a NUL and not too long; and whether the exception is a
    Ctrl-C that no caller will raise again.
    """
    plain = type(error) is RuntimeError or isinstance(error, JitkernError)
    text = str(error) if plain else f"{type(error).__name__}: {error}"
    text = (text or type(error).__name__).replace("\0", "\\0")
    text = text.encode(errors="replace")[: MAX_TEXT - 1].decode(errors="ignore")
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in _cause_readers:
        frame = frame.f_back
    if frame is not None:
        _failure.kept = error, text
    return text, frame is None and isinstance(error, KeyboardInterrupt)


@functools.cache
def _fallback_op(kinds: str, results: str) -> str:
    """Return the name of the fallback op of this signature; the first user defines it."""
    name = f"call_{kinds}_{results}"
    arguments = "".join(f", {_TYPES[kind]} a{i}" for i, kind in enumerate(kinds))
    # Torch 2.13 mixes up the types of several results, so they are of one type.
    kind = "Tensor?" if "t" in results else "Tensor"
    returned = ", ".join(kind for _ in results)
    _library().define(f"{name}(int op{arguments}) -> ({returned})")
    # Library.impl would first search for kernels that nobody can have registered here.
    _library().m.impl(  # type: ignore[union-attr]
        name, "CompositeImplicitAutograd", lambda op, *args: registry().call(op, args), False
    )
    return f"{NAMESPACE}::{name}"


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "DEF")
