"""The common base of kernels from elsewhere: their files, and their launches through the cache."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config, jit, launch
from jitkern.cache.entry import Entry
from jitkern.errors import DeclarationError, NotCached
from jitkern.launch.call import Call
from jitkern.launch.devices import Devices
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.launch.launched import LaunchedKernel

_LONGEST = 80  # characters of a file's name that the names of entries contain


class RawKernel:
    """A function of a source, called on the device of its tensors.

    target: the target to compile for; by default that device. Compiled variants are remembered, so
    an edit of the file counts only for kernels that are made after the edit.
    """

    device = "cuda"

    def __init__(self, source: Source, function: str, target: Target | None) -> None:
        stem = re.sub(r"\W", "_", source.paths[0].stem)[:_LONGEST]
        self.op = f"raw::{stem}"
        self.source = source.replace(strided=True)  # it gets what it is called with
        self.function = function
        self._devices = Devices(self.op, self.device, target)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.function} of {self.source.paths[0]}>"

    def _start(self, call: Call) -> LaunchedKernel | None:
        runner = self._devices.runner(self.source, self._devices.device_of(call.args))
        try:
            return runner(call)
        except NotCached as e:
            waits = config.current().compile == "background" and not jit.capturing()
            if not waits or not isinstance(e.variant, Variant):
                raise self._not_cached(e) from None
            launch.declared.make(e.variant, runner.target)  # there is no reference to run meanwhile
            return runner(call)

    def _target(self, target: Target | str | None) -> Target:
        return target_of(target) or self._devices.target()

    def _ensure(self, variant: Variant, target: Target) -> Entry:
        try:
            return jit.ensure(variant, target)
        except NotCached as e:
            raise self._not_cached(e) from None

    def _not_cached(self, error: NotCached) -> NotCached:
        problem = error.what.removesuffix("Prewarm it:")
        return NotCached(
            f"{problem}Compile it beforehand: its `compile` method builds it for any target",
            **vars(error),
        )


def target_of(target: Target | str | None) -> Target | None:
    """Parse the text of a target; return a Target or None unchanged. Raises TargetError."""
    return Target.parse(target) if isinstance(target, str) else target


def place_of(path: str | Path, depth: int = 2, *, folder: bool = False) -> Path:
    """Return a file or folder, relative to the file of the caller `depth` frames up, else to here.

    Raises DeclarationError.
    """
    caller = sys._getframe(depth).f_globals.get("__file__")
    bases = [Path(caller).absolute().parent] if caller else []
    places = [base / path for base in dict.fromkeys([*bases, Path.cwd()])]
    for place in places:
        if place.is_dir() if folder else place.is_file():
            return place
    listed = " or ".join(dict.fromkeys(map(str, places)))
    raise DeclarationError(f"there is no {'directory' if folder else 'file'} {listed}")
