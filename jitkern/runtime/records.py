"""Records of calls: with which program and kernels later processes serve calls of a class.

A record is found by what a process knows without reading a file: the op, the source as declared,
the `World` of the launch function (its code and all that the code reads), the target, jitkern's own
code, and the class of the call: what a trace takes for granted of the arguments (dtypes, ranks,
which are None). It holds the program, the references to the entries of the launch runtime and of
the kernels, and the files that the kernels were compiled from, by their content, with the paths
where no file may be. This is the direct mode of ccache: no preprocessor runs, and no key is
computed. Where files are not all that decides (variables, paths in flags, a macro's `#include`), a
digest of the inputs of the kernels' keys takes their place.

A class has a record for each branch that its launch function took. A program that holds a number of
its call for constant is in the class of just these numbers. If a configuration was chosen, the
records are for the device model that chose it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitkern import __version__, config, jit, launch, source as sources, target as targets
from jitkern.cache import events, records
from jitkern.cache.key import Key, label_of
from jitkern.cache.records import Reference, reference_to
from jitkern.calls.call_class import class_of, example_of
from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import binding, own_code
from jitkern.source.kinds import Cpp, Cuda, Generated, Source, Triton, Variant, shared_include
from jitkern.trace.program import Program, parsed_program

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry
    from jitkern.calls.signature import Signature
    from jitkern.runtime.slot import Launcher
    from jitkern.trace.trace import Traced
    from jitkern.trace.world import World

MOST = 64  # records of a class; more replace those that were used longest ago
_FOLLOWED = (Cuda, Cpp, Triton)  # whose compilers are jitkern's own code, which a key covers
_PLAIN = (str, bool, int, float, type(None))
_PLACES = ("home", "include", "module", "others", "package", "text", "written_at")  # not compiled
_RUNTIME = Generated("runtime.c", text="")  # with which the runtime is loaded from its entry
_EVERYWHERE = "/usr/local/include/"  # searched by all compilers, so that its paths mean the same
_UP = f"..{os.sep}"
_log = logging.getLogger(__name__)
Place = tuple[int, str]  # the number of a base (see `_bases`), and a path relative to it


class Record(NamedTuple):
    """A program and the entries of its kernels and of the launch runtime, for a class of calls.

    example: the sizes and numbers of the call that was traced.
    """

    program: Program
    kernels: tuple[Reference, ...]
    runtime: Reference | None
    example: str


class Class(NamedTuple):
    """Calls of one class: what the keys of their records are made of."""

    signature: Signature
    launcher: Launcher
    world: World
    call: tuple[str, ...]
    example: str

    @classmethod
    def of(
        cls, signature: Signature, launcher: Launcher, world: World, args: Sequence[Any]
    ) -> Class:
        """Return the class of a call with these arguments."""
        return cls(signature, launcher, world, class_of(args), example_of(args))

    def key(self, model: str = "", *, constant: bool = False) -> Key | None:
        """Return the key that records of this class share; None if such calls have none.

        model: the device model that they are for, "" for any. constant: whether they are for calls
        of the same sizes and numbers alone.
        """
        (_, source, target, device), world = self.launcher, self.world
        if world.refusal or not world.kept:
            return None
        flags = source.every_flag
        exact = target.for_host_code(native=getattr(source, "native", False))
        call = [*self.call, *([self.example] if constant else [])]
        inputs = {
            "arguments": self.signature.schema, "call": call, "code": own_code.digest(),
            "device": (device.index if "device" in world.attributes else 0) or 0,
            "machine": [exact.arch, targets.processor_for(flags)], "model": model,
            "source": {"kind": source.kind, "declared": _declared(source)},
            "world": world.identity,
        }  # fmt: skip
        op, place = self.signature.name, str(target.for_host_code())
        key = records.key_of("call", op, place, "", inputs)
        label = ".".join(("call", *self.call))[:80]
        return key._replace(label=label_of(op, label, place, f".{key.digest[:8]}"))


def reader() -> records.Reader:
    """Return a reader under the settings of the moment."""
    return records.Reader(config.current(), lambda *place: jit.open_cache().look_up(*place).entry)


def found(calls: Class, read: records.Reader) -> list[tuple[Entry, Record]]:
    """Return the records that may serve such calls, likely ones first; odd ones are left out."""
    models = [""]
    if calls.launcher.source.kind == "triton" or hasattr(calls.launcher.function, "tuning"):
        models.append(launch.tuned.model_of(calls.launcher.device))
    keys = [calls.key(model, constant=constant) for model in models for constant in (True, False)]
    kept = of_keys([key for key in keys if key], calls.launcher, read)
    return sorted(kept, key=lambda one: one[1].example != calls.example)


def of_keys(
    keys: Sequence[Key], launcher: Launcher, read: records.Reader
) -> Iterator[tuple[Entry, Record]]:
    """Yield the records of these keys that are for the present files of the launcher's source."""
    fresh = _Fresh(launcher.source, launcher.target)
    for entry in read.alternatives(*keys):
        try:
            content = records.content_of(entry)
            if fresh.are(content):
                yield entry, _record(content)
        except (AttributeError, LookupError, TypeError, ValueError) as e:
            _log.info("%s is not used: %s", entry.path, e)


