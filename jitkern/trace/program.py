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
from jitkern.source.dtypes import DTYPES, STREAM, TENSOR_MAP, table_of

if TYPE_CHECKING:
    from jitkern.launch.symbols import Instruction

# Of each instruction its operands. First the register that takes its value, by the kind of that:
# `N` an integer, `F` a float, `P` an address, `M` one in the memory of the program, `=` as the
# argument that is read. Then `n`, `f`, `p` a register of that kind (an address is an integer, too,
# and a constant an integer and a float), `b` one with a bool, `r` any register, `#` a constant, `i`
# a number, `d` a dtype. Among the arguments `a` is a number, `A` one that may be None, `l` a list
# or string, `L` a list of tensors, `v` one of numbers, `s` a string. `T` is a tensor among them or
# of a list, `t` one whose rank is known, `+` the next tensor of a list, `o` the next allocation;
# `h` a tensor (from 0 on) or an allocation (below 0), `H` one that may be changed, `O` an
# allocation that is no view of a tensor. `k` is a function of the CPU, `g` a kernel of a GPU, `x` a
# text, `m` a word of memory, `c` memory for a tensor map of a GPU. `*`: any number of those before.
INSTRUCTIONS = {
    # reads
    "NUMBER": "=a",  # an argument, as its 64 bits
    "OPTIONAL": "=A",  # one that may be None, and is not
    "SIZE": "Nti",
    "STRIDE": "Nti",
    "DATA": "Pt",
    "NUMEL": "Nt",
    "COUNT": "Nl",  # items of a list, bytes of a string; -1: None
    "ITEM": "=vi",
    "ATTRIBUTE": "Ni",  # of the device
    "WORKSPACE": "Pni",  # its address, from its bytes and whether it is zeroed
    "TABULATE": "m#ii#*",  # tables, from a chunk; whether dense; lists; see `Tracer.tabulate`
    "FIELD": "Nm",  # a word of a table
    "MEMORY": "Mm",  # the address of a word
    # guards, with the answer that they expect
    "GIVEN": "Ai",  # an argument is not None
    "TRUTH": "bi",  # the low byte of a register is 1
    "TENSOR": "Tdi",  # its dtype and rank, and the device of the call
    "NO_TENSOR": "T",
    "LISTED": "+Li",  # the tensor of a list at a place
    "IDENTICAL": "TTi",
    "CONTIGUOUS": "ti",
    "SPELLS": "sx",
    "DEFAULT_DTYPE": "d",
    "UNFILLED": "",  # Torch does not fill new memory
    "LESS": "nni",
    "EQUAL": "rri",  # of all bits
    "REAL_LESS": "ffi",
    "REAL_AT_MOST": "ffi",
    "REAL_EQUAL": "ffi",
    "MASKED": "nni",  # two numbers have a bit in common
    # arithmetic of integers and of floats
    **{
        name: shape
        for shape, names in (
            ("Nnn", "ADD SUBTRACT MULTIPLY DIVIDE MODULO SHIFT_LEFT SHIFT_RIGHT AND OR XOR"),
            ("Fff", "REAL_ADD REAL_SUBTRACT REAL_MULTIPLY QUOTIENT POWER"),
            ("Nn", "MAX1 BIT_LENGTH"), ("Fn", "REAL EXACT"), ("Ff", "ABS SQUARE_ROOT"),
            ("Nf", "FLOOR CEIL TRUNCATE"),
        )
        for name in names.split()
    },
    # actions
    "ADDRESS": "Ppn",  # an address and bytes after it
    "ALLOCATE": "Podn*",  # its address; dtype, sizes, strides
    "VIEW": "ohn*",  # sizes, strides, offset
    "COPY": "Hhi",
    "ZERO": "H",
    "CHANGED": "",  # an argument
    "TENSOR_MAP": "ciiiiipn*",  # options; address, sizes, strides, box
    "PASS": "ir",  # the next argument of a kernel, see WORD
    "CALL": "k",
    "LAUNCH": "gxnnnnnnnnnnnnn",  # grid, block, shared memory; cluster, options
    "RETURN": "iO",
    "RETURN_NONE": "i",
}  # fmt: skip
RESULTS, REGISTERS = "=NFPM", "nfpbr#"  # that take a value, that are read
CODES = {name: code for code, name in enumerate(INSTRUCTIONS)}
WORD, FLOAT, POINTED = range(3)  # an argument as it is, narrowed to a float, behind an address
COMPLEX = range(8, 11)  # Torch's numbers for complex dtypes, of which a launch passes views
IN_MEMORY = 256  # beyond each letter; see `parameter_kind`
LINE = 16  # words: the alignment of memory, and the size of a tensor map
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
    if {*map(type, (*words, *constants, *counts))} != {int}:
        raise ValueError("a program has whole numbers")
    if max(*words, *counts) >= 2**31 or min(*words, *counts) < -(2**31):
        raise ValueError("a program has words of 32 bits")
    return Program(tuple(words), tuple(constants), tuple(map(str, texts)), *counts)


