"""Linear layers with weights of 4 or 8 bits."""

from jitkern.kernels_src.linears import Int4Linear, Int8Linear, quantize_linears

__all__ = ["Int4Linear", "Int8Linear", "quantize_linears"]
