"""The C functions that Torch calls for an op, and the Python functions that they ask on a miss.

Torch's boxed kernels have no context, so each op takes slots in the launch runtime, one for each
device type and one for Autograd. C asks Python through sibling ops, one for each signature, whose
first argument is the slot. An exception goes back by value: the runtime raises it on its side of
Torch as a RuntimeError, and `cause_of` finds the exception again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_size_t, c_void_p
from typing import Any, TypeVar

import torch

from jitkern import config, runtime
from jitkern.cache import VERSION
from jitkern.calls.signature import Signature
from jitkern.errors import JitkernError, LaunchError
from jitkern.runtime import code_page
from jitkern.runtime.registry import has_compiler, registry
from jitkern.runtime.symbols import AUTOGRAD, LISTS, MUTATION, OPTIONALS, symbols

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


class Trampolines:
    """The trampolines of one op."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.slots: dict[str, int] = {}  # by device

    def register(self, device: str, answer: Callable[..., Any]) -> int | None:
        """Register a trampoline as Torch's kernel for a device type, and return its slot.

        answer: the Python function that C asks on a miss. Returns None if this system has no
        trampolines, or if C cannot serve this op: then Python must be registered.
        """
        slot = self._declare(device.upper(), answer, ())
        if slot is not None:
            self.slots[device] = slot
        return slot

    def register_autograd(self, answer: Callable[..., Any]) -> int | None:
        """Register a trampoline for Autograd; see `register`."""
        return self._declare("Autograd", answer, AUTOGRAD)

    def _declare(self, key: str, answer: Callable[..., Any], needed: tuple[str, ...]) -> int | None:
        signature = self.signature
        if signature.parameters is None or not expected():
            return None
        kinds = "".join(parameter.kind for parameter in signature.parameters)
        writes = MUTATION if set(kinds) & set("WwV") else ()
        optional = OPTIONALS if set(kinds + signature.results) & set("twIFBSNDZ") else ()
        lists = LISTS if set(kinds) & set("LVndzsNDZS") else ()
        if not symbols().provides(*needed, *writes, *optional, *lists):
            return None
        sibling = _sibling(kinds, signature.results)
        return registry().declare(
            kinds, signature.results, signature.name, sibling, key, self._by_value(answer),
            (self.slots.get("cpu", -1), self.slots.get("cuda", -1)),
        )  # fmt: skip

    def _by_value(self, answer: Callable[..., Any]) -> Callable[[tuple[Any, ...], bool], Any]:
        signature, settled = self.signature, handled(answer)
        strings = [i for i, p in enumerate(signature.parameters or ()) if p.kind in "sS"]

        def ask(args: tuple[Any, ...], by_python: bool) -> Any:  # noqa: FBT001
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

        _askers.add(ask.__code__)
        return ask


def expected() -> bool:
    """Whether C code may at some time serve the calls of this process."""
    if not code_page.supported() or registry().pages is None:
        return False
    settings = config.current()
    if settings.remotes or (settings.compile != "never" and has_compiler()):
        return True
    if _may_be_cached():
        return True
    return runtime.binding.runtime() is not None


@functools.cache
def _may_be_cached() -> bool:
    """Whether a root of the cache has a folder named like an entry of the launch runtime."""
    settings = config.current()
    for root in (settings.cache_dir, *settings.system_cache):
        for target in _names_in(f"{root}/{VERSION}"):
            if any(name.startswith("runtime-") for name in _names_in(f"{root}/{VERSION}/{target}")):
                return True
    return False


def _names_in(folder: str) -> list[str]:
    """Return the names in a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


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
_askers: set[types.CodeType] = set()  # code of the functions that call `cause_of`


def wants_cause(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function that calls `cause_of` for each RuntimeError that it catches."""
    _askers.add(function.__code__)
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
    """Keep the exception only if some caller will ask for it; else its frames stay alive in vain.

    Returns the text of C's message, without a NUL and not too long; and whether the exception is a
    Ctrl-C that no caller will raise again.
    """
    plain = type(error) is RuntimeError or isinstance(error, JitkernError)
    text = str(error) if plain else f"{type(error).__name__}: {error}"
    text = (text or type(error).__name__).replace("\0", "\\0")
    text = text.encode(errors="replace")[: MAX_TEXT - 1].decode(errors="ignore")
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in _askers:
        frame = frame.f_back
    if frame is not None:
        _failure.kept = error, text
    return text, frame is None and isinstance(error, KeyboardInterrupt)


@functools.cache
def _sibling(kinds: str, results: str) -> str:
    """Return the name of the sibling op of this signature; the first user defines it."""
    name = f"ask_{kinds}_{results}"
    arguments = "".join(f", {_TYPES[kind]} a{i}" for i, kind in enumerate(kinds))
    # Torch 2.13 mixes up the types of several results, so they are of one type.
    kind = "Tensor?" if "t" in results else "Tensor"
    returned = ", ".join(kind for _ in results)
    _library().define(f"{name}(int op{arguments}) -> ({returned})")
    # Library.impl would first search for kernels that nobody can have registered here.
    _library().m.impl(  # type: ignore[union-attr]
        name, "CompositeImplicitAutograd", lambda op, *args: registry().answer(op, args), False
    )
    return f"{NAMESPACE}::{name}"


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "DEF")
