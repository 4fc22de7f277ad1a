"""What jitkern raises.

    JitkernError (RuntimeError)
    ├── DeclarationError (also ValueError)   a kernel is declared wrongly
    ├── SettingError (also ValueError)       a setting has a value that it does not take
    ├── TargetError (also ValueError)        a target is unknown, or cannot be built here
    ├── CompilerNotFound                     the compiler for a source is not on this machine
    ├── CompileError                         the compiler refused the source
    ├── LoadError                            a whole artifact could not be loaded
    ├── LaunchError                          a launch function called its kernel wrongly
    └── CacheError                           the cache cannot be read or written
        ├── NotCached                        nothing is cached and compiling is not allowed
        └── UntrustedCache                   somebody else could have written the cache

A message says what failed, for which op and target, why, and what to do next. Data that a program
may want is on the error as attributes. Every error pickles.
"""

from __future__ import annotations


class JitkernError(RuntimeError):
    """Base of all errors; keyword arguments become attributes.

    launched: how many kernels the failed call had started; 0 means it changed nothing.
    variant: the kernel.Variant that could not be had, where one is at fault.
    """

    launched: int = 0
    variant: object = None

    def __init__(self, message: str, **data: object) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class DeclarationError(JitkernError, ValueError):
    """A kernel declaration breaks a rule that its message states."""


class SettingError(JitkernError, ValueError):
    """A setting, wherever it comes from, has a value that it does not take."""


class TargetError(JitkernError, ValueError):
    """A target does not parse, or this machine's compilers cannot build for it."""


class CompilerNotFound(JitkernError):
    """No compiler for this kind of source is installed; `remedy` is the line that installs one."""

    remedy: str = ""


class CompileError(JitkernError):
    """The compiler refused the source; `command` and `log` (its whole output) say how."""

    op: str = ""
    target: str = ""
    command: str = ""
    log: str = ""


class LoadError(JitkernError):
    """An artifact that passed its checksums could not be loaded into this process.

    whole: the artifact is not at fault, so that compiling it again would not help.
    """

    whole: bool = False


class LaunchError(JitkernError):
    """A kernel was called with a wrong number or type of arguments, or its launch failed."""


class CacheError(JitkernError):
    """The cache directory cannot be used; `path` is the directory or file at fault."""

    path: str = ""


class NotCached(CacheError):
    """The entry is missing and compiling is switched off or not possible now."""


class UntrustedCache(CacheError):
    """A directory could have been written by another user; native code is not loaded from it."""
