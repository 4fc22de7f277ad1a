"""The function of a variant in a C++ or CUDA file, and hints if it is missing.

Template arguments have names here, and are put into the order of the template's parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jitkern.compilers.cpp import parameter_types
from jitkern.compilers.result import at_function, missing_function
from jitkern.errors import CompileError
from jitkern.source import cpp_text
from jitkern.source.closure import Closure
from jitkern.source.defining_file import elsewhere
from jitkern.source.dtypes import DTYPES, Constant
from jitkern.source.kinds import Variant

_TYPES = {  # the word read as the name of a parameter that has no name
    "typename", "class", "auto", "bool", "char", "short", "int", "long", "signed", "unsigned",
    "size_t", "int32_t", "int64_t", "uint32_t", "uint64_t",
}  # fmt: skip
_BY_POSITION = 'pass template arguments by position: {"0": …}'
_NAMED = {f"jitkern_{code}": d.host for code, d in DTYPES.items() if " " in d.host}
TYPES = "".join(f"typedef {spelled} {name}; " for name, spelled in _NAMED.items())


def instantiated(variant: Variant, text: str, closure: Closure) -> tuple[str, dict[str, str]]:
    """The function's address, and the template arguments that are passed as macros.

    Arguments with the names of the template's parameters instantiate the template. Raises
    CompileError.
    """
    name, bracket, signature = variant.function.partition("(")
    arguments = dict(variant.template)
    lists = parameter_lists(variant, text, closure) if arguments else None
    order = ordered(variant, lists or [])
    if order:
        name += f"<{', '.join(_host_literal(variant, n, arguments.pop(n)) for n in order)}>"
    macros = {
        parameter: _macro(variant, parameter, value) for parameter, value in arguments.items()
    }
    return f"static_cast<void (*)({signature}>(&{name})" if bracket else f"&{name}", macros


def parameter_lists(variant: Variant, text: str, closure: Closure) -> list[tuple[str, ...]] | None:
    """The template parameters of each declaration of the function; () where it is not a template.

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
    if fitting:
        fit = "`, `".join(map(", ".join, best))
        raise _refusal(variant, f"has several declarations that fit, `{fit}`: {_BY_POSITION}")
    names, order = next(iter(best.items()))
    place = next(i for i, (name, other) in enumerate(zip(names, order)) if name != other)
    missing, last = names[place], order[-1]
    why = (
        f"is given template argument {last} by number, and not {missing}: C++ needs all arguments "
        f"before it, so give `{missing}` too" if missing.isdecimal()
        else f"has no name for template parameter {place}, `{missing}`: {_BY_POSITION}"
        if missing in _TYPES
        else f"is a template of <{', '.join(names)}>: give `{missing}` too, since C++ needs all "
        f"arguments before `{last}`"
    )  # fmt: skip
    raise _refusal(variant, why)


def _refusal(variant: Variant, why: str) -> CompileError:
    what = f"{variant.op}: `{variant.function}` in {variant.source.paths[0]}"
    return CompileError(f"{what} {why}", op=variant.op)


def cpp_literal(value: Constant, language: str) -> str:
    """A template argument in C++; "" for a type that the `language` (cuda, host) does not have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return getattr(DTYPES[value], language) if isinstance(value, str) else repr(value)


def hint(variant: Variant, text: str, output: str) -> str:
    """A hint for the errors that the compiler printed, or ""."""
    unresolved = re.search(r"undefined reference to [`'](.+?)'", output)
    if unresolved:
        return elsewhere(variant.source, unresolved.group(1))
    if parameter_types.NO_RESULT in output:
        return f"{at_function(variant)} is no kernel: {parameter_types.NO_RESULT}: write `void`"
    functions = cpp_text.functions_in(text)
    overloads = cpp_text.overloads(functions, variant.function)
    if overloads and "(" not in variant.function and "overloaded function" in output:
        return overloads
    return (
        missing_function(variant, (f for f in functions if f.defined))
        or _missing_half_header(text, output)
        or _missing_argument(variant, output)
    )


def _missing_argument(variant: Variant, output: str) -> str:
    """A hint for an undeclared name that looks like a template argument, or ""."""
    undeclared = re.findall(r"\W(\w+)\W (?:was not|has not been) declared", output)
    undeclared += re.findall(r"unknown type name \W(\w+)\W", output)
    names = [name for name in undeclared if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)]
    if not names:
        return ""
    passed = ", ".join(f"{name}={value}" for name, value in variant.template) or "none"
    return (
        f"`{names[0]}` is not declared: if it is a template argument, pass it in the launch, as in "
        f'k.{variant.function}[{{"{names[0]}": ...}}](...); this launch passed: {passed}'
    )


def _missing_half_header(text: str, output: str) -> str:
    """A hint for a 16-bit type without its header, or ""."""
    unknown = re.search(r"error: .*?\b(b?float16)\b(?!\.)", output)
    if not unknown or "float16.h" in text:
        return ""
    return f'`{unknown[1]}` comes from a header of jitkern, for C++: #include "float16.h"'


def _host_literal(variant: Variant, name: str, value: Constant) -> str:
    """A template argument in C++."""
    if text := cpp_literal(value, "host"):
        return text
    raise CompileError(
        f"{variant.op}: {name}={value}: C++ on the CPU has no such type", op=variant.op
    )


def _macro(variant: Variant, name: str, value: Constant) -> str:
    """A template argument as a macro of one word, so that `T(x)` is an expression."""
    spelled = _host_literal(variant, name, value)
    return f"jitkern_{value}" if spelled in _NAMED.values() else spelled
