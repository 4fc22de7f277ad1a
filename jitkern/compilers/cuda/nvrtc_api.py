"""The API of NVRTC, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Collection, Mapping

from jitkern.errors import CompileError, TargetError
from jitkern.target import Target

# What NVRTC says.
UNKNOWN_OPTION = r"unrecognized option (.+) found|annotation on lambda"
UNDEFINED = r'identifier "(\w+)" is undefined'


class NvrtcProgram:
    """A program to compile with NVRTC.

    headers: texts that replace files, by their names in `#include`.
    """

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
        """Compile, and return (failed, log)."""
        known = version(self._library)
        if known >= (12, 9):  # older ones have no cache of their own
            options = [*options, "--no-cache"]
        if known[0] == 12 and "-default-device" not in options:
            options = [*options, "-default-device"]  # or a generic lambda is a host function
        array = _strings(options)
        failed = bool(self._library.nvrtcCompileProgram(self._handle, len(options), array))
        return failed, self.text("ProgramLog")

    def bytes(self, output: str) -> bytes:
        """Return an output of NVRTC: "PTX", "CUBIN" or "ProgramLog"."""
        size = ctypes.c_size_t()
        self._ok(getattr(self._library, f"nvrtcGet{output}Size")(self._handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._ok(getattr(self._library, f"nvrtcGet{output}")(self._handle, buffer))
        return buffer.raw

    def text(self, output: str) -> str:
        """Return an output of NVRTC as text."""
        return self.bytes(output).rstrip(b"\0").decode(errors="replace")

    def lowered(self, expression: str) -> str:
        """The symbol of a name expression."""
        name = ctypes.c_char_p()
        self._ok(
            self._library.nvrtcGetLoweredName(self._handle, expression.encode(), ctypes.byref(name))
        )
        assert name.value
        return name.value.decode()

    def destroy(self) -> None:
        """Free the program."""
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
    return text.encode(errors="surrogateescape")  # as `cpp_text.read` decodes files


@functools.cache
def version(library: ctypes.CDLL) -> tuple[int, int]:
    """The version (major, minor) of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


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
    """The full version of NVRTC."""
    return version_in(compile_nothing(library))


def compile_nothing(library: ctypes.CDLL, *options: str) -> str:
    """Return the PTX of an empty program, which takes 30 ms."""
    program = NvrtcProgram(library, "", "/jitkern/empty.cu", (), {})
    try:
        program.compile([*options])
        return program.text("PTX")
    finally:
        program.destroy()


def version_in(text: str) -> str:
    """The full version at the beginning of a PTX text, `V13.0.88`; nvrtcVersion lacks it."""
    match = re.search(r"\bV[\d.]+", text)
    return match.group(0) if match else "unknown"
