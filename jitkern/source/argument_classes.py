"""The class of a tensor that a kernel is compiled for, as text in a variant's signature.

`*bf16:16:16,1:8,=1` is a matrix of bfloat16. Its address is a multiple of 16 bytes, its first size
one of 16, its first stride one of 8 elements, and its last stride is 1. A divisor of 1 says
nothing. Numbers have the classes `bool`, `int` and `float`.
"""

from __future__ import annotations

from jitkern.named_tuple import NamedTuple

ALIGNMENT = 16  # bytes of addresses and strides, and elements of sizes
ONE, ZERO = "=1", "=0"  # strides that are compiled in


class TensorClass(NamedTuple):
    """The properties of a tensor that are compiled in, of sizes and strides their divisors.

    dtype: a code of `dtypes`. alignment: of the address, in bytes. A stride may be ONE or ZERO.
    """

    dtype: str
    alignment: int
    sizes: tuple[int, ...]
    strides: tuple[str, ...]

    @property
    def text(self) -> str:
        """The class as a signature has it."""
        sizes = ",".join(map(str, self.sizes))
        return f"*{self.dtype}:{self.alignment}:{sizes}:{','.join(self.strides)}"

    @classmethod
    def parse(cls, text: str) -> TensorClass:
        """Return the class of a text that `text` gave."""
        dtype, alignment, sizes, strides = text[1:].split(":")
        divisors = tuple(map(int, filter(None, sizes.split(","))))
        return cls(dtype, int(alignment), divisors, tuple(filter(None, strides.split(","))))


def words_of(argument: str) -> int:
    """Return how many parameters an argument of this class takes: address, sizes and strides."""
    return 1 + 2 * len(TensorClass.parse(argument).sizes) if argument[:1] == "*" else 1
