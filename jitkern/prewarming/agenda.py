"""Tasks in the order of their need: each is taken once, when what it waits for is done."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jitkern.prewarming.tasks import Group, Kernel, Launchers, Task
from jitkern.source.kinds import Variant
from jitkern.target import Target

_LONGEST_FIRST = ("extension", "triton")  # kinds of source


class Agenda:
    """Tasks by their numbers. All are entered before the first is taken."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._kernels: dict[tuple[str, Variant, Target], int] = {}
        self._ready: list[tuple[int, int]] = []
        self._wanted: set[int] = set()
        self._missing: dict[int, set[int]] = {}
        self._waiting: dict[int, list[int]] = defaultdict(list)

    def kernel(self, op: str, variant: Variant, target: Target) -> int:
        """The number of the task that compiles a variant; one, however often it is asked for."""
        known = op, variant, target
        if known not in self._kernels:
            self._kernels[known] = self._enter(Kernel(*known))
        return self._kernels[known]

    def launchers(self, group: Group, calls: list[tuple[Any, ...]], kernels: Iterable[int]) -> int:
        """The number of the task that makes what launches these kernels, once they are done."""
        number = self._enter(Launchers(group, calls))
        self._missing[number] = set(kernels)
        for kernel in self._missing[number]:
            self._waiting[kernel].append(number)
        return number

    def want(self, number: int) -> bool:
        """Have a task taken; returns whether nobody wanted it before."""
        new = number not in self._wanted
        self._wanted.add(number)
        if new and not self._missing.get(number):
            heapq.heappush(self._ready, (_cost(self.tasks[number]), number))
        return new

    def take(self) -> int | None:
        """The next task that waits for nothing."""
        return heapq.heappop(self._ready)[1] if self._ready else None

    def finish(self, number: int) -> None:
        """A task is done: others may have waited for it."""
        for waiting in self._waiting[number]:
            self._missing[waiting].discard(number)
            if not self._missing[waiting] and waiting in self._wanted:
                heapq.heappush(self._ready, (_cost(self.tasks[waiting]), waiting))

    def drop(self) -> list[int]:
        """Have no more taken; returns what was ready."""
        dropped = sorted(number for _, number in self._ready)
        self._ready.clear()
        self._waiting.clear()
        return dropped

    def _enter(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _cost(task: Task) -> int:
    """The smaller, the sooner it is taken: what takes long, and what others wait for."""
    if isinstance(task, Launchers):
        return len(_LONGEST_FIRST) + 1
    kind = task.variant.source.kind
    return _LONGEST_FIRST.index(kind) if kind in _LONGEST_FIRST else len(_LONGEST_FIRST)
