"""The execution of a module's body or a cell: whether it is over, and whether it raised."""

from __future__ import annotations

import inspect
import opcode
import sys
import threading
import types

_running: list[Execution] = []  # and some that are over
_AWAITS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Execution:
    """An execution of code that declares ops again."""

    def __init__(self, frame: types.FrameType) -> None:
        self.frame: types.FrameType | None = frame
        self.failed = False
        self._thread = threading.get_ident()

    @classmethod
    def of(cls, frame: types.FrameType) -> Execution:
        """Return the execution of a frame of this thread."""
        _running[:] = [one for one in _running if not one.is_over()]
        found = [one for one in _running if one.frame is frame]
        if not found:
            _running.append(cls(frame))
        return (found or _running)[-1]

    def is_of_this_thread(self) -> bool:
        """Return whether this thread runs the code, or ran it."""
        return self._thread == threading.get_ident()

    def is_over(self) -> bool:
        """Return whether the code has returned or raised; `failed` is set if it raised.

        Code with a top-level `await` counts as over while it waits.
        """
        frame = self.frame
        if frame is None:
            return True
        above = sys._current_frames().get(self._thread)
        while above is not None and above is not frame:
            above = above.f_back
        if above is frame:
            return False
        last = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
        self.failed = not (last.startswith("RETURN") or frame.f_code.co_flags & _AWAITS)
        self.frame = None  # a frame holds those of its callers, with all of their variables
        return True
