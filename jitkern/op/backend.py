"""The function of an op on one device type; its implementation is imported at the first call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from jitkern import op as room

if TYPE_CHECKING:
    from jitkern.op.dispatch import Implementation
    from jitkern.op.op import Op

_making = threading.Lock()


class Backend:
    """The function that is registered once per op and device type, and never replaced.

    number: the op's slot in the launch runtime; None if Python serves all calls. launches: whether
    the op has kernels that stubs could launch, on a system that allows trampolines.
    """

    def __init__(self, op: Op, device: str, *, launches: bool) -> None:
        self.op = op
        self.device = device
        self.number: int | None = None
        self.launches = launches
        self._implementation: Implementation | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._implementation or self.implementation)(*args, **kwargs)

    @property
    def implementation(self) -> room.dispatch.Implementation:
        """The implementation, which runs the op."""
        with _making:
            if self._implementation is None:
                self._implementation = room.dispatch.Implementation(self)
        return self._implementation

    def forget(self) -> None:
        """Forget all that was made from an earlier launch function."""
        if self._implementation:
            self._implementation.forget()
