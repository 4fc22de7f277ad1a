"""The first call of a class in a process, served by a receipt: with few imports, and no search.

A plan has the program and the kernels of a call, but the way to it is long: the closure of the
source, keys, manifests, and forty modules that deal with them. So a process that has gone this way
leaves a receipt (`cache.receipts`). Its name stands for all that a plan depends on and that a
process knows without reading: the op, the source as declared, the world of the launch function, the
class of the call, the device, and the versions around. It holds what must be read to be sure: the
files of the closure with their digests, and the paths where nothing may be. It has the program, and
names the entries of the launch runtime, the plan and the kernels, which are opened and verified as
any others are. Whatever is odd leads to the plans.
"""

from __future__ import annotations

import contextvars
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import jitkern
from jitkern import IMPORTED, config, jit, launch, runtime as room, source as sources, trace
from jitkern.cache import events, receipts, usage
from jitkern.calls.call_class import class_of
from jitkern.errors import CacheError, JitkernError
from jitkern.loading import LOADED, content_of, loader
from jitkern.runtime import binding, own_code
from jitkern.runtime.slot import RUNTIME, Calls, Loaded, Slot
from jitkern.source.kinds import CUDA, Cpp, Cuda, Source, Triton
from jitkern.trace.world import World, world_of

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry
    from jitkern.cache.receipts import Opened
    from jitkern.runtime.slot import Launcher
    from jitkern.source.closure import Closure
    from jitkern.trace.program import Program

_FORMAT = 1  # bump when the meaning of a receipt or of its name changes
_KINDS = (Cuda, Cpp, Triton)  # whose compilers are jitkern's own code, which a name covers
_PLAIN = (str, bool, int, float, type(None))
_log = logging.getLogger(__name__)
_TICK = 2_000_000_000  # nanoseconds within which two changes of a file may have one time


def recall(
    slot: Slot,
    calls: Calls,
    source: Source,
    function: Callable[..., Any],
    device: torch.device,
    args: Sequence[Any],
) -> bool:
    """Append the variant that a receipt names for calls like this one.

    calls: the state of the calls. function: the launch function, which has no configurations.
    Returns whether a variant was appended. Raises nothing.
    """
    settings = config.current()
    if calls.has_receipt is not None or settings.compiler == "exact" or settings.record is not None:
        return False
    calls.has_receipt = False
    loading = _Loading(source)
    try:
        world = world_of((function,))
        name = _name(slot, source, world, device, class_of(args), settings.prefer)
        if name:
            with receipts.read(settings, name) as (receipt, opened):
                if _is_as_it_was(receipt):
                    program = trace.program.parsed_program(receipt["program"])
                    variant = loading.variant(program, world, opened)
                    calls.has_receipt = slot.append(calls, variant, device, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, JitkernError) as e:
        _log.debug("%s: no receipt serves: %s", slot.signature.name, e)
    loading.tell()
    return calls.has_receipt


def _name(
    slot: Slot, source: Source, world: World, device: torch.device, call: tuple[str, ...],
    prefer: str,
) -> str:  # fmt: skip
    """Return the name of the receipt of a class of calls; "" if such calls leave none."""
    declared = tuple(vars(source).items())
    followed = type(source) in _KINDS and not source.environment
    if not followed or world.refusal or not world.kept or not _is_plain(declared):
        return ""
    model: tuple[Any, ...] = ()
    if device.type == "cuda":
        index = device.index
        model = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    elif getattr(source, "native", False):
        model = (jitkern.target.isa_level(),)
    if any("=native" in flag for flag in source.every_flag):
        model += (jitkern.target.processor_for(source.every_flag),)
    parts = (
        _FORMAT, own_code.state(), slot.signature.schema, type(source).__qualname__, declared,
        world.identity, call, str(device), model, prefer,
        torch.__version__, torch.version.cuda, torch.__file__,
        jitkern.target.this_platform(), jitkern.target.this_abi(python=True),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode(errors="surrogateescape")).hexdigest()


