"""The call that a thread is serving, so that a miss can tell a build service what needs the entry.

The call is turned into text only when somebody asks, or when work for it is left to a background
thread, which must keep no tensor.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

Described = tuple[str, str]  # the call as a line of a recording, and the target


class _Served:
    """A call that is being served. describe: raises TypeError for what no recording can hold."""

    def __init__(self, describe: Callable[[], Described]) -> None:
        self.describe: Callable[[], Described] | None = describe
        self.described: Described | None = None

    def end(self) -> None:
        """Let go of the arguments."""
        self.describe = None


_served: contextvars.ContextVar[_Served | None] = contextvars.ContextVar("_served", default=None)


@contextlib.contextmanager
def served(describe: Callable[[], Described]) -> Iterator[None]:
    """Serve a call in a block."""
    call = _Served(describe)
    token = _served.set(call)
    try:
        yield
    finally:
        call.end()
        _served.reset(token)


def described() -> Described | None:
    """Return the call that is served in this context, or None if the call is not known."""
    call = _served.get()
    if call and call.describe:
        with contextlib.suppress(TypeError):
            call.described = call.describe()
        call.end()
    return call.described if call else None
