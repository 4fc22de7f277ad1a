"""The agenda of a prewarm: each task is taken once, after the tasks that it waits for."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jitkern.prewarming.tasks import Group, Kernel, Launchers, Task
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

_LONGEST_FIRST = ("extension", "triton")  # kinds of source


class Agenda:
    """Tasks by their numbers. All tasks are entered before the first is taken."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._kernels: dict[tuple[Any, ...], int] = {}
        self._ready: list[tuple[int, int]] = []
        self._wanted: set[int] = set()
        self._missing: dict[int, set[int]] = {}
        self._waiting: dict[int, list[int]] = defaultdict(list)

    def kernel(
        self, op: str, variant: Variant, target: Target, place: str = "", *, optional: bool = False
    ) -> int:
        """Return the number of the task that compiles a variant; each build has one task.

        place: the line that launches it, for messages. optional: see `Kernel`.
        """
        key: tuple[Any, ...] = op, variant, target
        if isinstance(variant.source, Extension):
            key = variant.source.shared_build, target
        if key not in self._kernels:
            self._kernels[key] = self._enter(Kernel(op, variant, target, place, optional))
        return self._kernels[key]

    def launchers(self, group: Group, calls: list[tuple[Any, ...]], kernels: Iterable[int]) -> int:
        """Return the number of the task for launch records, after these kernels."""
        number = self._enter(Launchers(group, calls))
        self._missing[number] = set(kernels)
        for kernel in self._missing[number]:
            self._waiting[kernel].append(number)
        return number

    def want(self, number: int) -> bool:
        """Allow a task to be taken; returns whether nobody wanted the task before."""
        new = number not in self._wanted
        self._wanted.add(number)
        if new and not self._missing.get(number):
            heapq.heappush(self._ready, (_cost(self.tasks[number]), number))
        return new

    def take(self) -> int | None:
        """Return the next task that waits for nothing, or None."""
        return heapq.heappop(self._ready)[1] if self._ready else None

    def finish(self, number: int) -> None:
        """Note that a task is done; tasks that waited for it may become ready."""
        for waiting in self._waiting[number]:
            self._missing[waiting].discard(number)
            if not self._missing[waiting] and waiting in self._wanted:
                heapq.heappush(self._ready, (_cost(self.tasks[waiting]), waiting))

    def drop(self) -> list[int]:
        """Drop all tasks that were not taken; returns those of them that were ready."""
        dropped = sorted(number for _, number in self._ready)
        self._ready.clear()
        self._waiting.clear()
        return dropped

    def _enter(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _cost(task: Task) -> int:
    """Return the rank of a task: long tasks, and tasks that others wait for, come first."""
    if isinstance(task, Launchers):
        return len(_LONGEST_FIRST) + 1
    kind = task.variant.source.kind
    return _LONGEST_FIRST.index(kind) if kind in _LONGEST_FIRST else len(_LONGEST_FIRST)
