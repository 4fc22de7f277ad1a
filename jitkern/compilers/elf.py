"""What a 64-bit ELF library defines for others, read from its bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

_DYNSYM, _RELA = 11, 4


class Library(NamedTuple):
    """What a library exports, by name, with its address; and its pointers, by theirs.

    A pointer holds (symbol, address); the symbol is "" where the linker has settled the address.
    """

    symbols: dict[str, int]
    pointers: dict[int, tuple[str, int]]

    def pointee(self, name: str) -> str:
        """The exported symbol that the pointer `name` holds the address of, or ""."""
        symbol, address = self.pointers.get(self.symbols.get(name, -1), ("", -1))
        if symbol:
            return symbol if symbol in self.symbols else ""
        return next((s for s, value in self.symbols.items() if value == address), "")


def read(binary: bytes) -> Library:
    """The dynamic symbols of a library, and its relocated pointers."""
    (sections,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, sections + i * size) for i in range(count)]
    names: list[str] = []
    symbols: dict[str, int] = {}
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind == _DYNSYM:
            strings = headers[link][4]
            for at in range(offset, offset + length, 24):
                name, info, _, section, value = struct.unpack_from("<IBBHQ", binary, at)
                start = strings + name
                names.append(binary[start : binary.index(b"\0", start)].decode())
                if section and info >> 4:  # defined, and not local
                    symbols[names[-1]] = value
    pointers: dict[int, tuple[str, int]] = {}
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind == _RELA and link < len(headers) and headers[link][1] == _DYNSYM:
            for at in range(offset, offset + length, 24):
                place, info, addend = struct.unpack_from("<QQq", binary, at)
                pointers[place] = (names[info >> 32], addend)
    return Library(symbols, pointers)
