"""The path of one call: key, lookup, and on a miss lock, compile, publish.

`ensure` serves first use, prewarm and the tests alike: prewarm is first use without the load.
"""

from __future__ import annotations

import contextlib
import logging
import time

from jitkern import cache, config, jit
from jitkern.cache import events
from jitkern.cache.events import Event
from jitkern.cache.key import Key
from jitkern.cache.store import Entry, Found
from jitkern.compilers import compiler_for
from jitkern.errors import (
    CompilerNotFound,
    TargetError,
)
from jitkern.jit import cache_in_use
from jitkern.jit.cache_in_use import one_at_a_time, open_cache
from jitkern.jit.request import Request
from jitkern.source.kinds import Variant
from jitkern.target import Target

OTHER_COMPILER = "another compiler made it"
REFRESH = Found(None, reason="refresh")
_log = logging.getLogger(__name__)


def exact_target(variant: Variant, target: Target) -> Target:
    """`target` with all that this variant's artifact depends on: platform, ABI, instruction set."""
    return compiler_for(variant.source).target(variant.source, target)


def key_of(variant: Variant, target: Target) -> Key:
    """The key under which `variant` for `target` is cached; computing it needs no compiler."""
    return Request.of(variant, target).key


def ensure(
    variant: Variant, target: Target, *, refresh: bool = False, may_compile: bool = True
) -> Entry:
    """The published entry of `variant` for `target`, compiled if no layer of the cache has it.

    Raises NotCached if compiling is off, CompilerNotFound, TargetError, CompileError, CacheError.
    """
    return ensure_and_tell(variant, target, refresh=refresh, may_compile=may_compile)[0]


def ensure_and_tell(
    variant: Variant, target: Target, *, refresh: bool = False, may_compile: bool = True
) -> tuple[Entry, bool]:
    """The entry that `ensure` returns, and whether it was compiled just now."""
    started = time.perf_counter()
    request = Request.of(variant, target)
    key = request.key
    result = REFRESH if refresh else _look_up(request)
    if result.entry is None:
        if not may_compile or config.current().compile == "never" or capturing():
            raise jit.build.not_cached(variant, key)
        with (
            one_at_a_time(key.digest),
            cache.lock.held(jit.build.lock_name(key), f"{variant.op} for {key.target}"),
        ):
            reason = result.reason
            result = REFRESH if refresh else _look_up(request)
            if result.entry is None:
                return jit.build.build(request, started, reason), True
    report(variant, key, "hit", started, result.entry)
    cache_in_use.count_hit(result.entry)
    return result.entry, False


def report(
    variant: Variant,
    key: Key,
    status: str,
    started: float,
    entry: Entry | None = None,
    reason: str = "",
) -> None:
    """Report the event that `variant` was a hit, built or failed.

    started: the time.perf_counter() at its beginning.
    """
    seconds = time.perf_counter() - started
    path = str(entry.path) if entry else ""
    event = Event(variant.op, variant.label, key.target, status, seconds, path, reason)
    events.tell(event, variant.source.kind)
    _log.debug("key inputs: %s", key.inputs)


def _look_up(request: Request) -> Found:
    key = request.key
    result = open_cache().look_up(key.target, key.name, key.digest)
    if result.entry is None and cache_in_use.spilled:
        result = result._replace(entry=cache_in_use.spilled[0].find(key))
    if result.entry and config.current().compiler == "exact":
        source = request.variant.source
        with contextlib.suppress(CompilerNotFound, TargetError):  # keep it if nothing can rebuild
            installed = request.compiler.identities(source, request.exact)
            if result.entry.manifest.compiler not in installed:
                return Found(None, reason=OTHER_COMPILER)
    return result


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be compiled or measured."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
