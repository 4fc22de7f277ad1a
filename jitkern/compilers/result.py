"""Parts that all compilers share: the result, running a tool, and errors from a tool's output."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import re
import shlex
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jitkern import config
from jitkern.cache.manifest import LOG
from jitkern.compilers import child_process
from jitkern.errors import CacheError, CompileError, TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.source import cpp_text
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target, this_platform

_log = logging.getLogger(__name__)
_ERROR = (
    r"(?m)^.*(?:\berror\b\s*:|\b(?:undefined reference to|multiple definition of) "
    r"|\bld\S*:.*(?:\bcannot find |\bnot recognized\b)).*$"
)
MISSING_HEADER = (
    r'(?:cannot|could not) open source file "([^"]+)"'
    r"|fatal error: '?([^:'\n]+)'?(?:: No such file| file not found)"
)
_WIDEST = 200  # of a source line in a message
_LONGEST = 2000  # characters of an error in a message
_MOST = 1 << 19  # characters of the output of a compiler that are looked through and kept
_NOT_THE_AUTHORS = ("jitkern probe:", "__nv_name_map(")  # files
_SECTIONS = struct.Struct("=40xQ10x2H")  # of an ELF file: where they begin, their size, count
_SECTION = struct.Struct("=4xI16x2Q")  # kind, offset, size
_DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
_SYMBOL = struct.Struct("=4x2BH16x")  # binding and type, visibility, section
_GLOBAL, _UNIQUE = 1, 10  # STB_GLOBAL, STB_GNU_UNIQUE
_PROTECTED = 3  # STV_PROTECTED
_LINKER_FAILED = ("ld returned", "linker command failed")  # other lines of the linker say why


class Built(NamedTuple):
    """A finished build. meta: data for loading (symbols, parameters); compiler: who built."""

    compiler: dict[str, str]
    meta: dict[str, Any]


def run(
    command: Sequence[str],
    *,
    source: Source,
    folder: Path,
    shown: bool = False,
    limit: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a tool in `folder` in the scrubbed environment; stderr joins stdout.

    shown: whether the settings may ask to see it. limit: the seconds that a tool may take.
    """
    settings = config.current()
    environment = settings.build_environment(tuple(source.environment))
    status, output = child_process.run(
        command, shown=shown and settings.verbose, limit=limit, cwd=folder, env=environment
    )
    return subprocess.CompletedProcess(list(command), status, output)


def check_platform(op: str, target: Target) -> None:
    """Raise TargetError for host code of another platform than this one."""
    if target.platform != this_platform():
        raise TargetError(
            f"{op} for {target}: host code is built on its own platform, and this one is "
            f"{this_platform()}"
        )


def binary_at(path: Path, variant: Variant, target: Target, command: Sequence[str]) -> bytes:
    """Return what a compiler wrote. Raises CompileError if it is for another kind of machine."""
    binary = path.read_bytes()
    if _kind_of(binary) != _own_kind():
        raise unusable(variant, target, command)
    return binary


def unusable(variant: Variant, target: Target, command: Sequence[str]) -> CompileError:
    """The error for a compiler that ended well, and wrote what this machine cannot use."""
    what = f"`{command[0]}` ended without an error, and what it wrote is not a library for"
    hint = f"{what} this machine: set CC or CXX to a compiler that builds for it"
    return compile_error(variant, target, command, "", hint)


def _kind_of(binary: bytes) -> bytes:
    """Return the class, the byte order and the machine of an ELF file."""
    return binary[:6] + binary[18:20]


@functools.cache
def _own_kind() -> bytes:
    with Path("/proc/self/exe").open("rb") as own:
        return _kind_of(own.read(20))


def keep_binary(staging: Path, stem: str, binary: bytes, suffix: str = ".so") -> str:
    """Write a binary beside the log, and return its file name: `stem` and a part of its hash.

    A library is bound to its own symbols before.
    """
    if suffix:
        binary = bound_to_itself(binary)
    artifact = f"{stem}.{hashlib.sha256(binary).hexdigest()[:8]}{suffix}"
    (staging / artifact).write_bytes(binary)
    return artifact


def bound_to_itself(library: bytes) -> bytes:
    """Return a library that binds its references to its own definitions of symbols.

    The loader of the system would take the first definition in the process: of an inline variable
    or a static of a template (STB_GNU_UNIQUE) that of any library loaded before, and of each other
    symbol that of the program, of libc, or of a library loaded with RTLD_GLOBAL. A variant would
    read the tables of another one, of an earlier edit, or of another package. The symbols stay
    exported. No flags do the same: -Bsymbolic leaves unique symbols out, and -fno-gnu-unique does
    not reach archives.
    """
    bound = bytearray(library)
    with contextlib.suppress(struct.error):  # the end is missing: the loader will say so
        for at in _dynamic_symbols(library):
            info, visibility, section = _SYMBOL.unpack_from(library, at)
            binding, kind = divmod(info, 16)
            if section and binding and not visibility % 4:
                bound[at + 4] = kind + 16 * (_GLOBAL if binding == _UNIQUE else binding)
                bound[at + 5] = visibility + _PROTECTED
    return bytes(bound)


