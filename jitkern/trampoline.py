"""The C functions that Torch calls for an op, and the Python that they ask where they cannot serve.

Torch's boxed kernels have no context, so each op takes slots in the launch runtime, one for each
device type and one for Autograd. They ask Python through sibling ops, one for each signature, whose
first argument is the slot. An exception goes back by value: the runtime raises it on its side of
Torch as a RuntimeError, and `cause_of` finds it again.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from jitkern.errors import JitkernError, LaunchError
from jitkern.launch.runtime import (
    AUTOGRAD,
    MAX_ARGUMENTS,
    MAX_RETURNS,
    MAX_TEXT,
    MUTATION,
    OPTIONALS,
    runtime,
)
from jitkern.launch.slot import Parameter

NAMESPACE = "jitkern_python"
T = TypeVar("T")
_KINDS = {
    "Tensor": "T", "int": "i", "SymInt": "i", "float": "f", "bool": "b",
    "Optional[Tensor]": "t", "Optional[int]": "I", "Optional[SymInt]": "I",
    "Optional[float]": "F", "Optional[bool]": "B",
}  # fmt: skip
_TYPES = {
    "T": "Tensor", "t": "Tensor?", "W": "Tensor", "w": "Tensor?", "i": "int", "I": "int?",
    "f": "float", "F": "float?", "b": "bool", "B": "bool?",
}  # fmt: skip
_answers: dict[int, Callable[[tuple[Any, ...]], Any]] = {}


class Trampolines:
    """Those of one op. `parameters` is None where its schema has types that they do not pass."""

    def __init__(self, name: str, schema: Any) -> None:
        self.name = name
        self.slots: dict[str, int] = {}  # by device
        self.parameters = _parameters(schema)
        self.returns = len(schema.returns)
        self._positional = sum(not argument.kwarg_only for argument in schema.arguments)
        self._symbolic = "SymInt" in str(schema)

    def register(self, device: str, answer: Callable[..., Any]) -> bool:
        """Make one Torch's kernel for a device type; `answer` is the Python it asks.

        False where there is no runtime, or it cannot serve this op: Python has to do.
        """
        slot = self._declare(device, answer, ())
        if slot is not None:
            self.slots[device] = slot
            self._runtime.register(slot, self.name, device.upper())
        return slot is not None

    def register_autograd(self, answer: Callable[..., Any]) -> bool:
        """The same for Autograd. The shim would make constants of symbolic integers: Python's."""
        slot = None if self._symbolic else self._declare("cpu", answer, AUTOGRAD)
        if slot is not None:
            self._runtime.backends(slot, self.slots)
            self._runtime.register(slot, self.name, "Autograd")
        return slot is not None

    def _declare(
        self, device: str, answer: Callable[..., Any], needed: tuple[str, ...]
    ) -> int | None:
        found = runtime()
        if not found or self.parameters is None:
            return None
        self._runtime = found
        kinds = "".join(parameter.kind for parameter in self.parameters)
        writes = MUTATION if "W" in kinds or "w" in kinds else ()
        optional = OPTIONALS if not set(kinds) <= set("TWifb") else ()
        if not found.provides(*needed, *writes, *optional):
            return None
        slot = found.declare(kinds, self.name, _sibling(kinds, self.returns), device)
        if slot < 0:
            return None
        _answers[slot] = self._by_value(answer)
        return slot

    def _by_value(self, answer: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
        assert self.parameters is not None
        split, found = self._positional, self._runtime
        names = [parameter.name for parameter in self.parameters[split:]]

        def ask(args: tuple[Any, ...]) -> Any:
            try:
                return answer(*args[:split], **dict(zip(names, args[split:])))
            except BaseException as e:  # noqa: BLE001  it is raised again on Torch's other side
                found.fail(_keep(cause_of(e) if type(e) is RuntimeError else e))
                empty = [torch.empty(0) for _ in range(self.returns)]
                return empty[0] if self.returns == 1 else tuple(empty)

        _askers.add(ask.__code__)
        return ask


class _Failure(threading.local):
    """The exception behind the RuntimeError that Torch is about to raise, and its text."""

    error: BaseException | None = None
    text = ""


_failure = _Failure()
_askers: set[types.CodeType] = set()  # whose frames ask `cause_of`


def wants_cause(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function that asks `cause_of` about a RuntimeError that it catches."""
    _askers.add(function.__code__)
    return function


def cause_of(error: RuntimeError) -> BaseException:
    """The exception that a trampoline turned into `error`, or `error` itself."""
    cause, _failure.error = _failure.error, None
    text = str(error)
    if cause is not None and text.startswith(_failure.text):
        return cause
    if re.match(r"CUDA error \d+ \(.*\) when launching ", text):
        return LaunchError(text, launched=1)
    return error


def _keep(error: BaseException) -> str:
    """Keep an exception for a caller that will ask, not to keep what it holds alive for none.

    Returns what C makes the message of: without a NUL, and not too long.
    """
    plain = type(error) is RuntimeError or isinstance(error, JitkernError)
    text = str(error) if plain else f"{type(error).__name__}: {error}"
    text = (text or type(error).__name__).replace("\0", "\\0")
    text = text.encode(errors="replace")[: MAX_TEXT - 1].decode(errors="ignore")
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in _askers:
        frame = frame.f_back
    if frame is not None:
        _failure.error, _failure.text = error, text
    return text


def _parameters(schema: Any) -> list[Parameter] | None:
    arguments, returns = schema.arguments, schema.returns
    if (
        len(arguments) > MAX_ARGUMENTS
        or len(returns) > MAX_RETURNS
        or any(str(value.type) != "Tensor" for value in returns)
        or len(schema.name) > 100
    ):
        return None
    parameters = []
    for argument in arguments:
        kind = _KINDS.get(str(argument.type))
        if kind is None:
            return None
        alias = argument.alias_info
        if alias and alias.is_write:
            kind = {"T": "W", "t": "w"}[kind]
        parameters.append(Parameter(argument.name, kind))
    return parameters


@functools.cache
def _sibling(kinds: str, returns: int) -> str:
    """The sibling op of this signature, defined by its first user."""
    name = f"ask_{kinds}_{returns}"
    given = "".join(f", {_TYPES[kind]} a{i}" for i, kind in enumerate(kinds))
    result = "Tensor" if returns == 1 else f"({', '.join(['Tensor'] * returns)})"
    _library().define(f"{name}(int op{given}) -> {result}")
    _library().impl(name, lambda op, *args: _answers[op](args), "CompositeImplicitAutograd")
    return f"{NAMESPACE}::{name}"


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "DEF")
