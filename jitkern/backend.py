"""What Torch is given for an op on one device type; what runs the op is imported at a call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitkern.implementation import Implementation
    from jitkern.register import Op

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
    def implementation(self) -> Implementation:
        """What runs the op."""
        from jitkern.implementation import Implementation

        with _making:
            if self._implementation is None:
                self._implementation = Implementation(self)
        return self._implementation

    def forget(self) -> None:
        """Let nothing serve that was made of a launch function as it was declared before."""
        if self._implementation:
            self._implementation.forget()
