"""What a kernel takes of a GPU, as its cubin tells: registers, spills, memory, threads.

A cubin is an ELF file. NVIDIA's compilers put attributes into its sections `.nv.info` (of all
functions) and `.nv.info.<symbol>`: a format, a number, and a value of two bytes or of a size that
these two bytes tell. The numbers are those that `cuobjdump -elf` prints by name.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator

from jitkern.named_tuple import NamedTuple

_HEADER = struct.Struct("<40xQ10x3H")  # of an ELF file: where its sections are, their size, count
_SECTION = struct.Struct("<I20xQQI20x")  # of a section: name, offset, size, link
_SYMBOL = struct.Struct("<I20x")
_SIZED = 4  # EIFMT_SVAL
_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10  # EIATTR_MAX_THREADS, EIATTR_REQNTID
_FRAME_SIZE, _REGISTERS, _ANNOTATIONS = 0x11, 0x2F, 0x55  # EIATTR_FRAME_SIZE, …
_SPILL_OR_REFILL = 1  # an annotation, of the instruction at an offset
_RESERVED = 1024  # bytes of shared memory that the system takes in each block, from sm_90 on
_THREADS, _OF_A_WARP = 1024, 32  # threads: of a block, at most, and of a warp
_REGISTER_FILE = 65536  # registers that a block may have
_REGISTER_STEP = 256  # registers of which a warp gets a multiple
_log = logging.getLogger(__name__)


def resources(cubin: bytes, symbol: str) -> dict[str, int]:
    """Return what the kernel `symbol` takes, or {} if the cubin is of a form not known here.

    registers: of a thread. local: bytes of a thread in local memory, which lies in global memory:
    arrays with an index of run time, and registers that were spilled. spills: the instructions that
    spill a register or load it again (cubins of CUDA 12.9 and later tell). shared: bytes of static
    shared memory of a block. max_threads: of a block, as `__launch_bounds__` or the registers
    allow.
    """
    try:
        return _resources(cubin, symbol)
    except (struct.error, ValueError, LookupError) as e:
        _log.debug("the cubin of `%s` tells no resources: %s", symbol, e)
        return {}


def _resources(cubin: bytes, symbol: str) -> dict[str, int]:
    listed = _sections(cubin)
    sections = {section.name: section for section in listed}
    symbols = sections[".symtab"]
    names = listed[symbols.link].content
    wanted = {
        index
        for index, (name,) in enumerate(_SYMBOL.iter_unpack(symbols.content))
        if _text(names, name) == symbol
    }
    common = {}
    for attribute, value in _attributes(sections[".nv.info"].content):
        if attribute in (_REGISTERS, _FRAME_SIZE):
            index, number = struct.unpack("<II", value)
            if index in wanted:
                common[attribute] = number
    own = dict(_attributes(sections[f".nv.info.{symbol}"].content))
    declared = own.get(_MAX_THREADS) or own.get(_REQUIRED_THREADS)
    notes = struct.iter_unpack("<II", own.get(_ANNOTATIONS, b""))
    memory = sections.get(f".nv.shared.{symbol}")
    reserved = _RESERVED if ".nv.shared.reserved.0" in sections else 0
    return {
        "registers": common[_REGISTERS],
        "local": common.get(_FRAME_SIZE, 0),
        "spills": sum(kind == _SPILL_OR_REFILL for kind, _ in notes),
        "shared": max(memory.size - reserved, 0) if memory else 0,
        "max_threads": min(
            math.prod(struct.unpack("<III", declared)) if declared else _THREADS,
            threads_with(common[_REGISTERS]),
        ),
    }


class _Section(NamedTuple):
    """A section of an ELF file; the content of memory that begins as zeros is no part of it."""

    name: str
    content: bytes
    size: int
    link: int


def _sections(cubin: bytes) -> list[_Section]:
    """Return the sections of an ELF file in their order."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no ELF file of 64 bits")
    start, size, count, names = _HEADER.unpack_from(cubin)
    headers = [_SECTION.unpack_from(cubin, start + size * i) for i in range(count)]
    _, at, length, _ = headers[names]
    texts = cubin[at : at + length]
    return [
        _Section(_text(texts, name), cubin[at : at + length], length, link)
        for name, at, length, link in headers
    ]


def _text(texts: bytes, at: int) -> str:
    return texts[at : texts.index(b"\0", at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the value of each attribute of a section."""
    at = 0
    while at < len(info):
        form, number, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            yield number, info[at - 2 : at]
            continue
        yield number, info[at : at + value]
        at += value


def threads_with(registers: int) -> int:
    """Return how many threads of a block the registers of a GPU are enough for."""
    of_a_warp = -(-max(registers, 1) * _OF_A_WARP // _REGISTER_STEP) * _REGISTER_STEP
    return min(_THREADS, _REGISTER_FILE // of_a_warp * _OF_A_WARP)
