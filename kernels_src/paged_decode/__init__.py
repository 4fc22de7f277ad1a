"""Attention over paged keys and values: the kernels, and a cache that hands pages out."""