def _is_plain(value: Any) -> bool:
    """Whether the repr of a value tells it from all others, in every process."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else type(value) in _PLAIN


def _is_as_it_was(receipt: dict[str, Any]) -> bool:
    """Whether the files that a receipt names are there unchanged, and no others have come."""
    return not any(map(os.path.lexists, receipt["absent"])) and all(
        _digest_of(path) == digest for path, digest in receipt["files"]
    )


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class _Loading:
    """What is loaded of the entries of a receipt, and the news of them for listeners.

    source: of the kernels.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._new: list[tuple[str, Opened]] = []  # with the kind of source of each

    def variant(self, program: Program, world: World, opened: Sequence[Opened]) -> Loaded:
        """Load the entries of a receipt. Raises ValueError if there can be no launch runtime."""
        runtime, plan, *kernels = opened
        if not binding.adopt(lambda: self._loaded(RUNTIME, runtime)):
            raise ValueError("this process has no launch runtime")
        events.use(plan.path)
        return Loaded(program, [self._loaded(self._source, one) for one in kernels], world)

    def _loaded(self, source: Source, opened: Opened) -> Any:
        """Return the loaded content of an entry of this kind of source, loaded once."""
        described = opened.described
        content = content_of(described["digest"], source)
        if content not in LOADED:
            data = opened.data
            if source.runs == CUDA and not data:  # only its size was verified
                data = Path(opened.place).read_bytes()
            reference = described["target"], described["label"], described["digest"]
            loaded = loader.code_of(source, data, opened.place, described["meta"], reference)
            LOADED.setdefault(content, loaded)
            self._new.append((source.kind, opened))
        return LOADED[content]

    def tell(self) -> None:
        """Count what was loaded, and tell listeners, who may call ops themselves."""
        for kind, (described, path, *_) in self._new:
            op, variant, target = described["op"], described["variant"], described["target"]
            events.tell(events.Event(op, variant, target, "hit", 0.0, str(path)), kind)
            usage.hit(config.current().cache_dir, path.parents[2], described["seconds"])


def leave(slot: Slot, launcher: Launcher, world: World, call: tuple[str, ...], plan: Path) -> None:
    """Leave a receipt for calls of a class, as soon as there is a launch runtime to name."""
    run = contextvars.copy_context().run  # under the settings of this call
    binding.when_loaded(lambda _: run(_leave, slot, launcher, world, call, plan))


def _leave(slot: Slot, launcher: Launcher, world: World, call: tuple[str, ...], plan: Path) -> None:
    """Leave a receipt for calls of a class that the plan at a path serves, if they may have one.

    All that the plan was found by is looked at again, so that the receipt is of one moment.
    """
    function, source, _, device = launcher
    settings = config.current()
    flags = source.every_flag
    plain = all(map(receipts.is_plain, flags)) and launch.tuned.parts_of(function) == (function,)
    if not plain or not receipts.may_leave(settings):
        return
    with suppress(JitkernError, OSError):
        name = _name(slot, source, world, device, call, settings.prefer)
        closure = sources.closure.closure_of(source)
        digests = {path: _digest_of(path) for path in closure.named}
        program, entries = _kept(slot, launcher, world, call, plan, closure)
        if (
            not name
            or closure.absent is None
            or any(map(os.path.lexists, closure.absent))
            or {*digests.values()} != {*closure.files.values()}
            or own_code.look()[1] > IMPORTED - _TICK  # perhaps newer than the code that runs
        ):
            return
        of_text = f"{source.folder}{os.sep}" if source.text else "\0"  # which the name stands for
        files = [item for item in digests.items() if not item[0].startswith(of_text)]
        absent = [path for path in closure.absent if not path.startswith(of_text)]
        receipt = {"files": files, "absent": absent, "program": program}
        receipts.leave(settings, name, entries, receipt, new=True)


def _kept(
    slot: Slot, launcher: Launcher, world: World, call: tuple[str, ...], where: Path,
    closure: Closure,
) -> tuple[Program, list[Entry]]:  # fmt: skip
    """Return the program of the plan at a path, and the entries of runtime, plan and kernels.

    closure: of the source, now. Raises CacheError where the plan is not found by it, or an entry is
    gone.
    """
    function, source, target, device = launcher
    op, schema = slot.signature.name, slot.signature.schema
    plans = room.plans.Plans(op, schema, function, world, source, target)
    known = plans.find(call, "", device) if plans.closure == closure else ()
    for entry, plan in known:
        if entry.path == where:
            runtime = jit.open_cache().find(jit.load.key_here(binding.variant()))
            named = map(room.plans.entry_of, plan.kernels)
            entries = [found for found in (runtime, entry, *named) if found]
            if len(entries) == 2 + len(plan.kernels):
                return plan.program, entries
    raise CacheError(f"{where} does not serve such calls any more", path=str(where), errno=None)
