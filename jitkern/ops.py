"""The shipped ops, which this module declares and registers; each compiles on its first call.

`jitkern.ops.softmax` is the op as a function, `torch.ops.jitkern.softmax` the same op in Torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.declare import discover

if TYPE_CHECKING:
    from jitkern.declare import Op

    def __getattr__(name: str) -> Op: ...


globals().update({op.name.split("::")[1]: op for op in discover("jitkern.kernels_src")})
