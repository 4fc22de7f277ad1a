"""What a cache was good for: hits and misses of all processes so far, and what takes the space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jitkern.cache import usage
from jitkern.cache.store import Cache
from jitkern.cache_tools.listing import Row


def stats(cache: Cache, rows: Iterable[Row]) -> dict[str, Any]:
    """Totals: entries, bytes (in all, by target and by op), hits by layer, misses by reason.

    damaged: those of the rows that are; saved_s: seconds that the hits spared; compiled_s: that the
    misses took. The counts are those of processes that have ended.
    """
    by_target: Counter[str] = Counter()
    by_op: Counter[str] = Counter()
    listed = list(rows)
    for row in listed:
        by_target[row.target] += row.bytes
        by_op[row.op or "damaged"] += row.bytes
    return {
        "entries": len(listed),
        "bytes": sum(row.bytes for row in listed),
        "damaged": sum(not row.ok for row in listed),
        "bytes_by_target": dict(by_target),
        "bytes_by_op": dict(by_op),
        **usage.total(cache.root),
    }
