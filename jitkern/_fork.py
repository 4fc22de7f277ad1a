"""Renew locks and state in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def after_fork(*renewed: Any, held: Any = None) -> None:
    """Renew locks, and call functions, in each forked child of this process.

    A child has none of its parent's other threads, whose locks nobody would free. The objects that
    a process holds are listed in docs/architecture.md; this is the only way to renew them.

    held: a lock that a fork waits for, and frees on both sides.
    """
    if not hasattr(os, "register_at_fork"):
        return
    if held:
        os.register_at_fork(
            before=held.acquire, after_in_parent=held.release, after_in_child=held.release
        )
    for item in renewed:
        os.register_at_fork(after_in_child=_renewal(item))


def _renewal(item: Any) -> Callable[[], object]:
    """Return what renews a lock, or the function itself that `item` is."""
    if hasattr(item, "_is_owned"):  # reentrant: the thread that forks may be in its block
        return lambda: item._is_owned() or item._at_fork_reinit()
    renewal: Callable[[], object] = getattr(item, "_at_fork_reinit", item)
    return renewal
