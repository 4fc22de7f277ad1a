"""Turn a missed call into a variant: trace it, and append its program.

The call has its result from Python already; the trace takes a millisecond more, and the next call
like it is served by C.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jitkern import jit, runtime as room
from jitkern.cache.entry import Entry
from jitkern.calls.call_class import class_of, example_of
from jitkern.config import Config
from jitkern.errors import JitkernError, defined_at
from jitkern.launch.runner import Runner
from jitkern.launch.symbols import Unsupported
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import builds
from jitkern.runtime.plans import Plan, Plans, reference_to
from jitkern.runtime.slot import Calls, Launcher, Loaded, Slot, known_as
from jitkern.source.closure import closure_of
from jitkern.target import Target
from jitkern.trace.recorder import described
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
    """Trace a call and append its program, or note why that failed. Raises nothing."""
    slot, calls = missed.slot, missed.calls
    try:
        _append(missed._replace(args=described(missed.args)))
    except Unsupported as e:
        slot.refuse(calls, str(e))
    except (JitkernError, OSError) as e:  # a kernel is gone, say: this may pass
        calls.back_off(refused=True)
        _log.info("%s keeps its Python launcher for now: %s", slot.signature.name, e)
    except Exception:  # noqa: BLE001  the call has its result
        calls.back_off(refused=True)
        _log.exception("%s keeps its Python launcher: its trace failed", slot.signature.name)


def _append(missed: MissedCall) -> None:
    slot, (function, _, target, device) = missed.slot, missed.launcher
    if slot.may_have_more(missed.calls) and slot.recall(missed.calls, missed.launcher, missed.args):
        return  # a plan that came with the kernels
    traced = trace(slot.signature, function, missed.args, missed.keywords, device, missed.runner)
    kernels = [kernel.function for kernel in traced.kernels]
    loaded = Loaded(traced.program, kernels, traced.world)
    slot.append(missed.calls, loaded, device, missed.settings, traced.frozen)
    if known_as(loaded, device, missed.settings) in missed.tried:
        place = defined_at(getattr(function, "__wrapped__", function))
        raise Unsupported(
            f"{place}C has a variant for such calls, and leaves them to Python, as it does where a "
            "number goes beyond 64 bits"
        )
    if missed.settings.compile != "never":
        plans = slot.plans(missed.launcher, traced.world)
        kept = keep(plans, missed.args, traced, target, device)
        if kept and not missed.calls.has_receipt and not traced.frozen:
            missed.calls.has_receipt, call = True, class_of(missed.args)
            room.recall.leave(slot, missed.launcher, traced.world, call, kept[0].path)


def keep(
    plans: Plans, args: Sequence[Any], traced: Traced, target: Target, device: Any = None
) -> tuple[Entry, bool] | None:
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
    plan = Plan(traced.program, tuple(current), example_of(args), bool(traced.frozen))
    return plans.publish(class_of(args), plan, traced.model, device)


def settle() -> None:
    """Wait until the launch runtime that is being built serves."""
    builds.settle()
