"""Conditional writes: the index of a machine, which many change at once, and whether a store can.

Commands ask a store again after a failure; what a process asks at run time has `patience`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jitkern.errors import JitkernError
from jitkern.remote import layout
from jitkern.remote.index import Index
from jitkern.remote.patience import within
from jitkern.remote.store import Forked, Readable, Refused, Store, Tag, TooLarge, Unavailable

ATTEMPTS = 20  # to replace an index that others replace, too
RETRIES = 4
WRITERS = 8  # of the probe
T = TypeVar("T")


def insist(ask: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what `ask` returns, asked again after some failures. Raises Unavailable."""
    for attempt in range(RETRIES):
        try:
            return within(None, functools.partial(ask, *args, **options))
        except (Refused, TooLarge, Forked):
            raise
        except Unavailable:
            if attempt == RETRIES - 1:
                raise
            time.sleep(random.uniform(0, min(2.0, 0.2 * 2**attempt)))  # noqa: S311
    raise AssertionError


def update_index(
    store: Store, machine: str, change: Callable[[Index | None], Index | None]
) -> tuple[Index, Index]:
    """Replace a machine's index by what `change` makes of it; return both.

    change: called with the index, or None if there is none, as often as other writers are faster.
    It returns None for no change. Raises JitkernError for an index that jitkern did not write, and
    where other writers are faster each time.
    """
    name = layout.index_of(machine)
    for attempt in range(ATTEMPTS):
        old, tag = read_index(store, machine)
        new = change(old)
        if new is None or new == old:
            return old or Index(loose=False), old or Index(loose=False)
        data = new.encode()
        if len(data) > layout.LARGEST_INDEX:
            raise JitkernError(
                f"the index {name} of {store.url} would have {len(data)} bytes, and at most "
                f"{layout.LARGEST_INDEX} are read: push with a smaller --keep"
            )
        write = store.create if old is None else functools.partial(store.replace, tag=tag)
        if insist(write, name, data):
            return old or Index(loose=False), new
        time.sleep(random.uniform(0, min(2.0, 0.05 * 2**attempt)))  # noqa: S311
    raise JitkernError(
        f"the index {name} of {store.url} was changed by others {ATTEMPTS} times in a row: "
        "push again when fewer push"
    )


def read_index(store: Readable, machine: str) -> tuple[Index | None, Tag]:
    """Return the index of a machine and its tag, or None twice. Raises JitkernError."""
    name = layout.index_of(machine)
    found = insist(store.get, name, limit=layout.LARGEST_INDEX)
    if found is None:
        return None, None
    try:
        return Index.decode(found.data), found.tag
    except ValueError as e:
        raise JitkernError(
            f"the index {name} of {store.url} cannot be used: {e}. If no newer jitkern wrote it, "
            "delete this object, and push again"
        ) from e


def probe(store: Store) -> str:
    """Return the reason why conditional writes cannot be relied on, or "" if they can.

    Eight writers race to create an object, and then to replace it: one of each must win. Raises
    Unavailable.
    """
    name = f"{layout.PROBES}/{uuid.uuid4().hex}"
    bodies = [f"{i}".encode() for i in range(WRITERS)]
    try:
        won = _winners(functools.partial(store.create, name), bodies)
        if len(won) != 1:
            return f"{len(won)} of {WRITERS} writers created the same object"
        found = insist(store.get, name, limit=1 << 10)
        if found is None or found.data != won[0]:
            return "it does not return the object that was just created"
        bodies = [b"new " + body for body in bodies]  # equal content may have an equal tag
        won = _winners(lambda body: store.replace(name, body, found.tag), bodies)
        if len(won) != 1:
            return f"{len(won)} of {WRITERS} writers replaced the same version"
        return ""
    finally:
        with contextlib.suppress(Unavailable):
            store.delete(name)


def _winners(write: Callable[[bytes], bool], bodies: list[bytes]) -> list[bytes]:
    """Return what was written of what as many writers wrote at once.

    Raises Unavailable where nobody knows: no writer won, and one of them got no answer.
    """

    def attempt(body: bytes) -> bool | Unavailable:
        try:
            return write(body)
        except Unavailable as e:
            return e

    with ThreadPoolExecutor(WRITERS) as writers:
        answers = [*writers.map(attempt, bodies)]
    won = [body for body, answer in zip(bodies, answers) if answer is True]
    for answer in answers:
        if not won and isinstance(answer, Unavailable):
            raise answer
    return won
