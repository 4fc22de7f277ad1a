"""The files that the service hands out: bundles in a directory of its own, bounded in bytes."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from jitkern._fork import after_fork

MOST_BYTES = 1 << 30  # of files that no index names; the least recently used go first


class Shelf:
    """Files by their names. A file that is open stays readable after its removal."""

    def __init__(self, folder: Path, most: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most = most
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._held: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()
        after_fork(self._lock)

    def add(self, name: str, owner: str = "") -> None:
        """Take a file of the directory over, which was written there. owner: holds it, if any."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            if owner:
                self._held[owner] = self._held.get(owner, frozenset()) | {name}
            self._sizes[name] = (self.folder / name).stat().st_size
            self._sizes.move_to_end(name)
            self._sweep()

    def hold(self, owner: str, names: Collection[str]) -> None:
        """Keep these files, and no others, for as long as `owner` names them."""
        with self._lock:
            self._held[owner] = frozenset(names)
            self._sweep()

    def opened(self, name: str) -> BinaryIO | None:
        """Return an open file, or None if it is not here."""
        with self._lock:
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)
            try:
                return (self.folder / name).open("rb")
            except FileNotFoundError:
                del self._sizes[name]
                return None

    def made(self, name: str, write: Callable[[Path], object]) -> BinaryIO | None:
        """Return an open file, which `write` writes to a path if it is not here."""
        file = self.opened(name)
        if file is None:
            write(self.folder / name)
            self.add(name)
            file = self.opened(name)
        return file

    def _sweep(self) -> None:
        held = frozenset[str]().union(*self._held.values())
        loose = [name for name in self._sizes if name not in held]
        left = sum(self._sizes[name] for name in loose)
        for name in loose[:-1]:  # the newest stays, however large it is
            if left <= self._most:
                break
            left -= self._sizes.pop(name)
            (self.folder / name).unlink(missing_ok=True)
