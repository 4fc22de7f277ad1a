"""Weights of 4 bits for `jitkern.ops.w4a16_linear`: packing, and rounding to the nearest."""

from jitkern.kernels_src.int4_weight import Int4Weight, pack, quantize, unpack

__all__ = ["Int4Weight", "pack", "quantize", "unpack"]
