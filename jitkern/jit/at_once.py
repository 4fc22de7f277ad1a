"""Compile several kernels of one call in parallel."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from jitkern import compilers
from jitkern.cache.entry import Entry
from jitkern.source.kinds import Variant

KERNELS = 4  # for each thread: Triton's process starts in the time of so many small ones


def threads_for(count: int) -> int:
    """The number of threads that compile so many kernels; 1 where more would not be quicker."""
    worth = count // KERNELS
    return min(worth, compilers.parallelism.limit()) if worth > 1 else 1


@contextlib.contextmanager
def each(
    ensure: Callable[[Variant], Entry], variants: Sequence[Variant]
) -> Iterator[list[Callable[[], Entry]]]:
    """Ensure all variants; yields what returns the entry of each, or raises, in their order.

    The end of the block cancels what has not begun.
    """
    threads = threads_for(len(variants))
    if threads == 1:
        yield [functools.partial(ensure, variant) for variant in variants]
        return
    pool = ThreadPoolExecutor(threads, "jitkern compile")
    try:
        # Each under the settings of the caller.
        begun = [pool.submit(contextvars.copy_context().run, ensure, v) for v in variants]
        yield [future.result for future in begun]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
