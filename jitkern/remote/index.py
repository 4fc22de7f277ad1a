"""The index of a machine, which entries its bundles hold, and how many writers change it at once.

    {"bundles":[{"bytes":…,"entries":[…],"file":…,"package":…,"push":…,"version":…}, …],
     "schema":2}

The JSON is canonical. An index is not signed and only a hint: a wrong one causes misses, or bundles
that are then refused.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from jitkern.errors import JitkernError
from jitkern.named_tuple import NamedTuple
from jitkern.remote import layout
from jitkern.remote.patience import pause, retry
from jitkern.remote.store import Readable, Store, Tag

SCHEMA = 2
ATTEMPTS = 20  # to replace an index that others replace, too
_MOST_BYTES = 1 << 50  # more than any store takes; larger numbers are not even sums of sizes
_DIGEST = re.compile("[0-9a-f]{16}")


class Bundle(NamedTuple):
    """A bundle in an index.

    file: its name. bytes: its size. package, version: whose kernels it holds. entries: the digests
    in the names of its entries, sorted. push: what the bundles of one push have in common.
    """

    file: str
    bytes: int
    package: str
    version: str
    entries: tuple[str, ...]
    push: str = ""


class Index(NamedTuple):
    """An index. bundles: the newest of a package first."""

    bundles: tuple[Bundle, ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """Return the index in `data`. Raises ValueError for what `encode` would not have made."""
        try:
            value = json.loads(data)
            if value["schema"] != SCHEMA:
                raise ValueError(f"it has schema {value['schema']!r:.40}, not {SCHEMA}")
            bundles = tuple(
                Bundle(**{**row, "entries": tuple(row["entries"])}) for row in value["bundles"]
            )
            index = cls(bundles)
            if not all(map(_is_usable, bundles)) or index.encode() != data:
                raise ValueError("it is not in jitkern's format")
        except (KeyError, TypeError, RecursionError) as e:
            raise ValueError("it is not in jitkern's format") from e
        return index

    def encode(self) -> bytes:
        """Return the canonical JSON."""
        value = {"schema": SCHEMA, "bundles": [bundle._asdict() for bundle in self.bundles]}
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    def merged(self, new: Sequence[Bundle], keep: int) -> Index:
        """Return this index with new bundles in front, and without outdated ones of their packages.

        A bundle is outdated if newer ones of its package hold all its entries, or if `keep` newer
        pushes of its package are there.
        """
        packages = {bundle.package for bundle in new}
        kept: list[Bundle] = []
        pushes: dict[str, set[str]] = defaultdict(set)  # of newer bundles, by package
        known: dict[str, set[str]] = defaultdict(set)  # their entries
        for bundle in dict.fromkeys((*new, *self.bundles)):
            newer = pushes[bundle.package] - {bundle.push}
            outdated = len(newer) >= keep or known[bundle.package].issuperset(bundle.entries)
            if not outdated or bundle.package not in packages:
                kept.append(bundle)
                pushes[bundle.package].add(bundle.push)
                known[bundle.package].update(bundle.entries)
        return Index(tuple(kept))

    def holding(self, digest: str) -> Iterable[Bundle]:
        """Return the bundles that hold an entry. digest: the 16 hex digits in the entry's name."""
        return (bundle for bundle in self.bundles if digest in bundle.entries)


def read_index(store: Readable, machine: str) -> tuple[Index | None, Tag]:
    """Return the index of a machine and its tag, or None twice. Raises JitkernError."""
    name = layout.index_of(machine)
    found = retry(store.get, name, limit=layout.LARGEST_INDEX)
    if found is None:
        return None, None
    try:
        return Index.decode(found.data), found.tag
    except ValueError as e:
        raise JitkernError(
            f"the index {name} of {store.url} cannot be used: {e}. If no newer jitkern wrote it, "
            "delete this object, and push again"
        ) from e


def update_index(
    store: Store, machine: str, change: Callable[[Index], Index]
) -> tuple[Index, Index]:
    """Replace a machine's index by what `change` makes of it; return both.

    change: called with the index, which may be empty, as often as other writers are faster. Raises
    JitkernError for an index that jitkern did not write, and where other writers are faster each
    time.
    """
    name = layout.index_of(machine)
    for attempt in range(ATTEMPTS):
        found, tag = read_index(store, machine)
        old = found or Index()
        new = change(old)
        if new == old:
            return old, new
        data = new.encode()
        if len(data) > layout.LARGEST_INDEX:
            raise JitkernError(
                f"the index {name} of {store.url} would have {len(data)} bytes, and at most "
                f"{layout.LARGEST_INDEX} are read: push with a smaller --keep"
            )
        write = store.create if found is None else functools.partial(store.replace, tag=tag)
        if retry(write, name, data):
            return old, new
        time.sleep(pause(0.05, attempt))
    raise JitkernError(
        f"the index {name} of {store.url} was changed by others {ATTEMPTS} times in a row: "
        "push again when fewer push"
    )


def _is_usable(bundle: Bundle) -> bool:
    """Return whether the fields are what they should be, and texts can be printed."""
    texts = (bundle.file, bundle.package, bundle.version, bundle.push, *bundle.entries)
    return (
        all(isinstance(text, str) and text.isprintable() for text in texts)
        and layout.is_bundle(bundle.file)
        and type(bundle.bytes) is int
        and 0 < bundle.bytes <= _MOST_BYTES
        and all(map(_DIGEST.fullmatch, bundle.entries))
    )
