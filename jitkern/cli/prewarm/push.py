"""Push what a prewarm has built or found to a remote."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitkern import jit, prewarming, remote
from jitkern.cache_tools.check import human_bytes
from jitkern.cli.output import YELLOW, say
from jitkern.cli.remote.connection import telling
from jitkern.prewarming.tasks import Group, Result, entries_of
from jitkern.remote.store import Store


def push(store: Store, key: Path | None, results: Iterable[Result], groups: Sequence[Group]) -> int:
    """Push what was built or found; return the bytes that were sent. Raises JitkernError.

    key: the private key that signs it, or None. groups: of a part of a prewarm, those of all parts,
    which count as one push: an index keeps the last few pushes alone.
    """
    part_of = prewarming.shards.name_of(groups) if groups else ""
    entries = entries_of(results)
    if not entries:
        say("nothing was built or found, so nothing is pushed", code=YELLOW)
        return 0
    with telling(store):
        pushed = remote.publish.push(
            jit.open_cache(), entries, store,
            key=key, unsigned=key is None, part_of=part_of,
        )  # fmt: skip
    sent = sum(done.uploaded for done in pushed)
    print(f"{human_bytes(sent)} sent to {store.url}", file=sys.stderr)
    if key is None:
        say(
            "what was pushed is not signed: machines use it only if `trusted_remotes` in their "
            "settings file names the URL; --key FILE signs it",
            code=YELLOW,
        )
    return sent
