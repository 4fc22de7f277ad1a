"""The values of global names that a Triton function uses, and whether they follow from the key."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from jitkern.compilers.triton.own_modules import (
    INSTEAD,
    NeedsTorch,
    NotCovered,
    OwnModules,
    OwnText,
    Part,
    is_tritons,
    refusal,
)
from jitkern.source.global_names import code_names
from jitkern.source.triton_decorators import Unknown, inner, parts_of
from jitkern.source.triton_text import ANY_NAME, READING


class Origins:
    """The values of the names that functions use, by file and name, in `used`."""

    def __init__(self, modules: OwnModules) -> None:
        self._modules = modules
        self.used: dict[tuple[str, str], Any] = {}

    def follow(self, names: dict[str, Any], name: str) -> None:
        """Check a name of a module, and if it is a function, the names that it uses.

        Raises TypeError for a value that follows from data outside of the key, and NeedsTorch.
        """
        path = self._modules.path_of(names)
        if name.startswith("__") or (path, name) in self.used:
            return
        text = self._modules.texts.get(path)
        value = text.value(name) if text else names[name]
        if is_tritons(value):
            return
        try:
            if text:
                self.used[path, name] = value
                _check(text, name, value)
            elif error := refusal(f"{names['__name__']}.{name}", value, path or names["__name__"]):
                raise error
        except NotCovered as e:
            raise TypeError(e.told_of(name)) from None
        function = inner(value)
        if isinstance(function, FunctionType):
            for read in code_names(function.__code__).reads:
                self._follow_chain(function.__globals__, (read.name, *read.attributes))

    def _follow_chain(self, names: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Check a name, and of a module the attribute that is taken off it."""
        for name in chain:
            if name not in names:
                if name in READING | ANY_NAME and hasattr(builtins, name):
                    raise TypeError(NotCovered(name).told_of(name))
                return  # a builtin
            self.follow(names, name)
            value = names[name]
            try:
                module = value.real() if isinstance(value, Part) else value
            except NotCovered as e:
                raise TypeError(e.told_of(name)) from None
            if not isinstance(module, ModuleType):
                return
            names = vars(module)
            if text := self._modules.texts.get(self._modules.path_of(names)):
                text.run_once()


def _check(text: OwnText, name: str, value: Any) -> None:
    """Check that the statements of a text give a name this value, and from the key alone."""
    is_function = not isinstance(value, Unknown) and isinstance(inner(value), FunctionType)
    lost = None if is_function or isinstance(value, (ModuleType, Part)) else text.lost
    for error in (lost, *_errors_in(value, set())):
        if isinstance(error, (NotCovered, NeedsTorch, SyntaxError)):
            raise error
        if error:
            raise TypeError(
                f"the statements that give `{name}` of {text.path} its value cannot be run "
                f"by themselves: {type(error).__name__}: {error}: {INSTEAD}"
            )


def _errors_in(value: Any, seen: set[int]) -> Iterator[BaseException]:
    """Why parts of a value are unknown."""
    if isinstance(value, Unknown):
        yield value.why
    elif id(value) not in seen and not isinstance(value, (Part, ModuleType)):
        seen.add(id(value))
        for part in parts_of(inner(value)):
            yield from _errors_in(part, seen)
