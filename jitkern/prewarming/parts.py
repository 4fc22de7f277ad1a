"""A part of a prewarm as another process does it: groups go there, and their entries come back.

The process may be on another machine. It imports the packages of the ops by name, builds into a
cache of its own, and returns what it built as the bytes of a bundle, so it needs no right to write
anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jitkern import config, jit
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle, explain
from jitkern.calls.record import meta_tensor
from jitkern.calls.samples import Sample
from jitkern.compilers import parallelism
from jitkern.errors import DeclarationError, JitkernError
from jitkern.op.all_ops import OPS
from jitkern.prewarming.builder import Builder
from jitkern.prewarming.identity import code_of_jitkern
from jitkern.prewarming.records import Known, identity_of
from jitkern.prewarming.tasks import Group, Result, entries_of
from jitkern.prewarming.wanted import Wanted
from jitkern.target import Target


class Share(NamedTuple):
    """A group and some of its calls, by names that each process with the package knows.

    module: the module that declares the op. folder: the directory of its package, for a process
    that does not find the package on its module path; "" if unknown.
    place: the position of the source among those of the device.
    identity: what decides the keys of the entries, as `keys_of` returns it.
    node: see `Wanted`.
    """

    op: str
    module: str
    folder: str
    device: str
    place: int
    target: str
    calls: Sequence[Sample]
    identity: dict[str, Any]
    node: bool


class Part(NamedTuple):
    """A part of a prewarm, with all that the process needs which does it.

    shares: a list of Share, pickled by `packed`. given: the bytes of a bundle of entries that are
    there already, or b"". settings: settings to build under. code: the digest of jitkern's files.
    """

    shares: bytes
    given: bytes
    settings: dict[str, Any]
    keep_going: bool
    code: str


class Outcome(NamedTuple):
    """The outcome of a part.

    bundle: the bytes of a bundle of the entries that it was not given, or b"" if there are none.
    known: the results for each share. problem: why nothing was done, or "".
    """

    host: str
    seconds: float
    bundle: bytes = b""
    known: Sequence[Known] = ()
    problem: str = ""


def perform(part: Part) -> Outcome:
    """Do a part in this process. Errors of jitkern become the problem of the outcome."""
    started = time.monotonic()
    try:
        outcome = Outcome(platform.node(), 0.0, *_performed(part))
    except JitkernError as e:
        outcome = Outcome(platform.node(), 0.0, problem=str(e))
    return outcome._replace(seconds=time.monotonic() - started)


def _performed(part: Part) -> tuple[bytes, list[Known]]:
    if part.code != code_of_jitkern():
        raise DeclarationError(
            f"the jitkern on {platform.node()} is not the one that started the prewarm: install "
            "the same version in the same way on both"
        )
    with (
        tempfile.TemporaryDirectory(prefix="jitkern-") as folder,
        config.using(
            **part.settings, cache_dir=Path(folder, "cache"), fsync=False, fallback="raise",
            max_size=0, max_age=0, record=None,
        ),
    ):  # fmt: skip
        found = [_found(share) for share in pickle.loads(part.shares)]  # noqa: S301  whoever sends it runs us
        cache = jit.open_cache()
        adopt(cache, part.given)
        given = set(map(str, cache.paths()))
        builder = Builder(parallelism.limit(), lambda _: None, keep_going=part.keep_going)
        builder.build([group for group in found if isinstance(group, Group)])
        known = [builder.known[group] if isinstance(group, Group) else group for group in found]
        results = (result for group in known for step in group.steps for result in step)
        entries = entries_of(result for result in results if result.path not in given)
        data = bundle.packed(cache, entries) if entries else b""
    return data, known


def adopt(cache: Cache, data: bytes) -> None:
    """Publish the entries of a bundle that the cache lacks. Raises BundleError, CacheError.

    No signature is asked for: the bytes come from a process of the same prewarm, whose results are
    believed as well.
    """
    if data:
        bundle.adopt(cache, io.BytesIO(data), compressed=False)


def packed(shares: Sequence[Share]) -> bytes:
    """Return shares as bytes. Raises DeclarationError for a call that cannot be sent."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(shares)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as e:
        names = ", ".join(sorted({share.op for share in shares}))
        raise DeclarationError(
            f"the calls of {names} cannot be sent to another process, {e}: prewarm these ops "
            "without an engine"
        ) from e
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that keeps the storage offset of a meta tensor, which Torch's own way loses."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make the value anew, of a plain meta tensor."""
        plain = type(value) is torch.Tensor and value.is_meta and value.layout is torch.strided
        if not plain or value.is_conj() or value.is_neg():
            return NotImplemented
        layout = (tuple(value.shape), value.stride(), value.storage_offset())
        return _tensor, (value.dtype, *layout, value.requires_grad)


def _tensor(
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    requires_grad: bool,  # noqa: FBT001  pickle passes arguments by position
) -> torch.Tensor:
    return meta_tensor(dtype, shape, stride, offset).requires_grad_(requires_grad)


def keys_of(group: Group) -> dict[str, Any]:
    """Return what decides the keys of a group's entries; {} if unknown."""
    found = identity_of(group)
    if found is None:
        return {}
    tag = sys.implementation.cache_tag  # code objects differ between versions of Python
    launch = {f"launch function in {tag}": found.launch} if found.launch else {}
    return {"schema of the op": group.op.schema, **launch, **found.inputs}


def name_of(groups: Iterable[Group]) -> str:
    """Return a name for a prewarm of these groups, equal wherever their entries would be."""
    return hashlib.sha256(json.dumps([keys_of(group) for group in groups]).encode()).hexdigest()


def _found(share: Share) -> Group | Known:
    """Return the group that a share names here, or the failure as its results."""
    try:
        return _group(share)
    except DeclarationError as e:
        failed = Result(share.op, "", share.target, "failed", reason=str(e))
        return Known(([failed], [], []), [])


def _group(share: Share) -> Group:
    """Return the group that a share names here. Raises DeclarationError."""
    here = f"{share.op} on {platform.node()}"
    if share.op not in OPS:
        package = share.module.partition(".")[0]
        try:
            with found_in(package, [share.folder]):
                importlib.import_module(share.module)
        except (Exception, SystemExit) as e:  # whatever its author's code raises
            raise DeclarationError(
                f"{here}: importing {share.module} failed, {e!r}: install the same {package} there"
            ) from e
    sources = OPS[share.op].sources.get(share.device, ()) if share.op in OPS else ()
    if len(sources) <= share.place:
        raise DeclarationError(f"{here}: {share.module} declares it otherwise; install the same")
    source = sources[share.place]
    calls = {(share.device, source.kind): share.calls}
    group = Group(Wanted(OPS[share.op], calls, node=share.node), source, Target.parse(share.target))
    keys = keys_of(group)
    both = share.identity.keys() & keys.keys()
    differences = explain.differences(
        {name: keys[name] for name in both}, {name: share.identity[name] for name in both}
    )
    if differences:
        raise DeclarationError(
            f"{here} is not the op that was to be built: {'; '.join(differences)}; install the "
            f"same {share.module.partition('.')[0]} there"
        )
    return group


class _Named:
    """A finder of one package, and nothing else, in folders that are not on the module path."""

    def __init__(self, package: str, folders: list[str]) -> None:
        self._package = package
        self._folders = folders

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of the package, for an import that no other finder satisfies."""
        return PathFinder.find_spec(name, self._folders) if name == self._package else None


@contextlib.contextmanager
def found_in(package: str, folders: list[str]) -> Iterator[None]:
    """Let imports find one package in these folders, and nothing else there."""
    finder: Any = _Named(package, folders)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
