"""A request for an artifact: a variant for a target, and all that its key covers."""

from __future__ import annotations

import logging
import time

from jitkern.cache import events
from jitkern.cache.events import Event
from jitkern.cache.key import Key
from jitkern.cache.store import Entry, Found
from jitkern.compilers import Compiler, compiler_for
from jitkern.named_tuple import NamedTuple
from jitkern.source.closure import Closure
from jitkern.source.key import make_key
from jitkern.source.kinds import Variant
from jitkern.target import Target

OTHER_COMPILER = "another compiler made it"
REFRESH = Found(None, reason="refresh")
_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """One variant for one target, as its files are at one moment.

    exact: the target with all that the artifact depends on, such as platform and ABI.
    """

    variant: Variant
    target: Target
    exact: Target
    compiler: Compiler
    closure: Closure
    key: Key

    @classmethod
    def of(cls, variant: Variant, target: Target) -> Request:
        """Return a request from the current files, without running a compiler.

        Raises DeclarationError for a file that does not exist.
        """
        compiler = compiler_for(variant.source)
        variant = compiler.with_headers(variant)
        source = variant.source
        exact = compiler.target(source, target)
        closure = compiler.closure(source)
        key = make_key(variant, exact, compiler.flags(source, exact), closure)
        return cls(variant, target, exact, compiler, closure, key)

    def again(self) -> Request:
        """Return the same request for the current files."""
        return Request.of(self.variant, self.target)


def report(
    variant: Variant,
    key: Key,
    status: str,
    started: float,
    entry: Entry | None = None,
    reason: str = "",
) -> None:
    """Report the event that `variant` was a hit, fetched, built or failed.

    started: the time.perf_counter() at its beginning.
    """
    seconds = time.perf_counter() - started
    path = str(entry.path) if entry else ""
    event = Event(variant.op, variant.label, key.target, status, seconds, path, reason)
    events.tell(event, variant.source.kind)
    _log.debug("key inputs: %s", key.inputs)


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be compiled or measured."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
