"""The function of a C or C++ file that a variant means: its address, and hints if it is missing."""

from __future__ import annotations

import re

from jitkern.compilers.cpp import template_arguments
from jitkern.compilers.result import missing_function
from jitkern.errors import CompileError
from jitkern.source import cpp_text
from jitkern.source.closure import Closure
from jitkern.source.defining_file import elsewhere
from jitkern.source.dtypes import DTYPES, Constant
from jitkern.source.kinds import Cpp, Variant

_IN_C = {"true": "1", "false": "0", "bool": "_Bool"}
_NAMED = {f"jitkern_{code}": d.host for code, d in DTYPES.items() if " " in d.host}
TYPES = "".join(f"typedef {spelled} {name}; " for name, spelled in _NAMED.items())


def instantiated(variant: Variant, text: str, closure: Closure) -> tuple[str, dict[str, str]]:
    """The function's address, and the template arguments that are passed as macros.

    Arguments with the names of the template's parameters instantiate the template. Raises
    CompileError.
    """
    name, bracket, signature = variant.function.partition("(")
    arguments = dict(variant.template)
    lists = template_arguments.declared(variant, text, closure) if arguments else None
    order = template_arguments.ordered(variant, lists or [])
    if order:
        name += f"<{', '.join(_spelled(variant, n, arguments.pop(n)) for n in order)}>"
    macros = {
        parameter: _macro(variant, parameter, value) for parameter, value in arguments.items()
    }
    return f"static_cast<void (*)({signature}>(&{name})" if bracket else f"&{name}", macros


def hint(variant: Variant, text: str, output: str) -> str:
    """A hint for the errors that the compiler printed, or ""."""
    unresolved = re.search(r"undefined reference to [`'](.+?)'", output)
    if unresolved:
        return elsewhere(variant.source, unresolved.group(1))
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


def _spelled(variant: Variant, name: str, value: Constant) -> str:
    """A template argument in C++."""
    if spelled := template_arguments.spelled(value, "host"):
        return spelled
    raise CompileError(
        f"{variant.op}: {name}={value}: C++ on the CPU has no such type", op=variant.op
    )


def _macro(variant: Variant, name: str, value: Constant) -> str:
    """A template argument as a macro of one word, so that `T(x)` is an expression."""
    spelled = _spelled(variant, name, value)
    assert isinstance(variant.source, Cpp)
    if variant.source.is_c:
        spelled = _IN_C.get(spelled, spelled)
    return f"jitkern_{value}" if spelled in _NAMED.values() else spelled
