"""Which of the given arguments a function's template takes, in its order."""

from __future__ import annotations

from collections.abc import Sequence

from jitkern.errors import CompileError
from jitkern.source import cpp_text
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant

_TYPES = {  # what is read for the name of a parameter that has none
    "typename", "class", "auto", "bool", "char", "short", "int", "long", "signed", "unsigned",
    "size_t", "int32_t", "int64_t", "uint32_t", "uint64_t",
}  # fmt: skip


def declared(variant: Variant, text: str, closure: Closure) -> list[tuple[str, ...]] | None:
    """The template parameters of each declaration of the function, () where it is no template.

    The file comes before its headers. None: they do not declare it, as where a macro does, or a
    header of the compiler's. Arguments with numbers for names need no declaration.
    """
    numbers = [int(name) for name, _ in variant.template if name.isdecimal()]
    if numbers:
        return [tuple(map(str, range(max(numbers) + 1)))]
    headers = (cpp_text.read(path) for path in sorted(closure.paths))
    for texts in ([text], headers):
        functions = (f for t in texts for f in cpp_text.functions_in(t))
        found = cpp_text.named(functions, variant.function)
        exact = [f for f in found if f.name == cpp_text.plain_name(variant.function)]
        if found:
            return [f.template or () for f in exact or found]
    return None


def ordered(variant: Variant, lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of the given arguments that one of these templates has, in its order.

    Raises CompileError for arguments that C++ cannot be given so.
    """
    given = dict(variant.template)
    taken = {names: tuple(name for name in names if name in given) for names in lists}
    most = max(map(len, taken.values()), default=0)
    best = {names: order for names, order in taken.items() if len(order) == most}
    fitting = {order for names, order in best.items() if names[:most] == order}
    if len(fitting) == 1 or not most:
        return next(iter(fitting), ())
    what = f"{variant.op}: `{variant.function}` in {variant.source.paths[0]}"
    names, order = next(iter(best.items()))
    if fitting:
        raise CompileError(
            f"{what} is declared with `{'`, `'.join(map(', '.join, best))}`: which is meant "
            "cannot be told, so give the arguments by number: 0, 1, ...",
            op=variant.op,
        )
    place, missing = next(
        (i, name) for i, (name, other) in enumerate(zip(names, order)) if name != other
    )
    if missing.isdecimal():
        raise CompileError(
            f"{what} is given template argument {order[-1]} by number, and not {missing}: C++ "
            f"takes none without those before it, so give `{missing}` too",
            op=variant.op,
        )
    if missing in _TYPES:
        raise CompileError(
            f"{what} has no name for template parameter {place}, `{missing}`: give the arguments "
            "by number: 0, 1, ...",
            op=variant.op,
        )
    raise CompileError(
        f"{what} is a template of <{', '.join(names)}>: give `{missing}` too, C++ takes no "
        f"`{order[-1]}` without what stands before it",
        op=variant.op,
    )
