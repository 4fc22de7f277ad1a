"""A build of the service, as a worker performs it: prewarm for one call, and pack the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jitkern import cache_tools, config, jit
from jitkern.cache.store import Entry
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import OF_ALL_OPS
from jitkern.calls import record
from jitkern.calls.samples import Sample
from jitkern.named_tuple import NamedTuple
from jitkern.op.op import Op
from jitkern.prewarming.api import prewarm
from jitkern.prewarming.op_calls import OpCalls
from jitkern.prewarming.tasks import entries_of
from jitkern.remote.bundles import digest_of
from jitkern.service.request import Asked

LONGEST_REASON = 4000  # letters of what a client is told


class Outcome(NamedTuple):
    """The end of a build.

    status: 200, 422 if it cannot be built, or 503 if nothing can be built now.
    reason: why not all was built, or "". failed: whether a build failed, and not only lacked a
    compiler. bundle: the name of the file with all entries, or "". digests: theirs. files: SHA-256
    of the files of the kernels, by their names. kernels: digests of the kernels alone. built: the
    number of new entries.
    """

    status: int
    reason: str = ""
    failed: bool = False
    bundle: str = ""
    digests: frozenset[str] = frozenset()
    files: Mapping[str, str] = {}
    kernels: tuple[str, ...] = ()
    built: int = 0


@dataclass(frozen=True)
class CallBuilder:
    """Builds the requests, one after the other.

    ops: the ops that may be built. folder: the directory for bundles. key: the private key that
    signs entries, or None.
    """

    ops: Mapping[str, Op]
    folder: Path
    key: Path | None

    def __call__(self, asked: Asked, jobs: int) -> Outcome:
        """Build a request with `jobs` compilers at once. Raises JitkernError."""
        try:
            call = record.parsed(asked.line)
        except ValueError as e:
            return Outcome(422, f"the call is not a line of a recording: {e}", failed=True)
        op = self.ops[call.op]
        misfit = op.signature.misfit(call.args)
        sample = Sample("the call", call.args, misfit and f"the call does not fit the op: {misfit}")
        # No client waits for the node, which takes 20 s: what was prewarmed here is handed out.
        wanted = OpCalls(op, {(call.device, call.kind): [sample]}, node=False)
        # Servers are no remotes of a service: it might ask itself, and wait.
        remote = tuple(url for url in config.current().remote if not url.startswith("http"))
        with config.using(remote=remote):
            results = prewarm([wanted], asked.targets, jobs=jobs, keep_going=True)
        entries = entries_of(results)
        reasons = dict.fromkeys(r.reason for r in results if r.status in ("failed", "skipped"))
        reason = "\n".join(reasons)[:LONGEST_REASON]
        failed = any(result.status == "failed" for result in results)
        if not entries:
            return Outcome(422, reason or "there is nothing to build for this call", failed)
        cache = jit.open_cache()
        if self.key:
            signing.sign_missing(cache, entries, self.key)
        bundle = f"{asked.id}.tar"
        cache_tools.pack(cache, entries, self.folder / bundle)
        kernels = [entry for entry in entries if _files_of(entry)]
        return Outcome(
            200, reason, failed, bundle,
            frozenset(digest_of(entry) for entry in entries),
            {name: sha for entry in kernels for name, sha in _files_of(entry).items()},
            tuple(sorted(map(digest_of, kernels))),
            sum(result.status == "built" for result in results),
        )  # fmt: skip


def _files_of(entry: Entry) -> dict[str, str]:
    """Return the SHA-256 of each file that a kernel was compiled from; {} for other entries."""
    if entry.op in OF_ALL_OPS:
        return {}
    return dict(entry.manifest.inputs.get("source", {}).get("closure", {}))
