"""From a call that no compiled variant served to one that serves the next: trace, stub, append.

All of it is done beside the calls, by one thread for one call after another: the call that asked
has its answer from Python, and does not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from jitkern import config, jit
from jitkern.cache.entry import Entry
from jitkern.config import Config
from jitkern.errors import CompilerNotFound, JitkernError, NotCached
from jitkern.launch.arguments import SHORT
from jitkern.launch.interface import Parameter
from jitkern.launch.kernels import Runner
from jitkern.launch.symbols import Unsupported
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import builds
from jitkern.runtime.binding import announce
from jitkern.runtime.plans import Plan, Plans, example_of, reference_to, situation_of
from jitkern.runtime.slot import STRIKES, Calls, Slot
from jitkern.source.closure import closure_of
from jitkern.source.kinds import Generated, Variant
from jitkern.target import Target
from jitkern.trace.recorder import Described, described
from jitkern.trace.stub_text import text_of_stub
from jitkern.trace.trace import Traced, trace

_log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A call that no variant served: what is needed to trace it later, its tensors not among it."""

    slot: Slot
    calls: Calls
    function: Callable[..., Any]
    runner: Runner
    args: list[Any]
    keywords: frozenset[str]
    settings: Config


def link(
    slot: Slot,
    calls: Calls,
    function: Callable[..., Any],
    runner: Runner,
    args: Sequence[Any],
    keywords: frozenset[str],
) -> None:
    """Have the next call like this one served without Python, soon. Raises nothing.

    args: all arguments, by position; keywords: the names of those that were given by name.
    """
    every = described(args)
    asked = Asked(slot, calls, function, runner, every, keywords, config.current())
    call = example_of(every)
    calls.building.add(call)
    if not builds.STUBS.later(lambda: _make(asked, call)):
        calls.building.discard(call)


def _make(asked: Asked, call: str) -> None:
    """Trace, and build what serves; the calls that ask in the meantime go through Python."""
    slot, calls = asked.slot, asked.calls
    try:
        _serve(asked)
    except (CompilerNotFound, NotCached) as e:
        calls.unavailable = config.current()
        if isinstance(e, CompilerNotFound):
            announce(e)
        else:
            _log.info("%s: its stub is not cached, and compiling is off", slot.op)
    except Unsupported as e:
        slot.refuse(calls, str(e))
    except JitkernError as e:
        _log.warning("%s keeps to its Python launcher: %s", slot.op, e)
        slot.refuse(calls, str(e), strikes=STRIKES)
    except OSError as e:
        _log.warning("%s keeps to its Python launcher: %s", slot.op, e)
        slot.refuse(calls, str(e))
    finally:
        calls.building.discard(call)


def _serve(asked: Asked) -> None:
    slot, runner = asked.slot, asked.runner
    traced = trace(
        slot.op, asked.function, slot.parameters, asked.args, asked.keywords, slot.returns,
        runner.device, runner.where, runner,
    )  # fmt: skip
    variant = stub_variant(slot.op, slot.schema, traced, slot.parameters, asked.args)
    may_compile = config.current().compile != "never"
    stub = jit.loaded(variant, runner.target, may_compile=may_compile)
    key = jit.key_of(variant, runner.target)
    addresses = [kernel.function.address for kernel in traced.kernels]
    slot.append(
        asked.calls, stub, key.digest, addresses, runner.device, asked.settings, traced.world,
        traced.frozen,
    )  # fmt: skip
    if may_compile:
        plans = slot.plans(asked.function, traced.world, runner.source, runner.target)
        keep(plans, asked.args, reference_to(key), traced, runner.target, runner.device)


def keep(
    plans: Plans, args: Sequence[Any], stub: tuple[str, str, str], traced: Traced, target: Target,
    device: Any = None,
) -> tuple[Entry, bool] | None:  # fmt: skip
    """Publish what a process needs to do without this trace, unless a choice is still to come.

    Not where a source was edited since its kernels were loaded: the plan is kept under what the
    sources are now.
    """
    if traced.model is None or plans.closure is None:
        return None
    loaded = [kernel.reference for kernel in traced.kernels]
    current = [reference_to(jit.key_of(kernel.variant, target)) for kernel in traced.kernels]
    if loaded != current or closure_of(plans.source) != plans.closure:
        return None
    plan = Plan(stub, tuple(current), example_of(args), bool(traced.frozen))
    return plans.publish(situation_of(args), plan, traced.model, device)


def stub_variant(
    op: str, schema: str, traced: Traced, parameters: Sequence[Parameter], args: Sequence[Any]
) -> Variant:
    """The stub as something to compile and cache; its label names the tensors' dtypes."""
    dtypes = {
        parameter.name: SHORT[value.dtype]
        for parameter, value in zip(parameters, described(args))
        if isinstance(value, Described) and value.dtype in SHORT
    }
    text = text_of_stub(schema, traced)
    return Variant(op, Generated("stub.c", text=text), "stub", tuple(dtypes.items()))


def settle() -> None:
    """Wait until every stub that is being built serves."""
    builds.settle()