def has_runtime(record: Record, read: records.Reader) -> bool:
    """Return whether this process has the launch runtime, or could load the one of a record."""
    if not binding.is_looked_up() and record.runtime and (entry := read.find(record.runtime)):
        binding.adopt(jit.load.load_entry(_RUNTIME, entry))
    return binding.runtime() is not None


def _record(content: dict[str, Any]) -> Record:
    """Return the record with a content. Raises TypeError and ValueError for an odd one."""
    kernels, runtime = content["kernels"], content["runtime"]
    if not all(map(_is_reference, [*kernels, *([runtime] if runtime else [])])):
        raise ValueError("it does not name entries")
    program = parsed_program(content["program"])
    named = tuple(runtime) if runtime else None
    return Record(program, tuple(map(tuple, kernels)), named, str(content["example"]))


def _is_reference(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(v, str) for v in value)


def keep(calls: Class, traced: Traced) -> tuple[Entry, bool] | None:
    """Publish the record of a trace; returns its entry, and whether the entry is new.

    Returns None for calls that have no records, without a measured choice, for a source that was
    edited after its kernels were loaded, and if the cache cannot be written.
    """
    _, source, target, _ = calls.launcher
    key = None if traced.model is None else calls.key(traced.model, constant=bool(traced.frozen))
    current = [reference_to(jit.key_of(kernel.variant, target)) for kernel in traced.kernels]
    if key is None or [kernel.reference for kernel in traced.kernels] != current:
        return None
    program = traced.program
    known = list(of_keys([key], calls.launcher, reader()))
    for entry, record in known:
        if (record.program, record.kernels) == (program, tuple(current)):
            events.use(entry.path)
            return entry, False
    content = {
        "program": program, "kernels": current, "runtime": _runtime(target),
        "example": calls.example, **_dependencies(source, target),
    }  # fmt: skip
    if not own_code.is_what_runs():
        return None
    cache = jit.open_cache()
    if len(known) >= MOST:
        own = [entry for entry, _ in known if entry.root == cache.root]
        for entry in own[: len(known) - MOST + 1]:
            cache.remove(entry.path)
    by = {"name": "jitkern", "version": __version__}
    new = records.write(cache, records.one_of(key, content), content, by)
    return (new, True) if new else None


def _runtime(target: targets.Target) -> Reference | None:
    """Return the reference to the launch runtime that serves a target here; None elsewhere."""
    here = targets.Target.current("cpu").for_host_code()
    host = target.for_host_code()
    if (host.platform, host.torch) != (here.platform, here.torch):
        return None
    return _runtime_here()


@functools.cache
def _runtime_here() -> Reference:
    return reference_to(jit.load.key_here(binding.variant()))


