"""The calls that a fleet requested, recorded for `jitkern prewarm --from` of a release."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from jitkern.calls.record import MOST, append
from jitkern.errors import SettingError
from jitkern.service.builds import Outcome
from jitkern.service.request import Asked

MOST_BYTES = 64 << 20  # of the file: clients choose the targets, and so how many kernels there are
_log = logging.getLogger(__name__)


class CallLog:
    """Appends each distinct call to a file, as JITKERN_RECORD does.

    Of calls that need the same kernels, MOST are kept. Calls that cannot be built are left out, but
    for those that only lack a compiler here.
    """

    def __init__(self, path: Path) -> None:
        """Take a file over, which may have lines already. Raises SettingError."""
        self._path = path
        self._alike: Counter[Any] = Counter()
        try:
            with path.open("a+b") as file:
                file.seek(0)
                self._seen = {hash(line.rstrip(b"\n")) for line in file}
                self._left = MOST_BYTES - file.tell()
        except OSError as e:
            raise SettingError(f"cannot write the recording {path}: {e.strerror}") from e

    def note(self, asked: Asked, outcome: Outcome) -> None:
        """Append the call of a request, for one thread at a time. Raises nothing."""
        line = asked.line.encode()
        alike = (asked.op, outcome.kernels or outcome.reason)
        is_new = hash(line) not in self._seen and self._alike[alike] < MOST
        if self._left <= 0 or outcome.failed or not is_new:
            return
        self._seen.add(hash(line))
        self._alike[alike] += 1
        self._left -= len(line) + 1
        if self._left <= 0:
            _log.warning("%s has %d MiB: no further call is recorded", self._path, MOST_BYTES >> 20)
            return
        try:
            append(self._path, line + b"\n")
        except OSError as e:
            _log.warning("cannot record a call of %s in %s: %s", asked.op, self._path, e)
