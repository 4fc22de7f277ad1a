"""Turn a missed call into a variant: trace it, and append its program.

The call has its result from Python already; the trace takes a millisecond more, and the next call
like it is served by C.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jitkern import runtime as room
from jitkern.config import Config
from jitkern.errors import JitkernError, defined_at
from jitkern.launch.devices import Launcher
from jitkern.launch.runner import Runner
from jitkern.launch.symbols import Unsupported
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import builds
from jitkern.runtime.variants import CONSTANTS, CallClassState, Loaded, OpVariants, known_as
from jitkern.trace.recorder import described
from jitkern.trace.trace import trace

_log = logging.getLogger(__name__)


class MissedCall(NamedTuple):
    """A call that no variant served.

    args: all arguments, by position. keywords: the names of the arguments that were passed by name.
    tried: the variants that C had when the call came.
    """

    slot: OpVariants
    calls: CallClassState
    launcher: Launcher
    runner: Runner
    args: Sequence[Any]
    keywords: frozenset[str]
    settings: Config
    tried: frozenset[Any]


def specialize(missed: MissedCall) -> None:
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
    slot, (function, _, _, device) = missed.slot, missed.launcher
    if slot.may_have_more(missed.calls) and slot.recall(missed.calls, missed.launcher, missed.args):
        return  # a record that came with the kernels
    traced = trace(slot.signature, function, missed.args, missed.keywords, device, missed.runner)
    if traced.model is None and missed.settings.compile == "never":
        raise Unsupported("its configuration is not chosen yet, since nothing may be compiled now")
    kernels = [kernel.function for kernel in traced.kernels]
    loaded = Loaded(traced.program, kernels, traced.world)
    slot.append(missed.calls, loaded, device, missed.settings, traced.frozen)
    if known_as(loaded, device, missed.settings) in missed.tried:
        place = defined_at(getattr(function, "__wrapped__", function))
        raise Unsupported(
            f"{place}C has a variant for such calls, and leaves them to Python, as it does where a "
            "number goes beyond 64 bits"
        )
    if missed.settings.compile != "never" and missed.calls.constants <= CONSTANTS:
        known = room.records.CallClass.of(
            slot.signature, missed.launcher, traced.world, missed.args
        )
        room.records.keep(known, traced)


def settle() -> None:
    """Wait until the launch runtime that is being built serves."""
    builds.settle()
