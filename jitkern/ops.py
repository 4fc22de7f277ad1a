"""The shipped ops, which this module declares and registers; each compiles on its first call.

`jitkern.ops.softmax` is the op as a function, `torch.ops.jitkern.softmax` the same op in Torch.
"""

from __future__ import annotations

from jitkern.declare import discover

globals().update({op.name.split("::")[1]: op for op in discover("jitkern.kernels_src")})
