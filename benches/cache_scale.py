"""What a large cache costs: one lookup, among few entries and among many, and each command.

A lookup is what a first call does: it opens, checks and hashes one entry of 16 KiB. Few and many
take turns, over entries in random order, in one warm process; the ratio is of medians. Commands are
whole processes (`jitkern cache …`), the ratio theirs to a run of the same on few entries. Entries
are the same in both caches, spread over four targets; nothing is synced while they are made.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benches import common
from jitkern.cache.key import Key, digest_of
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache

FEW = 10
MANY = 10_000
ROUNDS = 5
LOOKUPS = 400
TARGETS = [f"cuda-sm_{arch}-cu130-torch2.13.0" for arch in (80, 89, 90, 100)]
COMMANDS = {
    "ls": ("ls",),
    "stats": ("stats",),
    "verify": ("verify",),
    "prune": ("prune", "--max-size", "1G", "--dry-run"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--entries", type=int, default=MANY, help="in the large cache")
    options = common.parsed(parser, arguments)
    with tempfile.TemporaryDirectory(prefix="cache_scale-") as folder:
        caches = {n: Cache(Path(folder, str(n)), fsync=False) for n in (FEW, options.entries)}
        keys = {n: fill(cache, n) for n, cache in caches.items()}
        us = lookups(caches, keys, options.rounds or ROUNDS)
        seconds = {
            name: {n: command_seconds(cache, *words) for n, cache in caches.items()}
            for name, words in COMMANDS.items()
        }
    ratio = {"lookup": us[options.entries] / us[FEW]}
    ratio.update({name: took[options.entries] / took[FEW] for name, took in seconds.items()})
    rows = [
        ("lookup, us", f"{us[FEW]:.1f}", f"{us[options.entries]:.1f}", f"{ratio['lookup']:.2f}")
    ]
    rows += [
        (f"{name}, s", f"{took[FEW]:.3f}", f"{took[options.entries]:.3f}", f"{ratio[name]:.2f}")
        for name, took in seconds.items()
    ]
    common.report(
        options, ("", f"{FEW} entries", f"{options.entries} entries", "ratio"), rows,
        entries={"few": FEW, "many": options.entries},
        us={"few": us[FEW], "many": us[options.entries]},
        seconds={n: {"few": t[FEW], "many": t[options.entries]} for n, t in seconds.items()},
        ratio=ratio,
    )  # fmt: skip
    return 0


def fill(cache: Cache, count: int) -> list[Key]:
    """Publish `count` entries, the same ones each time."""
    made = random.Random(0)
    keys = []
    for i in range(count):
        inputs = {
            "schema": 0,
            "op": f"bench::op{i // 8}",
            "source": {"kind": "nvrtc", "closure": {"op.cu": digest_of({"op": i // 8})}},
            "flags": ["-std=c++17", "--use_fast_math"],
            "variant": {"function": "op", "template": [["T", f"f{i % 8}"]]},
            "target": TARGETS[i % len(TARGETS)],
        }
        key = Key(inputs, digest_of(inputs), f"bench.op{i // 8}.f{i % 8}")
        with cache.staging() as staging:
            (staging / "kernel.cubin").write_bytes(made.randbytes(16 << 10))
            cache.publish(key, staging, Manifest(inputs, compiler={"name": "none"}))
        keys.append(key)
    return keys


def lookups(caches: dict[int, Cache], keys: dict[int, list[Key]], rounds: int) -> dict[int, float]:
    """The median time of a lookup in each cache, in microseconds."""
    order = random.Random(1)
    times: dict[int, list[float]] = {n: [] for n in caches}
    for _ in range(rounds):
        for n, cache in caches.items():
            for key in order.choices(keys[n], k=LOOKUPS):
                start = time.perf_counter()
                found = cache.find(key)
                times[n].append((time.perf_counter() - start) * 1e6)
                assert found
    return {n: statistics.median(taken) for n, taken in times.items()}


def command_seconds(cache: Cache, *words: str) -> float:
    """What `jitkern cache WORDS` takes, whole."""
    environment = {**os.environ, "JITKERN_CACHE_DIR": str(cache.root)}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "jitkern", "cache", *words],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
