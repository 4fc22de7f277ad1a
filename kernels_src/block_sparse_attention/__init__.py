"""Attention over blocks: the kernels, masks, and `jitkern.ops.flash_attention`."""
