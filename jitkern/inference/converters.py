"""Weights of 4 bits from the layouts of GPTQ, AWQ and torchao."""

from jitkern.kernels_src.int4_converters import (
    from_awq,
    from_gptq,
    from_gptq_reordered,
    from_torchao,
)

__all__ = ["from_awq", "from_gptq", "from_gptq_reordered", "from_torchao"]