@functools.cache
def declarations() -> str:
    """Return the C text that tells the runtime the instructions and their operands."""
    shapes = ", ".join(f'"{shape}"' for shape in INSTRUCTIONS.values())
    dtypes = sum(1 << number for number in (*(d.number for d in DTYPES.values()), *COMPLEX))
    return (
        f"enum {{ {', '.join(INSTRUCTIONS)}, INSTRUCTIONS }};\n"
        f"static const char *const SHAPES[] = {{{shapes}}};\n"
        f"enum {{ WORD = {WORD}, FLOAT = {FLOAT}, POINTED = {POINTED} }};\n"
        f"enum {{ LINE = {LINE}, TABLE = {TABLE}, IN_MEMORY = {IN_MEMORY} }};\n"
        f"static const unsigned long long DTYPES = {dtypes}; /* a bit for each */\n"
    )


def parameter_kind(code: str) -> int:
    """Return the kind that the register for a kernel's parameter of this code must have.

    That is a letter of INSTRUCTIONS (`F` for a float that is narrowed, `S` where the call passes
    its stream and device), or `IN_MEMORY` and the words of the memory that is passed by value.
    """
    if code == TENSOR_MAP:
        return IN_MEMORY + LINE
    if table := table_of(code):
        return IN_MEMORY + -(-table[2] // 8)
    letters = {"f32": "F", "f64": "f", "*": "p", "": "?", STREAM: "S"}
    return ord(letters.get(code, letters["*"] if code[:1] == "*" else "n"))


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
            numbers.setdefault(operand, len(numbers)) if kind in RESULTS + REGISTERS else operand
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
        if kind in "tTaAlLvs+":
            return names[operand] if operand < len(names) else f"item{operand - len(names)}"
        if kind in "hHO":
            return spelled("t", operand) if operand >= 0 else f"new{~operand}"
        if kind in REGISTERS and operand < 0:
            return _number(constants[~operand])
        marks = {RESULTS + REGISTERS: "%", "o": "new", "kg": "kernel", "mc": "memory+"}
        mark = next((mark for kinds, mark in marks.items() if kind in kinds), "")
        return repr(texts[operand]) if kind == "x" else f"{mark}{operand}"

    for step in steps:
        words = [spelled(*both) for both in operands_of(step)]
        value = f"{words.pop(0)} = " if INSTRUCTIONS[step.name][:1] in {*RESULTS} else ""
        yield f"{value}{step.name.lower()} {', '.join(words)}".rstrip(), step.line


def _number(bits: int) -> str:
    """Return the number that 64 bits probably are: a float would be a huge integer."""
    signed = bits - (1 << 64 if bits >> 63 else 0)
    (real,) = struct.unpack("<d", struct.pack("<Q", bits))
    return str(signed) if abs(signed) < 1 << 50 else repr(real)
