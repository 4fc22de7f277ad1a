"""A Triton function as plain data for JSON, in records and between processes."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jitkern.errors import DeclarationError
from jitkern.source import triton_function
from jitkern.source.constants import NotConstant, decoded, encoded
from jitkern.source.triton_decorators import (
    BARE,
    TritonConfig,
    TritonFunction,
    UnsupportedDecorator,
    functions_of,
    inner,
    read,
)

if TYPE_CHECKING:
    from jitkern.source.kinds import Source

_DECLARATION = "# declared: "  # before the data of a function, in the last line of its text
_live: dict[str, Any] = {}  # functions by their texts


class Encoded(str):
    """A constexpr that is no plain value, as `constants.encoded` writes it."""

    __slots__ = ()


def data_of(function: TritonFunction, source: Source) -> dict[str, Any]:
    """Return a function as plain data for JSON. Raises NotConstant."""

    def pairs_of(pairs: Iterable[tuple[str, Any]]) -> list[list[Any]]:
        return [[name, encoded(value, source)] for name, value in pairs]

    made = {name: _plain(value) for name, value in function._asdict().items() if name != "facts"}
    made["defaults"], made["passed"] = pairs_of(function.defaults), pairs_of(function.passed)
    made["configs"] = [
        [pairs_of(config.constexprs), _plain(config.options)] for config in function.configs
    ]
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return [*map(_plain, value)] if isinstance(value, tuple) else value


def of_data(made: dict[str, Any], facts: tuple[tuple[str, Any], ...]) -> TritonFunction:
    """Return the function that `data_of` has written. Raises LookupError, TypeError, ValueError."""
    fields = {name: _tuples(value) for name, value in made.items()}
    for name in ("constexprs", "plain", "unaligned"):
        fields[name] = frozenset(fields[name])
    fields["defaults"], fields["passed"] = _decoded(made["defaults"]), _decoded(made["passed"])
    fields["configs"] = tuple(
        TritonConfig(_decoded(constexprs), _tuples(options))
        for constexprs, options in made["configs"]
    )
    return TritonFunction(**fields, facts=facts)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _decoded(pairs: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The pairs with plain values as they were, and others as `Encoded`."""

    def value_of(constant: Any) -> Any:
        others: list[Any] = []
        value = decoded(constant, others.append, lambda *words: others.append(words))
        return Encoded(constant) if others else value

    return tuple((name, value_of(constant)) for name, constant in pairs)


# ------------------------------------------------------------------ functions of this process


def source_of(function: Any) -> tuple[str, dict[str, Any]]:
    """Return the file of a function for `Triton`, and further arguments: the text if it is in none.

    Raises DeclarationError for a function without a source, or with globals that no statement can
    give to a module: others than modules, functions, classes of packages, numbers, strings, lists,
    tuples, dicts, and Triton's dtypes and constexprs.
    """
    plain = inner(function)
    if plain is function or not isinstance(plain, types.FunctionType):
        raise DeclarationError(f"{function!r} is not a `@triton.jit` function")
    if (name := triton_function.name_of(function)).endswith(BARE):
        raise DeclarationError(
            f"`{name}` is below decorators: pass what its module has by the name"
        )
    if triton_function.in_file(plain):
        triton_function.check(function, name)
        package = plain.__globals__.get("__package__") or ""
        return os.path.abspath(plain.__code__.co_filename), {"package": package}  # noqa: PTH100  as the code has it
    text, written_at = triton_function.text_of([function])
    path = f"{plain.__name__}.py"
    try:
        declared = read(function)
        cell: Any = types.SimpleNamespace(text=text)
        data = data_of(declared, cell)
    except (TypeError, UnsupportedDecorator, NotConstant) as e:
        raise DeclarationError(f"`{name}`: {e}") from e
    text += f"{_DECLARATION}{json.dumps(data, sort_keys=True)}\n"
    _hold(text, function)
    return path, {"text": text, "written_at": written_at}


def declaration_in(text: str) -> dict[str, Any] | None:
    """Return the data of the function that a text was written of; None for another text."""
    last = text.rstrip("\n").rpartition("\n")[2]
    if not last.startswith(_DECLARATION):
        return None
    data: dict[str, Any] = json.loads(last.removeprefix(_DECLARATION))
    return data


def live(text: str) -> Any:
    """Return the function of this process that a text was written of, or None."""
    return _live.get(text)


def _hold(text: str, function: Any) -> None:
    """Keep a function, whose decorators may have functions that the text has not.

    Raises DeclarationError if those of another function with this text read other values.
    """
    if text in _live and _values(_live[text]) != _values(function):
        raise DeclarationError(
            f"`{inner(function).__name__}` was made twice, and functions in its decorators read "
            "other variables each time: pass the values as constexprs, or put the kernel into a "
            "file"
        )
    _live[text] = function


def _values(function: Any) -> list[Any]:
    """The codes, and the variables around them, of the functions that decorators have."""
    heuristics, early, model, *_ = functions_of(function)
    given = [f for f in (*heuristics.values(), early, model) if isinstance(f, types.FunctionType)]
    cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in given]
    return [[f.__code__ for f in given], cells, [f.__defaults__ for f in given]]
