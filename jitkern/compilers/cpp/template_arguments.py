"""The template arguments of a function, in the order of its template's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from jitkern.errors import CompileError
from jitkern.source import cpp_text
from jitkern.source.closure import Closure
from jitkern.source.dtypes import DTYPES, Constant
from jitkern.source.kinds import Variant

_TYPES = {  # the word read as the name of a parameter that has no name
    "typename", "class", "auto", "bool", "char", "short", "int", "long", "signed", "unsigned",
    "size_t", "int32_t", "int64_t", "uint32_t", "uint64_t",
}  # fmt: skip


def declared(variant: Variant, text: str, closure: Closure) -> list[tuple[str, ...]] | None:
    """The template parameters of each declaration of the function; () where it is no template.

    The file comes before its headers. None if they do not declare it, for example because a macro
    or a header of the compiler does. Arguments with numbers for names need no declaration.
    """
    numbers = [int(name) for name, _ in variant.template if name.isdecimal()]
    if numbers:
        return [tuple(map(str, range(max(numbers) + 1)))]
    headers = (cpp_text.read(path) for path in sorted(closure.paths))
    for texts in ([text], headers):
        functions = (f for t in texts for f in cpp_text.functions_in(t))
        matches = cpp_text.named(functions, variant.function)
        exact = [f for f in matches if f.name == cpp_text.plain_name(variant.function)]
        if matches:
            return [f.template or () for f in exact or matches]
    return None


def ordered(variant: Variant, lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of the variant's arguments that one of these templates has, in its order.

    Raises CompileError for arguments that C++ cannot take together.
    """
    arguments = dict(variant.template)
    orders = {names: tuple(name for name in names if name in arguments) for names in lists}
    most = max(map(len, orders.values()), default=0)
    best = {names: order for names, order in orders.items() if len(order) == most}
    fitting = {order for names, order in best.items() if names[:most] == order}
    if len(fitting) == 1 or not most:
        return next(iter(fitting), ())
    what = f"{variant.op}: `{variant.function}` in {variant.source.paths[0]}"
    names, order = next(iter(best.items()))
    if fitting:
        raise CompileError(
            f"{what} has several declarations that fit, `{'`, `'.join(map(', '.join, best))}`: "
            'pass template arguments by position: {"0": …}',
            op=variant.op,
        )
    place, missing = next(
        (i, name) for i, (name, other) in enumerate(zip(names, order)) if name != other
    )
    if missing.isdecimal():
        raise CompileError(
            f"{what} is given template argument {order[-1]} by number, and not {missing}: C++ "
            f"needs all arguments before it, so give `{missing}` too",
            op=variant.op,
        )
    if missing in _TYPES:
        raise CompileError(
            f"{what} has no name for template parameter {place}, `{missing}`: pass template "
            'arguments by position: {"0": …}',
            op=variant.op,
        )
    raise CompileError(
        f"{what} is a template of <{', '.join(names)}>: give `{missing}` too, since C++ "
        f"needs all arguments before `{order[-1]}`",
        op=variant.op,
    )


def spelled(value: Constant, language: str) -> str:
    """A template argument in C++; "" for a type that the `language` (cuda, host) does not have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return getattr(DTYPES[value], language) if isinstance(value, str) else repr(value)
