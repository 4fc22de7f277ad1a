"""The program of a trace while it is made: its steps, texts, memory and allocations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.launch.symbols import Facts, Instruction, Symbol, is_symbol, operand_of
from jitkern.source.dtypes import DTYPES, codes_of_torch
from jitkern.trace.program import COMPLEX, LINE

# Torch's numbers for dtypes.
DTYPE_CODES = {dtype: DTYPES[code].number for dtype, code in codes_of_torch().items()} | dict(
    zip((torch.complex32, torch.complex64, torch.complex128), COMPLEX)
)


class ProgramBuilder:
    """The program that all proxies of one trace add to.

    facts: its reads and guards. actions: its other steps, which follow them.
    owned: the sizes and strides of its allocations, by number. unchanged: the numbers of the
    tensors that the op does not declare to change.
    """

    def __init__(self, device: torch.device, line: Callable[[], int]) -> None:
        self.device = device
        self.facts = Facts(line)
        self.actions: list[Instruction] = []
        self.owned: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self.unchanged: set[int] = set()
        self.memory = 0  # words
        self.texts: dict[str, int] = {}

    def act(self, name: str, *operands: int) -> None:
        """Add a step that acts, after all earlier ones."""
        self.actions.append(self.facts.instruction(name, *operands))

    def text(self, text: str) -> int:
        """Return a text as an operand."""
        return self.texts.setdefault(text, len(self.texts))

    def reserve(self, words: int) -> int:
        """Return the place of new words in the memory of the program."""
        at = -(-self.memory // LINE) * LINE
        self.memory = at + words
        return at

    def symbol(self, register: int, hint: Any, what: str, *, natural: bool = False) -> Symbol:
        """Return a Symbol for a number that each call brings."""
        return Symbol(self.facts, register, hint, what, natural=natural)

    def operand(self, value: Any) -> int:
        """Return a number or Symbol as an operand."""
        return operand_of(value, self.facts)

    def operands(self, values: Sequence[Any]) -> list[int]:
        """Return numbers and Symbols as operands."""
        return [self.operand(value) for value in values]

    def default_dtype(self) -> torch.dtype:
        """Return the dtype that PyTorch takes where none is given, guarded."""
        default = torch.get_default_dtype()
        self.facts.guard("DEFAULT_DTYPE", DTYPE_CODES[default])
        return default


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these sizes and strides is contiguous, as Torch has it."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != expected:
            return 0 in sizes
        expected *= size
    return True


def dense_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of contiguous memory, for which Torch counts a size of 0 as 1."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (
            size.made(max(size.hint, 1), "MAX1", size.register) if is_symbol(size) else max(size, 1)
        )
    return tuple(reversed(strides))