def _dynamic_symbols(library: bytes) -> Iterator[int]:
    """Yield the offsets of the symbols that the loader of the system sees in a 64-bit ELF file."""
    start, size, count = _SECTIONS.unpack_from(library) if library[4:5] == b"\2" else (0, 1, 0)
    for header in range(start, start + size * count, size):
        kind, offset, length = _SECTION.unpack_from(library, header)
        if kind == _DYNAMIC_SYMBOLS:
            yield from range(offset, offset + length, _SYMBOL.size)


def write_log(staging: Path, command: Sequence[str], output: str, *, unseen: bool = False) -> None:
    """Write the command and its output to the log beside the artifacts.

    unseen: whether it has not been shown yet, as the output of a library has not.
    """
    _log.debug("$ %s", shlex.join(command))
    text = f"$ {shlex.join(command)}\n{_bounded(output, _MOST)}"
    (staging / LOG).write_text(text, encoding="utf-8", errors="surrogateescape")
    if unseen and config.current().verbose:
        child_process.show(text)


def compile_error(
    variant: Variant, target: Target, command: Sequence[str], output: str, hint: str = ""
) -> CompileError:
    """The error for a tool that refused the source: its first errors, then a hint."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise CacheError(
            f"{variant.op} for {target}: no space is left to compile in; "
            "free some, or point JITKERN_CACHE_DIR elsewhere"
        )
    output = _bounded(output, _MOST)
    lines = output.strip().splitlines()
    errors = list(re.finditer(_ERROR, output))
    errors.sort(key=lambda error: any(word in error.group() for word in _LINKER_FAILED))
    if hint:  # which says more than an error in code that is not the author's
        errors = [error for error in errors if not error.group().startswith(_NOT_THE_AUTHORS)]
    said = [_bounded(e.group().strip(), _LONGEST) + _excerpt(output, e.end()) for e in errors[:3]]
    if not said and not hint:
        last = f"`{command[0]}` printed nothing" if not lines else lines[-1]
        said = [_bounded(last, _LONGEST)]
    flags = [flag for flag in variant.source.flags if any(flag in line for line in said)]
    if flags and not hint:
        hint = f"{variant.source.files[0]} is declared with flags={flags}: correct them"
    summary = "\n".join(filter(None, [*said, hint]))
    what = f"`{variant.function}`" if variant.function else "its Extension"
    return CompileError(
        f"could not compile {what} of {variant.op} for {target}: {summary}",
        op=variant.op,
        target=str(target),
        command=shlex.join(command),
        log=output,
    )


def _bounded(text: str, most: int) -> str:
    """Return the beginning and the end of a text that is longer than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def _excerpt(output: str, at: int) -> str:
    """The source line and the caret that a compiler printed below an error, which ends at `at`."""
    rows = output[at:].split("\n")[1:]
    for row, caret in itertools.pairwise(rows):
        if (
            not row.strip()
            or len(row) > _WIDEST
            or re.search(r"\b(?:error|note|warning)\b\s*:", row)
        ):
            break
        if re.fullmatch(r"[\s|~]*\^[\s~^]*", caret):
            return f"\n{row}\n{caret.rstrip()}"
    return ""


def first_hint(said: str, hints: Iterable[tuple[str, str]]) -> str:
    """The hint of the first pattern that is found in what a tool said, or "".

    hints: patterns and hints, in which {0} is the first group that matched.
    """
    for pattern, hint in hints:
        if match := re.search(pattern, said, re.MULTILINE):
            return hint.format(next(filter(None, match.groups()), ""))
    return ""


def missing_header(output: str) -> str:
    """The header that a compiler did not find, or ""."""
    match = re.search(MISSING_HEADER, output)
    return next(filter(None, match.groups()), "") if match else ""


def missing_function(variant: Variant, functions: Iterable[cpp_text.CppFunction]) -> str:
    """A hint for a function name that the source does not contain, or ""."""
    name = cpp_text.last_name(variant.function)
    text = cpp_text.masked(cpp_text.read(variant.source.paths[0]))
    if not name or re.search(rf"\b{re.escape(name)}\b", text):
        return ""
    return no_function(variant._replace(function=name), functions)


def no_function(variant: Variant, functions: Iterable[cpp_text.CppFunction]) -> str:
    """A hint that the source has no function of this name, listing its functions."""
    listed = ", ".join(dict.fromkeys(f.display_name for f in functions)) or "none outside of macros"
    return f"{variant.source.paths[0]} has no function `{variant.function}`; it has: {listed}"


def no_kernel(variant: Variant) -> str:
    """A hint that a function of a CUDA file is not a kernel."""
    return f"{at_function(variant)} is not a kernel: write `__global__` before its `void`"


def at_function(variant: Variant) -> str:
    """The beginning of a hint about the function of a variant, with its line."""
    path = variant.source.paths[0]
    name = re.escape(cpp_text.last_name(variant.function))
    text = cpp_text.read(path)
    found = re.search(rf"\b{name}\s*\(", text)  # none if a macro spells it
    line = text.count("\n", 0, found.start() if found else 0) + 1
    return f"{path}:{line}: `{variant.function}` in {path}"
