"""Tools that work on a cache directory: they need no kernel, no compiler and no Torch."""

from jitkern.cache_tools.listing import Row, clear, find, rows

__all__ = ["Row", "clear", "find", "rows"]
