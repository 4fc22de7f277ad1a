"""The caches of other JITs: laid before a program starts, kept as entries when it has written more.

`jitkern run` gives a program folders of ours for the JITs in `jits.JITS`. Files that the JITs leave
there become entries of the cache, which travel as all entries do: in layers, bundles and remotes.
"""

from __future__ import annotations

from jitkern._lazy import on_first_use

TYPE_CHECKING = False  # as in `typing`, whose import would delay `jitkern run`
if TYPE_CHECKING:
    from jitkern.adopt import (
        events as events,
        folders as folders,
        jits as jits,
        machine as machine,
        run as run,
        start as start,
    )
else:
    __getattr__ = on_first_use(__name__)
