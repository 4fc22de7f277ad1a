"""The errors of jitkern.

    JitkernError (RuntimeError)
    ├── DeclarationError (also ValueError)   a kernel is declared wrongly
    ├── SettingError (also ValueError)       a setting has an invalid value
    ├── TargetError (also ValueError)        a target is unknown, or cannot be built here
    ├── CompilerNotFound                     the compiler for a source is not on this machine
    ├── CompileError                         the compiler refused the source
    ├── LoadError                            a whole artifact could not be loaded
    ├── LaunchError                          a launch function called its kernel wrongly
    └── CacheError                           the cache cannot be read or written
        ├── NotCached                        nothing is cached and compiling is not allowed
        └── UntrustedCache                   another user could have written the cache

A message says what failed, for which op and target, why, and what to do next. Data for programs are
attributes of the error. Every error can be pickled.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

_HERE = os.path.dirname(__file__) + os.sep  # noqa: PTH120  every import pays for this
_IMPORTLIB = os.path.join(os.path.dirname(os.__file__), "importlib")  # noqa: PTH118, PTH120


class JitkernError(RuntimeError):
    """The base of all errors; keyword arguments become attributes.

    launched: number of kernels that the failed call had started, 1 if it had changed a tensor
        without one; 0 means that it changed none.
    place: the line of the op's author at fault, `kernel.py:19: `; "" if unknown.
    variant: the source.kinds.Variant at fault, or None.
    """

    launched: int = 0
    place: str = ""
    variant: object = None

    def __init__(self, message: str, **data: object) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class DeclarationError(JitkernError, ValueError):
    """A kernel declaration breaks a rule, which the message states."""


class SettingError(JitkernError, ValueError):
    """A setting has an invalid value, whatever its origin."""


class TargetError(JitkernError, ValueError):
    """A target does not parse, or this machine's compilers cannot build for it."""


class CompilerNotFound(JitkernError):
    """No compiler for a kind of source is installed; `remedy` is a command that installs one."""

    remedy: str = ""


class CompileError(JitkernError):
    """The compiler refused the source; `command` was run, and `log` is its whole output."""

    op: str = ""
    target: str = ""
    command: str = ""
    log: str = ""


class LoadError(JitkernError):
    """An artifact that passed its checksums could not be loaded into this process.

    whole: whether the artifact is intact, so that compiling it again would not help.
    """

    whole: bool = False


class LaunchError(JitkernError):
    """A kernel got a wrong number or type of arguments, or its launch failed."""


class CacheError(JitkernError):
    """The cache directory cannot be used; `path` is the directory or file at fault."""

    path: str = ""


class NotCached(CacheError):
    """The entry is missing, and compiling is disabled or not possible now.

    what: the message without the remedy. command: what prewarms the op, or "".
    """

    what: str = ""
    command: str = ""

    def for_call(self, op: str, call: str) -> None:
        """Add the command that builds for this call to the message."""
        if self.command and call:
            self.args = (f"{self.what} {self.command} --call '{op}({call})'",)


class UntrustedCache(CacheError):
    """Another user could have written a directory, so native code is not loaded from it."""


def shown(file: str) -> str:
    """The name of a Python file as its author knows it: `Cell In[3]` in a notebook."""
    get_shell = getattr(builtins, "get_ipython", None)
    shell = get_shell() if get_shell else None
    named = shell.compile.format_code_name(file) if shell else None
    return " ".join(named) if named else file


def call_site(file: str = "") -> str:
    """The innermost running line of a file, as `kernel.py:12: `, or "".

    file: by default, any that is not part of jitkern.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == file or not (file or name.startswith(_HERE)):
            return f"{shown(name)}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""


def then(text: str, more: str) -> str:
    """A message with another clause, which after a question is a sentence of its own."""
    return f"{text} {more[0].upper()}{more[1:]}" if text.endswith("?") else f"{text}; {more}"


def defined_at(function: Callable[..., Any] | None) -> str:
    """The line where a function begins, as `kernel.py:12: `; "" if it is not of Python."""
    code = getattr(function, "__code__", None)
    return f"{shown(code.co_filename)}:{code.co_firstlineno}: " if code else ""


def error_site(e: BaseException, function: Callable[..., Any] | None) -> str:
    """The innermost line of the function's file that an error passed, else where it begins."""
    code = getattr(function, "__code__", None)
    place, trace = defined_at(function), e.__traceback__
    while trace is not None:
        if code and trace.tb_frame.f_code.co_filename == code.co_filename:
            place = f"{shown(code.co_filename)}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return place


def error_line(e: BaseException) -> str:
    """An error that somebody's module raises at import, in one line: where, its type, its text."""
    place, trace = "", e.__traceback__
    if isinstance(e, SyntaxError):
        return f"{shown(str(e.filename))}:{e.lineno}: {type(e).__name__}: {e.msg}"
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith((_HERE, "<frozen", _IMPORTLIB)):
            place = f"{shown(path)}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return f"{place}{type(e).__name__}: {str(e).removeprefix(place)}"


def is_ours(e: BaseException) -> bool:
    """Whether jitkern raised an error, and not code that it runs."""
    trace = e.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE)


def nearest(name: str, names: Iterable[str]) -> str:
    """The name most like a misspelt one, or ""."""
    import difflib  # for errors alone

    name = name.replace("gpu", "cuda")  # as many call it
    return next(iter(difflib.get_close_matches(name, [*names], n=1)), "")


def meant(name: str, names: Iterable[str]) -> str:
    """The end of a message about a misspelt name, `; did you mean softmax?`; "" if none is near."""
    near = nearest(name, names)
    return near and f"; did you mean {near}?"


def meant_op(name: str, ops: Iterable[str]) -> str:
    """The same about a name that none of these ops has, with the namespace or without."""
    known = {n: op for op in ops for n in (op, op.partition("::")[2])}
    near = known[found] if (found := nearest(name, known)) else ""
    return near and f"; did you mean {near if '::' in name else near.removeprefix('jitkern::')}?"


def told(text: str, op: str, place: str = "") -> str:
    """A message with the op and the line at fault, if it lacks them."""
    named = text if op in text else f"{op}: {text}"
    return named if place in named else place + named
