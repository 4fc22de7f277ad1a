"""What a cubin says of its kernel: the block that it requires, and the bytes of its parameters."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTIONS = struct.Struct("<40xQ10x3H")  # of an ELF file: their place, size, count and names
_SECTION = struct.Struct("<I20x2Q")  # name, offset, size
_ATTRIBUTE = struct.Struct("<2BH")  # how its value is stored, number, value or size of the value
_SIZED = 4  # the value follows
_BLOCK, _CLUSTER = 0x10, 0x3D  # EIATTR_REQNTID, EIATTR_CTA_PER_CLUSTER
_PARAMETER, _PARAMETER_2 = 0x17, 0x45  # EIATTR_KPARAM_INFO: its size in bits of a word, in a field
_Numbers = tuple[int, ...]


def facts_of(cubin: bytes, symbol: str) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return sizes of a kernel's block and cluster, and the bytes of its parameters, in order.

    Raises ValueError where the cubin does not tell them.
    """
    try:
        info = next(data for name, data in _sections(cubin) if name == f".nv.info.{symbol}")
        sizes = {_BLOCK: (0, 0, 0), _CLUSTER: (1, 1, 1)}
        parameters: dict[int, int] = {}
        for number, value in _attributes(info):
            if number in sizes:
                sizes[number] = struct.unpack("<3I", value)
            elif number in (_PARAMETER, _PARAMETER_2):
                _, ordinal, _, size, flags = struct.unpack("<I4H", value)
                parameters[ordinal] = flags >> 2 if number == _PARAMETER else size
    except (StopIteration, struct.error, ValueError) as e:
        raise ValueError(f"the cubin has no facts of `{symbol}` that jitkern can read") from e
    ordered = tuple(size for _, size in sorted(parameters.items()))
    return sizes[_BLOCK], sizes[_CLUSTER], ordered


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
