"""Trampolines: the C functions registered with Torch for ops, made without a compiler.

Torch's boxed kernels get no context, so each op needs a function of its own; and a registration
must not be replaced, so this function must exist before the launch runtime is loaded. A
*trampoline* is a few bytes of machine code: it puts its number into the register of a fourth
argument, and jumps to the address in `entry`. This address is `call_python` at first;
loading the runtime replaces it by `jitkern_enter`. The runtime stores it with release order, and
trampolines load it with acquire order: a thread that jumps to the runtime finds its tables filled.

The code lies in a memory file that is mapped to be read and executed, never written and executed.
If the system forbids such a mapping there is no page, and ops are registered as Python functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable
from ctypes import c_size_t, c_uint32, c_uint64, c_void_p

from jitkern import target
from jitkern._fork import after_fork

SIZE = 16  # bytes of a trampoline
PAGE = 4096  # bytes of code that are made at once
HEAD = 256  # bytes before the first trampoline of a page
LIMIT = 8192  # OPS in runtime.c
CallPython = Callable[[int, int, int, int], int]
_PageCode = tuple[bytes, int, Callable[[int, range], list[bytes]]]
_CALL_PYTHON = ctypes.CFUNCTYPE(c_size_t, c_size_t, c_uint64, c_uint64, c_uint32)
_NAME = ctypes.create_string_buffer(b"jitkern")


def _x86_64(entry: int, call_python: int, check: int) -> _PageCode:
    """Return a page's head, the offset of `call_python` in it, and a maker of trampolines.

    The maker takes the number of the first one, and the places of all.
    """
    name = ctypes.addressof(_NAME)
    jump = b"\x48\xb8" + struct.pack("<Q", entry) + b"\xff\x20"  # mov rax, entry; jmp [rax]
    call = (
        b"\x48\x83\xec\x08"  # sub rsp, 8
         b"\x48\xb8" + struct.pack("<Q", call_python)  # mov rax, call_python
        + b"\xff\xd0"  # call rax
        + b"\x48\x83\xc4\x08"  # add rsp, 8
        + b"\x48\x85\xc0\x75\x01\xc3"  # test rax, rax; jne 1f; ret; 1:
        + b"\x31\xff"  # xor edi, edi: the condition, which is false
        + b"\x48\xbe" + struct.pack("<Q", name)  # mov rsi, name
        + b"\x48\xba" + struct.pack("<Q", name)  # mov rdx, name
        + b"\x31\xc9\x49\x89\xc0"  # xor ecx, ecx; mov r8, rax: the text
        + b"\x48\xb8" + struct.pack("<Q", check) + b"\xff\xe0"  # mov rax, check; jmp rax
    )  # fmt: skip
    begin = 16
    head = jump.ljust(begin, b"\xcc") + call

    def trampolines(first: int, places: range) -> list[bytes]:
        pack = struct.Struct("<BIBi6x").pack  # mov ecx, number; jmp to the head
        return [pack(0xB9, n, 0xE9, -(place + 10)) for n, place in enumerate(places, first)]

    return head, begin, trampolines


def _aarch64(entry: int, call_python: int, check: int) -> _PageCode:
    """Return the same as _x86_64 for aarch64."""
    name = ctypes.addressof(_NAME)

    def load(register: int, words: int) -> int:  # ldr x<register> from `words` further on
        return 0x58000000 | words << 5 | register

    jump = struct.pack(
        "<4IQ",
        load(16, 4),  # ldr x16, entry
        0xC8DFFE10,  # ldar x16, [x16]
        0xD61F0200,  # br x16
        0xD503201F,  # nop
        entry,
    )
    call = struct.pack(
        "<14I3Q",
        0xA9BF7BFD,  # stp x29, x30, [sp, #-16]!
        load(16, 13),  # ldr x16, call_python
        0xD63F0200,  # blr x16
        0xA8C17BFD,  # ldp x29, x30, [sp], #16
        0xB5000040,  # cbnz x0, two further on
        0xD65F03C0,  # ret
        0xAA0003E4,  # mov x4, x0: the text
        0x52800000,  # mov w0, #0: the condition, which is false
        load(1, 8),  # ldr x1, name
        load(2, 7),  # ldr x2, name
        0x52800003,  # mov w3, #0
        load(16, 7),  # ldr x16, check
        0xD61F0200,  # br x16
        0xD503201F,  # nop
        call_python, name, check,
    )  # fmt: skip

    def trampolines(first: int, places: range) -> list[bytes]:
        pack = struct.Struct("<2I8x").pack  # mov w3, #number; b to the head
        return [
            pack(0x52800003 | n << 5, 0x14000000 | (-(place + 4) // 4 & 0x3FFFFFF))
            for n, place in enumerate(places, first)
        ]

    return jump + call, len(jump), trampolines


MACHINES = {"x86_64": _x86_64, "aarch64": _aarch64}


class CodePages:
    """Trampolines, made a page at a time. `entry` holds the address to which they all jump.

    call_python: takes the stack, the counts of arguments and results, and the number; returns 0, or
        the address of a text that becomes the message of a RuntimeError.
    check: the address of Torch's function that throws.
    """

    def __init__(self, call_python: CallPython, check: int) -> None:
        self.entry = c_void_p()
        self._call_python = _CALL_PYTHON(call_python)
        self._lock = threading.Lock()
        after_fork(self._lock)
        self._pages: list[int] = []
        self._count = 0
        address = ctypes.cast(self._call_python, c_void_p).value or 0
        self._code = MACHINES[platform.machine()](ctypes.addressof(self.entry), address, check)
        self._add_page()
        self.entry.value = self._pages[0] + self._code[1]

    def trampoline(self) -> tuple[int, int] | None:
        """Return the number and the address of a new trampoline; None if all are taken."""
        with self._lock:
            number = self._count
            if number == LIMIT:
                return None
            page, at = divmod(number, (PAGE - HEAD) // SIZE)
            if page == len(self._pages):
                self._add_page()
            self._count += 1
            return number, self._pages[page] + HEAD + SIZE * at

    def _add_page(self) -> None:
        head, _, trampolines = self._code
        places = range(HEAD, PAGE - SIZE + 1, SIZE)
        code = trampolines(len(places) * len(self._pages), places)
        self._pages.append(executable(head.ljust(HEAD, b"\0") + b"".join(code)))


def executable(code: bytes) -> int:
    """Return the address of an executable, read-only copy of `code`. Raises OSError."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = c_void_p
    file = os.memfd_create("jitkern trampolines", os.MFD_CLOEXEC)
    try:
        os.write(file, code)
        permissions = mmap.PROT_READ | mmap.PROT_EXEC
        arguments = (None, c_size_t(len(code)), permissions, mmap.MAP_PRIVATE, file, c_size_t(0))
        address = system.mmap(*arguments)
    finally:
        os.close(file)
    if address in (None, c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(address)


@functools.cache
def supported() -> bool:
    """Whether this machine runs trampolines: a supported one, with x86_64 or aarch64."""
    return not target.unsupported() and platform.machine() in MACHINES


def made(call_python: CallPython, check: int) -> CodePages | None:
    """Return code pages, or None if the system does not allow them."""
    if supported():
        with contextlib.suppress(OSError, AttributeError):
            return CodePages(call_python, check)
    return None
