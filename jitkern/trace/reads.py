"""What the code of a function reads besides its arguments, found in its bytecode.

A read names a global or a variable of the function around, and the attributes that are taken off it
at once: `torch.cuda.get_device_properties`. Whatever cannot be followed by names, or leaves a trace
in the world (an import, a rebound global, a class statement), is a refusal.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator

from jitkern.named_tuple import NamedTuple


class Read(NamedTuple):
    """A name that code reads, the attributes taken off it, and the line of the file."""

    name: str
    attributes: tuple[str, ...]
    line: int
    cell: bool  # of the function around rather than of the module


class Refusal(NamedTuple):
    """What code does that cannot be followed, and the line of the file."""

    what: str
    line: int


class Reads(NamedTuple):
    """What one function reads.

    attributes: all that its code takes off any value. changes: whether it sets or deletes items.
    compares: whether it may ask if two values are one object.
    """

    reads: tuple[Read, ...]
    attributes: frozenset[str]
    refusals: tuple[Refusal, ...]
    changes: bool
    compares: bool


_REFUSED = {
    "IMPORT_NAME": "it imports `{}`",
    "STORE_GLOBAL": "it sets the global `{}`",
    "DELETE_GLOBAL": "it deletes the global `{}`",
    "STORE_ATTR": "it sets the attribute `{}` of an object",
    "DELETE_ATTR": "it deletes the attribute `{}` of an object",
    "LOAD_BUILD_CLASS": "it defines a class",
    "LOAD_NAME": "it reads `{}` as a class body does",
    "MATCH_CLASS": "it matches a pattern of a class",
    "LOAD_SUPER_ATTR": "it calls super()",
}
_PLAIN_DUNDERS = frozenset(("__float__", "__index__", "__int__", "__len__", "__name__"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_OF_AROUND = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_CHANGING = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))
_PADDING = frozenset(("EXTENDED_ARG", "CACHE", "PRECALL", "PUSH_NULL"))


@functools.lru_cache(maxsize=1024)
def reads_of(code: types.CodeType) -> Reads:
    """What a function of this code reads, the functions that it defines inside included."""
    reads: list[Read] = []
    refusals: list[Refusal] = []
    attributes: set[str] = set()
    changes = compares = False
    for part, around in _parts(code, frozenset(code.co_freevars)):
        listed = [i for i in dis.get_instructions(part) if i.opname not in _PADDING]
        _scan(listed, part.co_firstlineno, around, reads, refusals, attributes)
        changes |= any(i.opname in _CHANGING for i in listed)
        compares |= _compares(listed)
    return Reads(tuple(reads), frozenset(attributes), tuple(refusals), changes, compares)


def _parts(
    code: types.CodeType, around: frozenset[str]
) -> Iterator[tuple[types.CodeType, frozenset[str]]]:
    """The code and what it holds, each with its variables that lie outside of all of it."""
    yield code, around
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            own = frozenset(code.co_cellvars)
            yield from _parts(constant, (around & frozenset(constant.co_freevars)) - own)


def _scan(
    listed: list[dis.Instruction],
    line: int,
    around: frozenset[str],
    reads: list[Read],
    refusals: list[Refusal],
    attributes: set[str],
) -> None:
    for at, instruction in enumerate(listed):
        name, value = instruction.opname, instruction.argval
        positions = getattr(instruction, "positions", None)  # before Python 3.11 there are none
        line = (positions.lineno if positions else instruction.starts_line) or line
        if name == "LOAD_GLOBAL" or (name in _OF_AROUND and value in around):
            chain = _attributes(listed, at + 1)
            reads.append(Read(value, chain, line, name != "LOAD_GLOBAL"))
        elif name in ("STORE_DEREF", "DELETE_DEREF") and value in around:
            refusals.append(Refusal(f"it sets `{value}` of the function around it", line))
        elif name in _REFUSED:
            refusals.append(Refusal(_REFUSED[name].format(value), line))
        elif name in _ATTRIBUTE:
            attributes.add(value)
            if value.startswith("__") and value not in _PLAIN_DUNDERS:
                refusals.append(Refusal(f"it reads `{value}` of an object", line))


def _compares(listed: list[dis.Instruction]) -> bool:
    """Whether the code asks if two values are one object, other than None."""
    return any(
        instruction.opname == "IS_OP" and (before.opname, before.argval) != ("LOAD_CONST", None)
        for before, instruction in itertools.pairwise(listed)
    )


def _attributes(listed: list[dis.Instruction], start: int) -> tuple[str, ...]:
    end = start
    while end < len(listed) and listed[end].opname in _ATTRIBUTE:
        end += 1
    return tuple(str(instruction.argval) for instruction in listed[start:end])
