"""The names that a function's bytecode reads besides its arguments.

A read names a global or a variable of the enclosing function, and the attributes that the code
reads of it at once: `torch.cuda.get_device_properties`. Code that cannot be followed by names, or
that has an effect (an import, a rebound global, a class statement), is a refusal.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

from jitkern.named_tuple import NamedTuple


class Read(NamedTuple):
    """A name that code reads, the attributes taken off it, and the line of the file."""

    name: str
    attributes: tuple[str, ...]
    line: int
    cell: bool  # a variable of the enclosing function, not of the module
    tested: bool = False  # whether the code only asks what is in the value


class Refusal(NamedTuple):
    """A construct that cannot be followed, and the line of the file."""

    what: str
    line: int


class CodeNames(NamedTuple):
    """The names that one function reads.

    attributes: all that its code reads of any value. handlers: where the code may catch an error,
    which a trace may raise for other reasons. compares: where the code may ask if two values are
    one object. sets: whether the code makes a set for more than `in`, or a view for
    more than a loop.
    """

    reads: tuple[Read, ...]
    attributes: frozenset[str]
    refusals: tuple[Refusal, ...]
    handlers: tuple[Refusal, ...]
    compares: tuple[Refusal, ...]
    sets: bool


_REFUSED = {
    "IMPORT_NAME": "`import {}` cannot be traced",
    "STORE_GLOBAL": "setting the global `{}` cannot be traced",
    "DELETE_GLOBAL": "deleting the global `{}` cannot be traced",
    "STORE_ATTR": "setting the attribute `{}` cannot be traced",
    "DELETE_ATTR": "deleting the attribute `{}` cannot be traced",
    "LOAD_BUILD_CLASS": "a class statement cannot be traced",
    "LOAD_NAME": "`{}` in a class body cannot be traced",
    "MATCH_CLASS": "a class pattern of `match` cannot be traced",
    "MATCH_MAPPING": "a mapping pattern of `match` cannot be traced",
    "MATCH_SEQUENCE": "a sequence pattern of `match` cannot be traced",
    "LOAD_SUPER_ATTR": "super() cannot be traced",
}
_HANDLERS = frozenset((  # of `try` and `with` alone: from Python 3.11 on, and of Python 3.10
    "PUSH_EXC_INFO", "SETUP_ASYNC_WITH", "SETUP_FINALLY", "SETUP_WITH",
))  # fmt: skip
_PLAIN_DUNDERS = frozenset(("__float__", "__index__", "__int__", "__len__"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_OF_AROUND = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_OF_SETS = frozenset(("BUILD_SET", "SET_ADD"))
_VIEWS = frozenset(("items", "keys"))  # of a dict: operators make sets of these
_PADDING = frozenset(("EXTENDED_ARG", "CACHE", "PRECALL", "PUSH_NULL"))


@functools.lru_cache(maxsize=1024)
def code_names(code: types.CodeType) -> CodeNames:
    """Return the names that a function of this code reads, its inner functions included."""
    found: dict[str, list[Any]] = {field: [] for field in CodeNames._fields}
    for part, around in _parts(code, frozenset(code.co_freevars)):
        listed = [i for i in dis.get_instructions(part) if i.opname not in _PADDING]
        for field, value in _scan(listed, part.co_firstlineno, around):
            found[field].append(value)
    reads, attributes, refusals, handlers, compares, sets = map(tuple, found.values())
    names = frozenset(attributes)
    return CodeNames(reads, names, refusals, handlers, compares, bool(sets))


def _parts(
    code: types.CodeType, around: frozenset[str]
) -> Iterator[tuple[types.CodeType, frozenset[str]]]:
    """Yield the code and its inner functions, each with its variables from outside of the whole."""
    yield code, around
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            own = frozenset(code.co_cellvars)
            yield from _parts(constant, (around & frozenset(constant.co_freevars)) - own)


def _scan(
    listed: list[dis.Instruction], line: int, around: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """Yield what the instructions do, each with the field of CodeNames that lists it."""
    named = 0  # the last attribute that a read took off a name
    names = [*[instruction.opname for instruction in listed], "", ""]
    for at, instruction in enumerate(listed):
        name, value = instruction.opname, instruction.argval
        positions = getattr(instruction, "positions", None)  # before Python 3.11 there are none
        line = (positions.lineno if positions else instruction.starts_line) or line
        is_set = name in _OF_SETS or type(value) is frozenset
        is_view = name in _ATTRIBUTE and value in _VIEWS
        if (is_set and names[at + 1] != "CONTAINS_OP") or (
            is_view and not (names[at + 1].startswith("CALL") and names[at + 2] == "GET_ITER")
        ):
            yield "sets", True
        if name == "LOAD_GLOBAL" or (name in _OF_AROUND and value in around):
            named = at
            while names[named + 1] in _ATTRIBUTE and not listed[named + 1].is_jump_target:
                named += 1
            chain = tuple([str(taken.argval) for taken in listed[at + 1 : named + 1]])
            tested = names[named + 1] == "CONTAINS_OP"
            yield "reads", Read(value, chain, line, name != "LOAD_GLOBAL", tested)
        elif name in ("STORE_DEREF", "DELETE_DEREF") and value in around:
            yield "refusals", Refusal(f"setting the outer `{value}` cannot be traced", line)
        elif name in _REFUSED:
            yield "refusals", Refusal(_REFUSED[name].format(value), line)
        elif name == "IS_OP" and not _is_of_none(listed, at):
            yield "compares", Refusal("`is` cannot be traced beside a tensor of the module", line)
        elif name in _HANDLERS:
            yield "handlers", Refusal("`try` and `with` cannot be traced", line)
        elif name in _ATTRIBUTE:
            yield "attributes", value
            private = "__" if at <= named else "_"  # a stand-in has private attributes of its own
            if value.startswith(private) and value not in _PLAIN_DUNDERS:
                yield "refusals", Refusal(f"the attribute `{value}` cannot be traced", line)


def _is_of_none(listed: list[dis.Instruction], at: int) -> bool:
    """Whether an `is` asks for None.

    A jump to the question brings another value than the None that stands before it.
    """
    before = listed[at - 1]
    return not listed[at].is_jump_target and (before.opname, before.argval) == ("LOAD_CONST", None)
