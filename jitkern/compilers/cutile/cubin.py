"""The bytes of each parameter of a kernel, as its cubin tells them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTIONS = struct.Struct("<40xQ10x3H")  # of an ELF file: their place, size, count and names
_SECTION = struct.Struct("<I20x2Q")  # name, offset, size
_ATTRIBUTE = struct.Struct("<2BH")  # how its value is stored, number, value or size of the value
_SIZED = 4  # the value follows
_PARAMETER, _PARAMETER_2 = 0x17, 0x45  # EIATTR_KPARAM_INFO: its size in bits of a word, in a field


def parameter_sizes(cubin: bytes, symbol: str) -> tuple[int, ...]:
    """Return the bytes of each parameter. Raises ValueError where the cubin does not tell them."""
    sizes: dict[int, int] = {}
    try:
        info = next(data for name, data in _sections(cubin) if name == f".nv.info.{symbol}")
        for number, value in _attributes(info):
            if number in (_PARAMETER, _PARAMETER_2):
                _, ordinal, _, size, flags = struct.unpack("<I4H", value)
                sizes[ordinal] = flags >> 2 if number == _PARAMETER else size
    except (StopIteration, struct.error, ValueError) as e:
        raise ValueError(f"the cubin does not tell the parameters of `{symbol}`") from e
    return tuple(size for _, size in sorted(sizes.items()))


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    start, step, count, names_at = _SECTIONS.unpack_from(cubin)
    headers = [_SECTION.unpack_from(cubin, start + step * i) for i in range(count)]
    names = headers[names_at][1]
    for name, offset, size in headers:
        at = names + name
        yield cubin[at : cubin.index(b"\0", at)].decode(), cubin[offset : offset + size]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        stored, number, size = _ATTRIBUTE.unpack_from(info, at)
        at += _ATTRIBUTE.size
        if stored == _SIZED:
            yield number, info[at : at + size]
            at += size
