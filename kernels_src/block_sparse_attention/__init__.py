"""Attention over blocks: the kernels, masks, and `jitkern.flash_attention`."""
