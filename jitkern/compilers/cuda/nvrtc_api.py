"""NVRTC's own API, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Collection, Mapping

from jitkern.errors import CompileError, TargetError
from jitkern.target import Target


class Program:
    """One nvrtcProgram. headers: texts by the names that `#include` has; they hide files."""

    def __init__(
        self,
        library: ctypes.CDLL,
        text: str,
        name: str,
        expressions: tuple[str, ...],
        headers: Mapping[str, str],
    ) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        # A constant absolute name in a directory that does not exist: NVRTC searches quoted
        # includes in the name's directory, and bytes of the cubin depend on the name.
        self._ok(
            library.nvrtcCreateProgram(
                ctypes.byref(self._handle), _bytes(text), _bytes(name), len(headers),
                _strings(headers.values()), _strings(headers),
            )
        )  # fmt: skip
        for expression in expressions:
            self._ok(library.nvrtcAddNameExpression(self._handle, expression.encode()))

    def compile(self, options: list[str]) -> tuple[bool, str]:
        """(failed, log)."""
        array = _strings(options)
        failed = bool(self._library.nvrtcCompileProgram(self._handle, len(options), array))
        return failed, self.text("ProgramLog")

    def bytes(self, what: str) -> bytes:
        """What NVRTC made or said: "PTX", "CUBIN", "ProgramLog"."""
        size = ctypes.c_size_t()
        self._ok(getattr(self._library, f"nvrtcGet{what}Size")(self._handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._ok(getattr(self._library, f"nvrtcGet{what}")(self._handle, buffer))
        return buffer.raw

    def text(self, what: str) -> str:
        """The same, as text."""
        return self.bytes(what).rstrip(b"\0").decode(errors="replace")

    def lowered(self, expression: str) -> str:
        """The symbol that a name expression came to."""
        name = ctypes.c_char_p()
        self._ok(
            self._library.nvrtcGetLoweredName(self._handle, expression.encode(), ctypes.byref(name))
        )
        assert name.value
        return name.value.decode()

    def destroy(self) -> None:
        """Free it."""
        self._library.nvrtcDestroyProgram(ctypes.byref(self._handle))

    def _ok(self, result: int) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(
                f"NVRTC failed: {self._library.nvrtcGetErrorString(result).decode()}"
            )


def _strings(texts: Collection[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*map(_bytes, texts))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")  # as `cxx.read` has it


def check_arch(library: ctypes.CDLL, target: Target) -> None:
    """Raise TargetError for an arch that this NVRTC does not know."""
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    if int(re.sub(r"\D", "", target.arch)) not in list(archs):
        raise TargetError(
            f"NVRTC cannot build for {target}: it supports "
            f"{', '.join(f'sm_{arch}' for arch in archs)}"
        )


@functools.cache
def build_id(library: ctypes.CDLL) -> str:
    """The full version, from the PTX of an empty program, which takes 30 ms."""
    program = Program(library, "", "/jitkern/empty.cu", (), {})
    try:
        program.compile(["--no-cache"])
        return version_in(program.text("PTX"))
    finally:
        program.destroy()


def version_in(text: str) -> str:
    """The full version, which nvrtcVersion lacks: `V13.0.88`, as PTX names it at its beginning."""
    found = re.search(r"\bV[\d.]+", text)
    return found.group(0) if found else "unknown"
