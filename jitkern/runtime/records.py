"""Records of calls: with which program and kernels later processes serve calls of a class.

A record is found by what a process knows without reading a file: the op, the source as declared,
the `Scope` of the launch function (its code and all that the code reads), the target, jitkern's own
code, and the class of the call: what a trace takes for granted of the arguments (dtypes, ranks,
which are None). It holds the program, the references to the entries of the launch runtime and of
the kernels, and the files that the kernels were compiled from (see `freshness`). This is the direct
mode of ccache: no preprocessor runs, and no key of a kernel is computed.

A class has a record for each branch that its launch function took, and one for each number that a
program holds for constant. If a configuration was chosen, the records are for the device model that
chose it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, jit, launch, runtime as runtime_room, target as targets
from jitkern._version import __version__
from jitkern.cache import records
from jitkern.cache.key import Key, label_of
from jitkern.errors import CacheError, JitkernError
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import binding, code_version
from jitkern.source.kinds import Generated, Source
from jitkern.trace.program import Program, parsed_program

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry
    from jitkern.calls.signature import Signature
    from jitkern.jit.load import Tell
    from jitkern.trace.scope import Scope
    from jitkern.trace.trace import Traced

MOST = 64  # records of a class; more replace those that were used longest ago
CONSTANT = 16  # of those that hold a number of their call for constant
STALE = 4  # of those for other files than the present ones, as of another checkout
TRACES = 16  # of the calls of a class, and of its scope, that are made without backoff
BACKOFF = 8, 16  # at most 2**8 calls are between two more programs, 2**16 between refused traces
_RUNTIME = Generated("runtime.c", text="")  # with which the runtime is loaded from its entry
_log = logging.getLogger(__name__)


class Record(NamedTuple):
    """A program, the references of its kernels and of the launch runtime, for a class of calls.

    entry, content: of the cache. fixed: the strings and lengths of lists that its calls have.
    example: the sizes and numbers of the call that was traced. constant: whether it is for calls of
    just these.
    """

    entry: Entry
    content: dict[str, Any]
    program: Program
    kernels: tuple[str, ...]
    runtime: str | None
    fixed: str
    example: str
    constant: bool

    def is_for(self, fixed: str, example: str) -> bool:
        """Return whether it may serve calls of these strings and lengths, sizes and numbers."""
        return self.fixed == fixed and (not self.constant or self.example == example)


class CallClass:
    """A class of calls of an op, and the state of those that no program served.

    Its calls have one launch function over the kernels of a source, built for a target, on a
    device. call: the class of their arguments, see `calls.signature.class_of`.
    """

    def __init__(
        self,
        signature: Signature,
        function: Callable[..., Any],
        source: Source,
        target: targets.Target,
        device: torch.device,
        call: tuple[str, ...],
    ) -> None:
        self.signature, self.function, self.source = signature, function, source
        self.target, self.device, self.call = target, device, call
        self.records: list[Record] = []  # of the cache, that were not tried yet
        self.scope: Scope | None = None  # the scope of these records
        self.fetches = 0  # of this process when these records were looked up
        self.refusals = 0  # traces that failed
        self.traces = 0  # that gave a program, and changes of what such a program has read
        self.backoff = 0  # calls until the next trace: exponential backoff
        self.traced = False  # once is enough as long as there is no runtime
        self.refused = ""  # why the calls keep the Python launcher
        self.rejects: object = None  # a program that C had, perhaps, as it missed a call
        self.forgotten = False  # whether the launch function was declared again

    def is_due(self) -> bool:
        """Whether to trace a call that no program served."""
        self.backoff -= self.backoff > 0
        return not self.backoff and not (self.traced and binding.runtime() is None)

    def back_off(self, *, refused: bool) -> None:
        """Trace less often, after a trace that gave one program more, or none if `refused`."""
        if refused:
            self.refusals += 1
            self.backoff = 1 << min(self.refusals, BACKOFF[1])
        else:
            self.traces += 1
            self.backoff = 1 << min(max(0, self.traces - TRACES), BACKOFF[0])

    def key(self, scope: Scope, model: str = "") -> Key | None:
        """Return the key that records of this class share; None if such calls have none.

        model: the device model that they are for, "" for any.
        """
        source, target, code = self.source, self.target, code_version.digest()
        if not (scope.portable and code):
            return None
        flags, declared = source.every_flag, runtime_room.freshness.declaration_of(source)
        exact = target.for_host_code(native=getattr(source, "native", False))
        inputs = {
            "arguments": self.signature.schema, "call": [*self.call], "code": code,
            "cold": getattr(getattr(self.function, "tuning", None), "cold", False),
            "device": (self.device.index if "device" in scope.attributes else 0) or 0,
            "machine": [exact.arch, targets.processor_for(flags)], "model": model,
            "source": {"kind": source.kind, "declared": declared},
            "scope": scope.identity,
        }  # fmt: skip
        op, place = self.signature.name, str(target.for_host_code())
        key = records.record_key("call", op, place, "", inputs)
        label = ".".join(("call", *self.call))[:80]
        return key._replace(label=label_of(op, label, place, f".{key.digest[:8]}"))


def reader() -> records.Reader:
    """Return a reader under the settings of the moment."""
    return records.Reader(config.current(), lambda *place: jit.open_cache().look_up(*place).entry)


def found(calls: CallClass, scope: Scope, example: str, read: records.Reader) -> list[Record]:
    """Return the records of a class of calls, likely ones first; malformed ones are left out."""
    models = [""]
    if calls.source.declares or hasattr(calls.function, "tuning"):
        models.append(launch.tuned.model_of(calls.device))
    keys = [key for model in models if (key := calls.key(scope, model))]
    return sorted(of_keys(read, *keys), key=lambda one: one.example != example)


def of_keys(read: records.Reader, *keys: Key) -> Iterator[Record]:
    """Yield the records of these keys, whatever files they are for; malformed ones are left out."""
    for entry in read.alternatives(*keys):
        try:
            yield _record(entry, records.content_of(entry))
        except (AttributeError, LookupError, TypeError, ValueError) as e:
            _log.info("%s is not used: %s", entry.path, e)


def is_fresh(kept: Record, calls: CallClass) -> bool:
    """Return whether a record matches the current files of a source. Raises nothing."""
    op, source, target = calls.signature.name, calls.source, calls.target
    try:
        return runtime_room.freshness.is_current(op, source, target, kept.content)
    except (AttributeError, LookupError, TypeError, ValueError, JitkernError, OSError) as e:
        _log.info("%s is not used: %s", kept.entry.path, e)
        return False


def adopt_runtime(record: Record, read: records.Reader, tell: Tell) -> None:
    """Load the launch runtime of a record, if this process has not looked for one.

    tell: of `jit.load.load_entry`.
    """
    if not binding.is_looked_up() and record.runtime:
        entry = read.find(record.runtime)
        if entry and entry.op == binding.OP:
            binding.adopt(jit.load.load_entry(_RUNTIME, entry, tell))


def _record(entry: Entry, content: dict[str, Any]) -> Record:
    """Return the record with a content. Raises TypeError and ValueError for a malformed one."""
    kernels, runtime = content["kernels"], content["runtime"]
    if not all(isinstance(reference, str) for reference in [*kernels, runtime or ""]):
        raise ValueError("it does not name entries")
    program = parsed_program(content["program"])
    fixed, example = str(content["fixed"]), str(content["example"])
    constant = bool(content["constant"])
    return Record(entry, content, program, tuple(kernels), runtime, fixed, example, constant)


def keep(calls: CallClass, traced: Traced, read: records.Reader) -> tuple[Entry, bool] | None:
    """Publish the record of a trace; returns its entry, and whether the entry is new.

    Returns None for calls that have no records, without a measured choice, for a source that was
    edited after its kernels were loaded, and if the cache cannot be written.
    """
    key = None if traced.model is None else calls.key(traced.scope, traced.model)
    if key is None:
        return None
    stored = [*of_keys(read, key)]
    if there := _matching(stored, calls, traced):
        read.used(there)
        return there, False
    kernels = [kernel.variant for kernel in traced.kernels]
    needed = runtime_room.freshness.dependencies(calls.source, calls.target, kernels)
    if not needed or [k.reference for k in traced.kernels] != needed.references:
        return None
    known = [one for one in stored if is_fresh(one, calls)]
    stale = [one for one in stored if one not in known]
    content = {
        "program": traced.program, "kernels": needed.references, "runtime": _runtime(calls.target),
        "fixed": traced.fixed, "example": traced.example,
        "constant": bool(traced.frozen), **needed.content,
    }  # fmt: skip
    if not code_version.is_what_runs():
        return None
    cache = jit.open_cache()
    free, bound = ([one for one in known if one.constant == c] for c in (False, True))
    for kept, most in ((free, MOST - 1), (bound, CONSTANT - 1), (stale, STALE)):
        own = [one.entry for one in kept if one.entry.root == cache.root]
        for entry in sorted(own, key=records.last_use, reverse=True)[most:]:
            with suppress(CacheError):
                cache.remove(entry.path)
    by = {"name": "jitkern", "version": __version__}
    new = records.write(cache, records.one_of(key, content), content, by)
    read.changed()
    return (new, True) if new else None


def entry_of(calls: CallClass, traced: Traced) -> Entry | None:
    """Return the entry of the record of a trace, or None."""
    key = calls.key(traced.scope, traced.model or "")
    return _matching(of_keys(reader(), key), calls, traced) if key else None


def _matching(stored: Iterable[Record], calls: CallClass, traced: Traced) -> Entry | None:
    """Return the entry of the fresh record with the program and the kernels of a trace, if any."""
    wanted = traced.program, tuple(kernel.reference for kernel in traced.kernels)
    for one in stored:
        is_same = (one.program, one.kernels) == wanted
        fits = one.is_for(traced.fixed, traced.example)
        if is_same and fits and is_fresh(one, calls):
            return one.entry
    return None


def _runtime(target: targets.Target) -> str | None:
    """Return the reference to the launch runtime that serves a target here; None elsewhere."""
    here = targets.Target.current("cpu").for_host_code()
    host = target.for_host_code()
    if (host.platform, host.torch) != (here.platform, here.torch):
        return None
    return _runtime_here()


@functools.cache
def _runtime_here() -> str:
    return jit.load.key_here(binding.variant()).reference
