"""Statistics of a cache: hits and misses of all processes so far, and bytes by target and op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jitkern.cache import usage
from jitkern.cache.store import Cache
from jitkern.cache_tools.listing import Row


def stats(cache: Cache, rows: Iterable[Row]) -> dict[str, Any]:
    """Return totals: entries, bytes (in all, by target, by op), hits by layer, misses by reason.

    damaged: number of damaged rows; saved_s: seconds that hits saved; compiled_s: seconds that
    misses took. Hits and misses are counts of processes that have ended.
    """
    by_target: Counter[str] = Counter()
    by_op: Counter[str] = Counter()
    rows = list(rows)
    for row in rows:
        by_target[row.target] += row.bytes
        by_op[row.op or "damaged"] += row.bytes
    return {
        "entries": len(rows),
        "bytes": sum(row.bytes for row in rows),
        "damaged": sum(not row.ok for row in rows),
        "bytes_by_target": dict(by_target),
        "bytes_by_op": dict(by_op),
        **usage.total(cache.root),
    }