def _declared(source: Source) -> str:
    """Return what a declaration says of how a source is compiled, but for folders."""
    plain = [(n, v) for n, v in vars(source).items() if n not in _PLACES and _is_plain(v)]
    roots = [include.version for include in source.include]
    text = hashlib.sha256(source.text.encode(errors="surrogateescape")).hexdigest()
    return repr((type(source).__qualname__, plain, roots, source.text and text))


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value tells it from all others, in every process."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else type(value) in _PLAIN


def _dependencies(source: Source, target: targets.Target) -> dict[str, Any]:
    """Return what a record says of the files of a source: as they are now.

    files: each with its place and digest; absent: the places where no file may be. Both are None
    where other things decide, too. inputs: the digest of a key, for all that a source decides.
    """
    request = jit.request.Request.of(Variant("", source), target)
    closure, inputs = request.closure, request.key.digest
    plain = (
        type(source) in _FOLLOWED
        and not source.environment
        and all(map(sources.build_environment.names_no_file, source.every_flag))
        and all(_is_plain(value) for value in vars(source).values())
    )
    if not plain or closure.absent is None:
        return {"files": None, "absent": None, "inputs": inputs}
    of_text = f"{source.folder}{os.sep}" if source.text else "\0"  # which the key has
    named = [path for path in closure.named if not path.startswith(of_text)]
    absent = [path for path in closure.absent if not path.startswith(of_text)]
    places = {path: _place_of(path, source) for path in (*named, *absent)}
    if None in places.values():
        return {"files": None, "absent": None, "inputs": inputs}
    digests = {path: _digest_of(path) for path in closure.named}
    if {*digests.values()} != {*closure.files.values()}:
        raise DeclarationError(f"a file of {source} changed while it was read")
    return {
        "files": sorted((places[path], digests[path]) for path in named),
        "absent": sorted(places[path] for path in absent), "inputs": inputs,
    }  # fmt: skip


class _Fresh:
    """The present files of a source, each read once, to compare records with."""

    def __init__(self, source: Source, target: targets.Target) -> None:
        self._source, self._target = source, target
        self._bases: list[str] = []
        self._digests: dict[str, str] = {}

    def are(self, content: dict[str, Any]) -> bool:
        """Return whether a record with this content is for the files as they are now."""
        if content["files"] is None:
            return bool(content["inputs"] == self._inputs)
        self._bases = self._bases or _bases(self._source)
        return not any(os.path.lexists(self._path(place)) for place in content["absent"]) and all(
            self._digest(self._path(place)) == digest for place, digest in content["files"]
        )

    @functools.cached_property
    def _inputs(self) -> str:
        return jit.key_of(Variant("", self._source), self._target).digest

    def _path(self, place: Place) -> str:
        base, relative = place
        return os.path.normpath(os.path.join(self._bases[base], relative))  # noqa: PTH118

    def _digest(self, path: str) -> str:
        if path not in self._digests:
            try:
                self._digests[path] = _digest_of(path)
            except OSError:
                self._digests[path] = ""
        return self._digests[path]


def _bases(source: Source) -> list[str]:
    """Return the folders that places are relative to, which may lie elsewhere on each machine."""
    roots = [os.path.join(source.home, include.path) for include in source.include]  # noqa: PTH118
    return [shared_include(), *roots, source.home, _EVERYWHERE]


def _place_of(path: str, source: Source) -> Place | None:
    """Return the place of a path; None for one that means nothing on another machine."""
    *bases, home, _ = _bases(source)
    for number, base in enumerate(bases):
        if path.startswith(f"{os.path.normpath(base)}{os.sep}"):
            return number, os.path.relpath(path, base)
    if path.startswith(_EVERYWHERE):
        return len(bases) + 1, os.path.relpath(path, _EVERYWHERE)
    relative = os.path.relpath(path, home)
    return None if relative.startswith(_UP * 3) else (len(bases), relative)


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
