"""The path of one call: key, lookup, and on a miss lock, fetch or compile, publish.

On a miss the remotes are asked first, if the settings name any. `ensure` serves first use, prewarm
and the tests alike: prewarm is first use without the load.
"""

from __future__ import annotations

import contextlib
import time

from jitkern import cache, config, jit, source
from jitkern.cache.key import Key
from jitkern.cache.store import Entry, Found
from jitkern.errors import (
    CompilerNotFound,
    TargetError,
)
from jitkern.jit import active_cache
from jitkern.jit.active_cache import open_cache
from jitkern.jit.request import OTHER_COMPILER, REFRESH, Request, capturing, report
from jitkern.loading import one_at_a_time
from jitkern.source.kinds import Variant
from jitkern.target import Target


def key_of(variant: Variant, target: Target) -> Key:
    """The key under which `variant` for `target` is cached; computing it needs no compiler."""
    return Request.of(variant, target).key


def ensure(
    variant: Variant, target: Target, *, refresh: bool = False, may_compile: bool = True
) -> Entry:
    """The published entry of `variant` for `target`, fetched or compiled if no layer has it.

    may_compile: False for a caller that waits for neither. Raises NotCached if compiling is off,
    CompilerNotFound, TargetError, CompileError, CacheError.
    """
    return ensure_and_tell(variant, target, refresh=refresh, may_compile=may_compile)[0]


def ensure_and_tell(
    variant: Variant, target: Target, *, refresh: bool = False, may_compile: bool = True
) -> tuple[Entry, bool]:
    """The entry that `ensure` returns, and whether it was compiled just now."""
    started = time.perf_counter()
    request = Request.of(variant, target)
    result = REFRESH if refresh else _look_up(request)
    entry, new = result.entry, False
    if entry is None:
        entry, new = _missed(request, started, result.reason, may_wait=may_compile)
    else:
        report(variant, request.key, "hit", started, entry)
    if used := entry.manifest.meta.get("globals"):
        source.triton_globals.check(variant.source, used)
    return entry, new


def _missed(request: Request, started: float, reason: str, *, may_wait: bool) -> tuple[Entry, bool]:
    """The entry of a request that no layer has: made meanwhile, fetched from a remote, or compiled.

    reason: of the miss. may_wait: whether the caller waits for a fetch or a compile.
    """
    variant, key = request.variant, request.key
    may_compile = config.current().compile != "never"
    may_fetch = bool(config.current().remotes) and reason not in (REFRESH.reason, OTHER_COMPILER)
    if not may_wait or not (may_compile or may_fetch) or capturing():
        raise jit.build.not_cached(variant, key)
    with (
        one_at_a_time(key.digest),
        cache.lock.held(jit.build.lock_name(key), f"{variant.op} for {key.target}"),
    ):
        result = REFRESH if reason == REFRESH.reason else _look_up(request)
        status, said = "hit", ""
        if result.entry is None and may_fetch:
            said = jit.download.fetch(key, variant.op, variant.source.seconds)
            if not said:
                result, status = _look_up(request), "fetched"
        if result.entry is None:
            if not may_compile:
                raise jit.build.not_cached(variant, key, said)
            why = OTHER_COMPILER if result.reason == OTHER_COMPILER else reason
            return jit.build.build(request, started, why), True
    report(variant, key, status, started, result.entry)
    return result.entry, False


def _look_up(request: Request) -> Found:
    key = request.key
    result = open_cache().look_up(key.target, key.name, key.digest)
    if result.entry is None and active_cache.spilled:
        result = result._replace(entry=active_cache.spilled[0].find(key))
    if result.entry and config.current().compiler == "exact":
        source = request.variant.source
        with contextlib.suppress(CompilerNotFound, TargetError):  # keep it if nothing can rebuild
            installed = request.compiler.identities(source, request.exact)
            if result.entry.manifest.compiler not in installed:
                return Found(None, reason=OTHER_COMPILER)
    return result
