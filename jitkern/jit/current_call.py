"""The call that a thread is serving, so that a miss can tell a build service what needs the entry.

The call is turned into text only when somebody asks, or when work for it is left to a background
thread, which must keep no tensor.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

CallText = tuple[str, str]  # the call as a line of a recording, and the target


class _Served:
    """A call that is being served. spell: raises TypeError for what no recording can hold."""

    def __init__(self, spell: Callable[[], CallText]) -> None:
        self.spell: Callable[[], CallText] | None = spell
        self.text: CallText | None = None


_served: contextvars.ContextVar[_Served | None] = contextvars.ContextVar("_served", default=None)


@contextlib.contextmanager
def served(spell: Callable[[], CallText]) -> Iterator[None]:
    """Serve a call in a block. spell: returns its text."""
    call = _Served(spell)
    token = _served.set(call)
    try:
        yield
    finally:
        call.spell = None  # which holds the arguments
        _served.reset(token)


def text() -> CallText | None:
    """Return the call that is served in this context, or None if it is unknown."""
    call = _served.get()
    if call and call.spell:
        with contextlib.suppress(TypeError):
            call.text = call.spell()
        call.spell = None
    return call.text if call else None
