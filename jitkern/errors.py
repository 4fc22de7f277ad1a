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


class JitkernError(RuntimeError):
    """The base of all errors; keyword arguments become attributes.

    launched: number of kernels that the failed call had started; 0 means that it changed no tensor.
    variant: the source.kinds.Variant at fault, or None.
    """

    launched: int = 0
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
    """The entry is missing and compiling is switched off or not possible now.

    what: the message without the remedy. command: what prewarms the op, or "".
    """

    what: str = ""
    command: str = ""

    def for_call(self, op: str, call: str) -> None:
        """Let the message name the command that builds for this call, spelt as a text."""
        if self.command and call:
            self.args = (f"{self.what} {self.command} --call '{op}({call})'",)


class UntrustedCache(CacheError):
    """Another user could have written a directory, so native code is not loaded from it."""
