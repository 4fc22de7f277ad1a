"""Turn a missed call into a program: trace it, and append what the trace gives.

The call has its result from Python already; the trace takes a millisecond more, and the next call
like it is served by C.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jitkern import config, runtime
from jitkern.errors import JitkernError, defined_at
from jitkern.launch.runner import Runner
from jitkern.launch.symbols import Unsupported
from jitkern.runtime.programs import LoadedProgram, OpPrograms
from jitkern.runtime.records import TRACES, CallClass
from jitkern.trace.trace import trace
from jitkern.trace.tracer import metadata_of

_log = logging.getLogger(__name__)


def specialize(
    programs: OpPrograms, calls: CallClass, runner: Runner, args: Sequence[Any],
    keywords: frozenset[str], tried: frozenset[Any],
) -> None:  # fmt: skip
    """Trace a call that no program served and append its program, or note why that failed.

    args: all arguments, by position. keywords: the names of those that were passed by name. tried:
    the programs that C had when the call came. Raises nothing.
    """
    signature, function, device = calls.signature, calls.function, calls.device
    try:
        args = metadata_of(args)
        if programs.may_have_more(calls) and programs.recall(calls, args):
            return  # a record that came with the kernels
        traced = trace(signature, function, args, keywords, device, runner)
        may_compile = config.current().compile != "never"
        if traced.model is None and not may_compile:
            raise Unsupported(  # noqa: TRY301
                "its configuration is not chosen yet, since nothing may be compiled now"
            )
        loaded = LoadedProgram(traced.program, [k.function for k in traced.kernels], traced.scope)
        programs.append(calls, loaded, traced.frozen)
        if (known := loaded.known_as(device)) in tried:
            if known != calls.rejects:  # another thread may have appended it after C had looked
                calls.rejects = known
                calls.back_off(refused=True)
                return
            place = defined_at(getattr(function, "__wrapped__", function))
            raise Unsupported(  # noqa: TRY301
                f"{place}a program for these calls exists, but rejected this one (for example "
                "because of an integer overflow)"
            )
        if may_compile and calls.traces <= TRACES:
            runtime.records.keep(calls, traced, runtime.records.reader())
    except Unsupported as e:
        programs.refuse(calls, str(e))
    except (JitkernError, OSError) as e:  # a kernel is gone, say: this may pass
        calls.back_off(refused=True)
        _log.info("%s stays on the Python launcher for now: %s", signature.name, e)
    except Exception:  # noqa: BLE001  the call has its result
        calls.back_off(refused=True)
        _log.exception("%s stays on the Python launcher: its trace failed", signature.name)


def settle() -> None:
    """Wait for background builds, such as the launch runtime."""
    config.background.settle()
