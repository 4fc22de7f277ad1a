"""What Torch is given for an op on one device type; what runs the op is imported at a call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from jitkern import op as room

if TYPE_CHECKING:
    from jitkern.op.dispatch import Implementation
    from jitkern.op.op import Op

_making = threading.Lock()


class Backend:
    """Registered once per op and device type, and never replaced.

    number: of the op's slot in the launch runtime; None where Python has to do. launches: whether
    the op has kernels that a stub could launch, if this system let it.
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
        """What runs the op."""
        with _making:
            if self._implementation is None:
                self._implementation = room.dispatch.Implementation(self)
        return self._implementation

    def forget(self) -> None:
        """Let nothing serve that was made of a launch function as it was declared before."""
        if self._implementation:
            self._implementation.forget()
