"""Programs: what a trace gives, as data that the launch runtime reads, checks and interprets.

A program is a list of steps over numbered registers of 64 bits, of which the first ones hold its
constants. Steps that read and guard come first; those that allocate and launch follow. There are no
jumps: a guard that fails, or arithmetic that Python would do otherwise, ends a call as a miss.
`program.c` has the meaning of each instruction, below the declarations that are made here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.named_tuple import NamedTuple

if TYPE_CHECKING:
    from jitkern.launch.symbols import Instruction

# Of each instruction its operands: `=` the register that takes its value, `r` a register, `#` a
# constant, `i` a number, `a` a number among the arguments, `l` a list or string among them, `T` a
# tensor among them or of a list, `t` one whose rank is known, `+` the next tensor of a list,
# `o` the next allocation, `h` a tensor (from 0 on) or an allocation (below 0), `k` a kernel,
# `x` a text, `m` a word of memory. `*`: any number of those before it.
INSTRUCTIONS = {
    # reads
    "NUMBER": "=a",  # an argument, as its 64 bits
    "OPTIONAL": "=a",  # one that may be None, and is not
    "SIZE": "=ti",
    "STRIDE": "=ti",
    "DATA": "=t",
    "NUMEL": "=t",
    "COUNT": "=l",  # items of a list, bytes of a string; -1: None
    "ITEM": "=li",
    "ATTRIBUTE": "=i",  # of the device
    "WORKSPACE": "=ri",  # its address, from its bytes and whether it is zeroed
    "TABULATE": "m#ii#*",  # tables, from a chunk; whether dense; lists; see `Tracer.tabulate`
    "FIELD": "=m",  # a word of memory
    "MEMORY": "=m",  # the address of one
    # guards, with the answer that they expect
    "GIVEN": "ai",  # an argument is not None
    "TRUTH": "ri",  # the low byte of a register is 1
    "TENSOR": "Tii",  # its dtype and rank, and the device of the call
    "NO_TENSOR": "T",
    "LISTED": "+li",  # the tensor of a list at a place
    "IDENTICAL": "TTi",
    "CONTIGUOUS": "ti",
    "SPELLS": "lx",
    "DEFAULT_DTYPE": "i",
    "UNFILLED": "",  # Torch does not fill new memory
    "LESS": "rri",
    "EQUAL": "rri",
    "REAL_LESS": "rri",
    "REAL_AT_MOST": "rri",
    "REAL_EQUAL": "rri",
    "MASKED": "rri",  # two numbers have a bit in common
    # arithmetic of integers and of floats
    **dict.fromkeys(
        (
            "ADD", "SUBTRACT", "MULTIPLY", "DIVIDE", "MODULO", "SHIFT_LEFT", "SHIFT_RIGHT", "AND",
            "OR", "XOR", "REAL_ADD", "REAL_SUBTRACT", "REAL_MULTIPLY", "QUOTIENT", "POWER",
        ),
        "=rr",
    ),
    **dict.fromkeys(
        (
            "MAX1", "BIT_LENGTH", "REAL", "EXACT", "ABS", "SQUARE_ROOT", "FLOOR", "CEIL",
            "TRUNCATE",
        ),
        "=r",
    ),
    # actions
    "ADDRESS": "=rr",  # an address and bytes after it
    "ALLOCATE": "=oir*",  # its address; dtype, sizes, strides
    "VIEW": "ohr*",  # sizes, strides, offset
    "COPY": "hhi",
    "ZERO": "h",
    "CHANGED": "",  # an argument
    "TENSOR_MAP": "miiiiirr*",  # options; address, sizes, strides, box
    "PASS": "ir",  # the next argument of a kernel, see WORD
    "CALL": "k",
    "LAUNCH": "kxrrrrrrrrrrrrr",  # grid, block, shared memory; cluster, options
    "RETURN": "ih",
    "RETURN_NONE": "i",
}  # fmt: skip
CODES = {name: code for code, name in enumerate(INSTRUCTIONS)}
WORD, FLOAT, POINTED = range(3)  # an argument as it is, narrowed to a float, behind an address
LINE = 16  # words: the alignment of memory, for tensor maps
TABLE = 13  # words of a `Table` in program.c


class Program(NamedTuple):
    """A program as plain data, for the runtime and for the cache.

    words: of each step its code, the number of its operands, and these. constants: the first
    registers, as unsigned integers. texts: names and strings. registers, tensors, owned, memory:
    the numbers of registers, of tensors of lists, of allocations, and of words of memory.
    """

    words: tuple[int, ...]
    constants: tuple[int, ...]
    texts: tuple[str, ...]
    registers: int
    tensors: int
    owned: int
    memory: int


def parsed_program(content: Any) -> Program:
    """Return the program that JSON gave as lists. Raises TypeError and ValueError."""
    words, constants, texts, *counts = content
    if not all(type(n) is int for n in (*words, *constants, *counts)):
        raise ValueError("a program has whole numbers")
    if not all(-(2**31) <= n < 2**31 for n in (*words, *counts)):
        raise ValueError("a program has words of 32 bits")
    return Program(tuple(words), tuple(constants), tuple(map(str, texts)), *counts)


@functools.cache
def declarations() -> str:
    """Return the C text that tells the runtime the instructions and their operands."""
    shapes = ", ".join(f'"{shape}"' for shape in INSTRUCTIONS.values())
    return (
        f"enum {{ {', '.join(INSTRUCTIONS)}, INSTRUCTIONS }};\n"
        f"static const char *const SHAPES[] = {{{shapes}}};\n"
        f"enum {{ WORD = {WORD}, FLOAT = {FLOAT}, POINTED = {POINTED} }};\n"
        f"enum {{ LINE = {LINE}, TABLE = {TABLE} }};\n"
    )


def operands_of(step: Instruction) -> Iterator[tuple[str, int]]:
    """Yield each operand of a step with its kind."""
    shape = INSTRUCTIONS[step.name]
    kind = ""
    for at, operand in enumerate(step.operands):
        kind = shape[at] if at < len(shape) and shape[at] != "*" else kind
        yield kind, operand


def encoded(
    steps: Sequence[Instruction], constants: Sequence[int], texts: Sequence[str], memory: int
) -> Program:
    """Return the program of these steps, with renumbered registers."""
    numbers = {~place: place for place in range(len(constants))}
    words: list[int] = []
    for step in steps:
        new = [
            numbers.setdefault(operand, len(numbers)) if kind in "=r#" else operand
            for kind, operand in operands_of(step)
        ]
        words += (CODES[step.name], len(new), *new)
    listed = sum(step.name == "LISTED" for step in steps)
    owned = sum(step.name in ("ALLOCATE", "VIEW") for step in steps)
    return Program(
        tuple(words), tuple(constants), tuple(texts), len(numbers), listed, owned, memory
    )


def listing(
    steps: Sequence[Instruction], constants: Sequence[int], texts: Sequence[str],
    names: Sequence[str],
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Yield each step as text, with its line. names: of the arguments."""

    def spelled(kind: str, operand: int) -> str:
        if kind in "tTal+":
            return names[operand] if operand < len(names) else f"item{operand - len(names)}"
        if kind == "h":
            return spelled("t", operand) if operand >= 0 else f"new{~operand}"
        if kind in "r#" and operand < 0:
            return _number(constants[~operand])
        marks = {"=": "%", "r": "%", "o": "new", "k": "kernel", "m": "memory+"}
        return repr(texts[operand]) if kind == "x" else f"{marks.get(kind, '')}{operand}"

    for step in steps:
        words = [spelled(*both) for both in operands_of(step)]
        value = f"{words.pop(0)} = " if INSTRUCTIONS[step.name].startswith("=") else ""
        yield f"{value}{step.name.lower()} {', '.join(words)}".rstrip(), step.line


def _number(bits: int) -> str:
    """Return the number that 64 bits probably are: a float would be a huge integer."""
    signed = bits - (1 << 64 if bits >> 63 else 0)
    (real,) = struct.unpack("<d", struct.pack("<Q", bits))
    return str(signed) if abs(signed) < 1 << 50 else repr(real)
