"""Tools that work on a cache directory: they need no kernel, no compiler and no Torch."""

from jitkern.cache_tools.explain import differences, nearest
from jitkern.cache_tools.listing import SORTS, Row, Wanted, chosen, find, rows
from jitkern.cache_tools.pins import pin, unpin
from jitkern.cache_tools.prune import Use, after_publish, evictable, remove
from jitkern.cache_tools.statistics import stats

__all__ = [
    "SORTS",
    "Row",
    "Use",
    "Wanted",
    "after_publish",
    "chosen",
    "differences",
    "evictable",
    "find",
    "nearest",
    "pin",
    "remove",
    "rows",
    "stats",
    "unpin",
]
