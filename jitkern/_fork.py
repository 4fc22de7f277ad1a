"""Renew locks and state in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl

_held: list[Any] = []  # locks that a fork waits for, in the order in which a fork takes them
_taken: dict[int, list[Any]] = {}  # those that the running forks have taken, by thread


def after_fork(*renewed: Any, held: Any = None) -> None:
    """Renew locks, and call functions, in each forked child of this process.

    A child has none of its parent's other threads, whose locks nobody would free. The objects that
    a process holds are listed in docs/architecture.md; this is the only way to renew them.

    held: a lock that a fork waits for, and frees in the parent. Its holders import nothing.
    """
    if not hasattr(os, "register_at_fork"):
        return
    for item in (held, *renewed) if held else renewed:
        os.register_at_fork(after_in_child=_renewal(item))
    if held:
        _held.append(held)


def _renewal(item: Any) -> Callable[[], object]:
    """Return what renews a lock, or the function itself that `item` is."""
    if hasattr(item, "_is_owned"):  # reentrant: the thread that forks may be in its block
        return lambda: item._is_owned() or item._at_fork_reinit()
    renewal: Callable[[], object] = getattr(item, "_at_fork_reinit", item)
    return renewal


def _take() -> None:
    """Take the locks that a fork waits for, also those that it meets while it waits."""
    taken = _taken[threading.get_ident()] = []
    for lock in _held:
        lock.acquire()
        taken.append(lock)


def _free() -> None:
    """Free what this fork has taken.

    Python asks who is called after a fork when that is over. A module that another thread imports
    meanwhile adds a lock that this fork did not take, and that thread may hold.
    """
    for lock in _taken.pop(threading.get_ident(), ()):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_free, after_in_child=_taken.clear)
