"""Plans: the program and kernels with which a warm process serves a call, without tracing.

A plan is a fact (see `cache.facts`), keyed by all that a trace depends on: the launch function's
`World` (its code and all that the code reads), the kernel's sources, the target, and the class of
the call: what a trace takes for granted of the arguments (dtypes, ranks, which are None). The plan
has the program and names the entries of the kernels, and both are a part of its key, too. A class
has one plan for each branch that its launch function took: entries of one label. If a configuration
was chosen, the plans are for the device model that chose it. They are tried one by one; plans made
for a call of the same sizes and numbers come first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jitkern import __version__, jit
from jitkern.cache import events, facts
from jitkern.cache.key import Key
from jitkern.cache.store import Entry
from jitkern.compilers import compiler_for
from jitkern.errors import DeclarationError
from jitkern.launch.tuned import Tuned, model_of
from jitkern.named_tuple import NamedTuple
from jitkern.runtime import own_code
from jitkern.source.closure import Closure, closure_of
from jitkern.source.kinds import Source, Variant
from jitkern.source.variant_key import label_of, source_inputs
from jitkern.target import Target
from jitkern.trace.program import Program, parsed_program
from jitkern.trace.world import World

MOST = 64  # plans that are kept for a class
CONSTANT = 16  # plans among them that hold a number of their call for constant
FEW = 4  # with more such plans than this, each is tried only for calls of its own numbers
Reference = tuple[str, str, str]  # an entry of the cache: its target, label and digest


class Plan(NamedTuple):
    """A program and its kernels, for calls like `example`; `constant`: for no other calls."""

    program: Program
    kernels: tuple[Reference, ...]
    example: str = ""
    constant: bool = False


class Plans:
    """The plans of one launch function in one world, over one source, for one target."""

    def __init__(
        self,
        op: str,
        schema: str,
        function: Callable[..., Any],
        world: World,
        source: Source,
        target: Target,
    ) -> None:
        self.op = op
        self.source = source
        self.target = target.for_host_code()
        self._tunable = isinstance(function, Tuned) or source.kind == "triton"
        self.closure: Closure | None = None
        if world.refusal or not world.kept:
            return
        exact = jit.exact_target(Variant(op, source), target)  # a native kernel's instruction set
        flags = compiler_for(source).flags(source, exact)
        self._inputs = {
            "arguments": schema, "exact_target": str(exact), "flags": list(flags),
            "world": world.identity, "tracer": own_code.of_a_trace(),
        }  # fmt: skip
        self._by_index = "device" in world.attributes  # whether the index may matter
        with contextlib.suppress(DeclarationError):  # a call will raise it
            self.closure = closure_of(source)

    def find(
        self, call_class: tuple[str, ...], example: str = "", device: torch.device | None = None
    ) -> Iterator[tuple[Entry, Plan]]:
        """Return the plans that may serve a call of a class and numbers, likely ones first.

        device: also return the plans of its device model.
        """
        models = [""] if device is None or not self._tunable else ["", model_of(device)]
        kept = [one for model in models for one in self.entries(call_class, model, device)]
        alike = [(entry, plan) for entry, plan in kept if plan.example == example]
        others = [(entry, plan) for entry, plan in kept if plan.example != example]
        free = [(entry, plan) for entry, plan in others if not plan.constant]
        bound = [(entry, plan) for entry, plan in others if plan.constant]
        return iter([*alike, *free, *(bound if len(bound) <= FEW else [])])

    def entries(
        self, call_class: tuple[str, ...], model: str = "", device: torch.device | None = None
    ) -> Iterator[tuple[Entry, Plan]]:
        """Yield each plan for a class of calls and a device model, with its entry."""
        if key := self._key(call_class, model, device):
            yield from facts.read_all(jit.open_cache(), key, _read)

    def publish(
        self,
        call_class: tuple[str, ...],
        plan: Plan,
        model: str = "",
        device: torch.device | None = None,
    ) -> tuple[Entry, bool] | None:
        """Publish a plan; returns its entry, and whether the entry is new.

        model: the device model that the plan is for, "" for any. Returns None for a function that
        cannot have plans, if there are enough plans, and if the cache cannot be written.
        """
        key = self._key(call_class, model, device)
        if key is None:
            return None
        key = facts.one_of(key, {"program": plan.program, "kernels": plan.kernels})
        cache = jit.open_cache()
        if known := cache.find(key):
            cache.list_by_label(known)  # the cache may be of a version without lists
            events.use(known.path)
            return known, False
        plans = [p for _, p in self.entries(call_class, model, device)]
        if len(plans) >= MOST or (plan.constant and sum(p.constant for p in plans) >= CONSTANT):
            return None
        entry = facts.write(cache, key, plan, {"name": "jitkern", "version": __version__})
        return (entry, True) if entry else None

    def _key(
        self, call_class: tuple[str, ...], model: str, device: torch.device | None
    ) -> Key | None:
        """Return the key that the plans of a class of calls share, or None if there can be none."""
        if self.closure is None:
            return None
        inputs = {
            **source_inputs(self.source, self.closure), **self._inputs,
            "situation": list(call_class), "model": model,
            "device": (device.index if device and self._by_index else 0) or 0,
        }  # fmt: skip
        key = facts.key_of("plan", self.op, str(self.target), "", inputs)
        label = ".".join(("plan", *call_class))[:80]
        return key._replace(label=label_of(self.op, label, key.target, f".{key.digest[:8]}"))


def _read(entry: Entry) -> Plan:
    """Return the plan in an entry. Raises ValueError for content that `publish` does not write."""
    try:
        program, kernels, example, constant = facts.content_of(entry)
        if not all(map(_is_reference, kernels)):
            raise ValueError("the plan does not name kernels")
        if entry.manifest.inputs.get("which") != {"program": program, "kernels": kernels}:
            raise ValueError("the plan and its key have different programs or kernels")
        parsed = parsed_program(program)
    except TypeError as e:
        raise ValueError(f"its content is not a plan: {e}") from e
    return Plan(parsed, tuple(map(tuple, kernels)), str(example), bool(constant))


def _is_reference(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(part, str) and "/" not in part for part in value)
    )


def reference_to(key: Key) -> Reference:
    """Return the reference by which a plan names an entry."""
    return key.target, key.label, key.digest


def entry_of(reference: Reference) -> Entry | None:
    """Return the entry that a plan names, or None if the entry is gone."""
    target, label, digest = reference
    return jit.open_cache().find(Key({"target": target}, digest, label))
