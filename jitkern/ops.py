"""The shipped ops; each is declared when it is first asked for, and compiles on its first call.

`jitkern.ops.softmax` is the op as a function, `torch.ops.jitkern.softmax` the same op in Torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.op.all_ops import attach

if TYPE_CHECKING:
    from jitkern.declare import Op

    def __getattr__(name: str) -> Op: ...

else:
    __getattr__, __dir__ = attach(__name__, "jitkern.kernels_src", namespace="jitkern")
