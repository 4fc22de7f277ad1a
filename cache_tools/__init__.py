"""Tools that work on a cache directory: they need no kernel, no compiler and no Torch."""

from jitkern.cache_tools.bundle import BundleError, Unpacked, pack, unpack
from jitkern.cache_tools.explain import differences, nearest
from jitkern.cache_tools.listing import SORTS, Row, Wanted, chosen, find, rows
from jitkern.cache_tools.pins import pin, unpin
from jitkern.cache_tools.prune import Use, after_publish, evictable, remove
from jitkern.cache_tools.signing import keygen, sign
from jitkern.cache_tools.statistics import stats
from jitkern.cache_tools.wheel import pack_wheel

__all__ = [
    "SORTS",
    "BundleError",
    "Row",
    "Unpacked",
    "Use",
    "Wanted",
    "after_publish",
    "chosen",
    "differences",
    "evictable",
    "find",
    "keygen",
    "nearest",
    "pack",
    "pack_wheel",
    "pin",
    "remove",
    "rows",
    "sign",
    "stats",
    "unpack",
    "unpin",
]
