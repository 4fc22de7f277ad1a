"""The ops of this process as C knows them, whether the launch runtime is loaded yet or not.

Each op at each dispatch key takes a slot: a number, a trampoline that stays registered with Torch,
and the Python function that answers calls which no compiled variant serves. Until the runtime is
loaded, trampolines lead to `_ask`, which calls the op's Python sibling, as the runtime's C does.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import threading
from collections.abc import Callable
from ctypes import c_uint64, c_void_p
from typing import Any

from jitkern import config
from jitkern._fork import after_fork
from jitkern.config import values
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import code_page
from jitkern.runtime.symbols import symbols

Answer = Callable[[tuple[Any, ...], bool], Any]  # takes arguments, and whether `_ask` asks
WITHOUT_RUNTIME = 1 << 32  # marks a slot's number if `_ask` asks


class Declared(NamedTuple):
    """A slot as `jitkern_declare` takes it. backends: of Autograd, slots on CPU and CUDA."""

    number: int
    kinds: str
    results: str
    name: str
    sibling: str
    cuda: bool
    autograd: bool
    backends: tuple[int, int] = (-1, -1)


class Registry:
    """The slots of this process, and the code pages of their trampolines."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.declared: list[Declared] = []
        self.runtime: Any = None
        self.answers: dict[int, Answer] = {}
        self.failure = threading.local()  # the text of an error that `_ask` is to return
        self._libraries: dict[tuple[str, str], c_void_p] = {}
        self._text = threading.local()
        self._torch = symbols().library("torch_cpu")
        delete = symbols().addresses["operator_delete"]
        self._delete = ctypes.CFUNCTYPE(None, c_void_p)(delete or 0)
        check = symbols().addresses["check"]
        self.pages = None if symbols().missing else code_page.made(self._ask, check or 0)
        after_fork(self.lock)

    def declare(
        self, kinds: str, results: str, name: str, sibling: str, key: str, answer: Answer,
        backends: tuple[int, int] = (-1, -1),
    ) -> int | None:  # fmt: skip
        """Register a slot for an op at a dispatch key with Torch, and return its number.

        Returns None if this system runs no trampolines, or if all are taken.
        """
        trampoline = self.pages.trampoline() if self.pages else None
        if trampoline is None:
            return None
        number, address = trampoline
        autograd, cuda = key == "Autograd", key == "CUDA"
        slot = Declared(number, kinds, results, name, sibling, cuda, autograd, backends)
        with self.lock:
            self.declared.append(slot)
            self.answers[number] = answer
            if self.runtime:
                self.runtime.declare(slot)
        self._register(name, key, address)
        return number

    def load(self, runtime: Any) -> None:
        """Make all trampolines jump to the launch runtime from now on."""
        with self.lock:
            for slot in self.declared:
                runtime.declare(slot)
            self.runtime = runtime
        if self.pages:
            runtime.lead(self.pages.entry)

    def answer(self, slot: int, args: tuple[Any, ...]) -> Any:
        """Return the result of a sibling op, computed by the Python function of the slot."""
        return self.answers[slot % WITHOUT_RUNTIME](args, slot >= WITHOUT_RUNTIME)

    def fail(self, text: str, *, by_python: bool, interrupted: bool) -> None:
        """Make the call that asked Python raise a RuntimeError with this text.

        interrupted: whether the error stands for a Ctrl-C that nobody else will raise. With
        `by_python` the Ctrl-C is lost: Python would raise it again before `_ask` has returned.
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

    def _ask(self, stack: int, taken: int, returned: int, number: int) -> int:
        """Do what `ask_python` of runtime.c does; returns the address of an error's text, or 0."""
        slot = self.declared[number]
        values = (c_uint64 * max(taken, returned, 1)).from_address(stack)
        passed = (c_uint64 * (1 + max(taken, returned)))(WITHOUT_RUNTIME | number, *values[:taken])
        strings = self._as_integers(slot.kinds, passed)
        self.failure.text = ""
        failed = self._torch.aoti_torch_call_dispatcher(slot.sibling.encode(), b"", passed)
        for string in strings:
            self._torch.torch_delete_string(string)
        text = self.failure.text or ("its Python sibling failed" if failed else "")
        results = [] if failed else passed[:returned]
        for i in [*range(len(results))] if "t" in slot.results else ():
            if slot.results[i] != "t":  # a sibling returns all results as ones that may be None
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
        """Replace strings by their handles, or 0, for a sibling; return these handles."""
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
