"""Autograd for an op: a Python function at its Autograd key that records only where needed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from jitkern.errors import DeclarationError

_recording = threading.local()


def recording() -> bool:
    """Whether this thread is inside the forward of an op whose gradient is recorded."""
    return getattr(_recording, "depth", 0) > 0


class Gradient:
    """What is registered for Autograd, made from the function that `Op.backward` was given.

    That function asks by parameter name for what it needs: `grad` (or `grad_<output>` where there
    are several), an input by its name in the schema, an output by its name (`out`, `out0`, … where
    the schema names none), `needs` (a bool for each tensor input). Only what it asks for is kept
    for the backward pass. It returns one gradient, or None, for each tensor input, in order.
    """

    def __init__(self, name: str, overload: Any, function: Callable[..., Any]) -> None:
        schema = overload._schema
        self.name = name
        self.overload = overload
        self.function = function
        self.inputs = [argument.name for argument in schema.arguments]
        self.defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.tensors = [
            a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")
        ]
        single = len(schema.returns) == 1
        self.outputs = [
            r.name or ("out" if single else f"out{i}") for i, r in enumerate(schema.returns)
        ]
        self.grads = ["grad"] if single else [f"grad_{output}" for output in self.outputs]
        self.asked = list(inspect.signature(function).parameters)
        known = {*self.inputs, *self.outputs, *self.grads, "needs"}
        if any(argument.is_write for argument in schema.arguments if argument.alias_info):
            raise DeclarationError(
                f"{name}: an op that changes its arguments cannot have a backward"
            )
        clash = {*self.inputs} & {*self.outputs, *self.grads, "needs"}
        if clash:
            raise DeclarationError(
                f"{name}: a backward cannot tell the input `{min(clash)}` from a gradient or an "
                "output of that name; rename the argument, or name the returns in the schema"
            )
        if any("Tensor" in str(a.type) and a.name not in self.tensors for a in schema.arguments):
            raise DeclarationError(f"{name}: an op with a list of tensors cannot have a backward")
        if not known.issuperset(self.asked):
            unknown = ", ".join(sorted({*self.asked} - known))
            raise DeclarationError(
                f"{name}: its backward asks for {unknown}; "
                f"it may ask for: {', '.join(sorted(known))}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 or (
            torch.is_grad_enabled()
            and any(
                isinstance(a, torch.Tensor) and a.requires_grad for a in (*args, *kwargs.values())
            )
        ):
            named = {**self.defaults, **dict(zip(self.inputs, args)), **kwargs}
            return _Recorded.apply(self, named, *(named[name] for name in self.tensors))  # type: ignore[no-untyped-call]
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, **kwargs)

    def forward(self, named: dict[str, Any]) -> Any:
        """The op itself, below Autograd."""
        _recording.depth = getattr(_recording, "depth", 0) + 1
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload(**named)
        finally:
            _recording.depth -= 1

    def backward(
        self, grads: tuple[Any, ...], kept: dict[str, Any], needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """One gradient for each tensor input."""
        known = {**kept, **dict(zip(self.grads, grads)), "needs": needs}
        result = self.function(**{name: known[name] for name in self.asked})
        gradients = result if isinstance(result, tuple) else (result,)
        if len(gradients) != len(self.tensors):
            raise DeclarationError(
                f"{self.name}: its backward returned {len(gradients)} gradients "
                f"for the tensors {', '.join(self.tensors)}"
            )
        return gradients


class _Recorded(torch.autograd.Function):
    """A node of the graph.

    The tensors are passed beside the named arguments so that Autograd sees them.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Gradient, named: dict[str, Any], *tensors: Any) -> Any:
        named = {**named, **dict(zip(gradient.tensors, tensors))}
        result = gradient.forward(named)
        results = result if isinstance(result, tuple) else (result,)
        known = {**named, **dict(zip(gradient.outputs, results))}
        kept = [name for name in gradient.asked if isinstance(known.get(name), torch.Tensor)]
        ctx.save_for_backward(*(known[name] for name in kept))
        ctx.gradient, ctx.kept = gradient, kept
        ctx.plain = {
            name: known.get(name) for name in gradient.asked if name in known and name not in kept
        }
        ctx.mark_non_differentiable(
            *(r for r in results if isinstance(r, torch.Tensor) and not r.is_floating_point())
        )
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = {**ctx.plain, **dict(zip(ctx.kept, ctx.saved_tensors))}
        return None, None, *ctx.gradient.backward(grads, kept, ctx.needs_input_grad[2:])
