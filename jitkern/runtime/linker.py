"""Turn a missed call into a compiled variant: trace it, build the stub, append it.

One thread in the background does all of this, for one call after another: the missed call gets its
result from Python, and does not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jitkern import config, jit, runtime as room
from jitkern.cache.entry import Entry
from jitkern.calls.call_class import class_of, example_of
from jitkern.calls.signature import Signature
from jitkern.config import Config
from jitkern.errors import CompilerNotFound, JitkernError, NotCached, defined_at
from jitkern.launch.runner import Runner
from jitkern.launch.symbols import Unsupported
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import builds
from jitkern.runtime.binding import announce
from jitkern.runtime.plans import Plan, Plans, reference_to
from jitkern.runtime.slot import Calls, Launcher, Loaded, Slot, known_as
from jitkern.source.closure import closure_of
from jitkern.source.dtypes import codes_of_torch
from jitkern.source.kinds import Generated, Variant
from jitkern.target import Target
from jitkern.trace.recorder import Described, described
from jitkern.trace.stub_text import text_of_stub
from jitkern.trace.trace import Traced, trace

_log = logging.getLogger(__name__)


class MissedCall(NamedTuple):
    """A call that no variant served.

    args: all arguments, by position. keywords: the names of the arguments that were passed by name.
    tried: the variants that C had when the call came.
    """

    slot: Slot
    calls: Calls
    launcher: Launcher
    runner: Runner
    args: Sequence[Any]
    keywords: frozenset[str]
    settings: Config
    tried: frozenset[Any]


def link(missed: MissedCall) -> None:
    """Build a stub for calls like this one, in the background. Raises nothing."""
    missed = missed._replace(args=described(missed.args))  # which keeps no tensor
    building, call = missed.calls.building, example_of(missed.args)
    building.add(call)
    jit.served_call.described()  # for the copy of the context, which keeps no tensor
    if not builds.STUBS.later(lambda: _link_or_refuse(missed, call)):
        building.discard(call)


def _link_or_refuse(missed: MissedCall, call: str) -> None:
    """Trace a call and append its stub, or note why that failed."""
    slot, calls, op = missed.slot, missed.calls, missed.slot.signature.name
    try:
        _append_stub(missed)
    except Unsupported as e:
        slot.refuse(calls, str(e), missed.args)
    except (CompilerNotFound, NotCached) as e:
        calls.put_off(config.current())
        if isinstance(e, CompilerNotFound):
            announce(e)
        else:
            _log.info("%s keeps its Python launcher: no cached stub, and compiling is off", op)
    except (JitkernError, OSError) as e:  # the disk is full, say: this may pass
        calls.put_off()
        calls.refused = str(e)
        _log.warning("%s keeps its Python launcher for %d s: %s", op, calls.pause, e)
    finally:
        calls.building.discard(call)


def _append_stub(missed: MissedCall) -> None:
    slot, (function, _, target, device) = missed.slot, missed.launcher
    if slot.may_have_more(missed.calls) and slot.recall(missed.calls, missed.launcher, missed.args):
        return  # a plan that came with the kernels
    traced = trace(slot.signature, function, missed.args, missed.keywords, device, missed.runner)
    variant = stub_variant(slot.signature, traced, missed.args)
    stub = jit.loaded(variant, target)
    key = jit.key_of(variant, target)
    addresses = [kernel.function.address for kernel in traced.kernels]
    loaded = Loaded(stub, key.digest, addresses, traced.world)
    slot.append(missed.calls, loaded, device, missed.settings, traced.frozen)
    if known_as(loaded, device, missed.settings) in missed.tried:
        place = defined_at(getattr(function, "__wrapped__", function))
        raise Unsupported(
            f"{place}C has a variant for such calls, and leaves them to Python, as it does where a "
            "number goes beyond 64 bits"
        )
    if config.current().compile != "never":
        plans = slot.plans(missed.launcher, traced.world)
        kept = keep(plans, missed.args, reference_to(key), traced, target, device)
        if kept and not missed.calls.has_receipt and not traced.frozen:
            missed.calls.has_receipt, call = True, class_of(missed.args)
            room.recall.leave_later(slot, missed.launcher, traced.world, call, kept[0].path)


def keep(
    plans: Plans, args: Sequence[Any], stub: tuple[str, str, str], traced: Traced, target: Target,
    device: Any = None,
) -> tuple[Entry, bool] | None:  # fmt: skip
    """Publish the plan that spares other processes this trace; returns None if it cannot be kept.

    Without a measured choice there is no plan, nor for a source that was edited after its kernels
    were loaded: the key of a plan is made from the sources as they are now.
    """
    if traced.model is None or plans.closure is None:
        return None
    loaded = [kernel.reference for kernel in traced.kernels]
    current = [reference_to(jit.key_of(kernel.variant, target)) for kernel in traced.kernels]
    if loaded != current or closure_of(plans.source) != plans.closure:
        return None
    plan = Plan(stub, tuple(current), example_of(args), bool(traced.frozen))
    return plans.publish(class_of(args), plan, traced.model, device)


def stub_variant(signature: Signature, traced: Traced, args: Sequence[Any]) -> Variant:
    """Return the variant that a stub is compiled and cached as; its label names tensor dtypes."""
    codes = codes_of_torch()
    dtypes = {
        argument.name: codes[value.dtype]
        for argument, value in zip(signature.arguments, described(args))
        if isinstance(value, Described) and value.dtype in codes
    }
    text = text_of_stub(signature.schema, traced)
    return Variant(signature.name, Generated("stub.c", text=text), "stub", tuple(dtypes.items()))


def settle() -> None:
    """Wait until every stub that is being built serves."""
    builds.settle()
