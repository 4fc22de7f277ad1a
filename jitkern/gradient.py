"""Autograd for an op: a Python function at its Autograd key that records only where needed."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from jitkern.errors import DeclarationError
from jitkern.launch.runtime import AUTOGRAD, runtime

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

    def __init__(
        self,
        name: str,
        overload: Any,
        function: Callable[..., Any],
        reference: Callable[..., Any],
    ) -> None:
        schema = overload._schema
        self.name = name
        self.reference = reference
        self.overload = overload
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
        self.function, self.asked = function, _parameters(function)
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
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if _forward_mode(given) or (
            torch.is_grad_enabled() and any(a.requires_grad for a in given)
        ):
            return self.record(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, **kwargs)

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op, and remember how to differentiate it; forward-mode goes by the reference."""
        if _forward_mode([a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]):
            return self.reference(*args, **kwargs)
        named = {**self.defaults, **dict(zip(self.inputs, args)), **kwargs}
        tensors = [named[name] for name in self.tensors]
        if not torch._C._are_functorch_transforms_active():
            return _Recorded.apply(self, named, *tensors)  # type: ignore[no-untyped-call]
        with enable_single_level_autograd_function():  # below torch.func's own handling of levels
            return _RecordedAtLevel.apply(self, named, *tensors)  # type: ignore[attr-defined]

    def forward(self, named: dict[str, Any]) -> Any:
        """The op itself, below Autograd."""
        _recording.depth = getattr(_recording, "depth", 0) + 1
        try:
            with contextlib.ExitStack() as stack:
                if torch._C._are_functorch_transforms_active():  # the levels below record too
                    stack.enter_context(torch.enable_grad())
                    stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                return self.overload(**named)
        finally:
            _recording.depth -= 1

    def backward(
        self, grads: tuple[Any, ...], kept: dict[str, Any], needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """One gradient for each tensor input."""
        known = {**kept, **dict(zip(self.grads, grads)), "needs": needs}
        twice = torch.is_grad_enabled() and (
            torch._C._are_functorch_transforms_active()
            or any(isinstance(v, torch.Tensor) and v.requires_grad for v in known.values())
        )
        with _ThroughReferences() if twice else contextlib.nullcontext():
            result = self.function(**{name: known[name] for name in self.asked})
        gradients = result if isinstance(result, tuple) else (result,)
        if len(gradients) != len(self.tensors):
            raise DeclarationError(
                f"{self.name}: its backward returned {len(gradients)} gradients "
                f"for the tensors {', '.join(self.tensors)}"
            )
        return gradients


class _ThroughReferences(TorchFunctionMode):
    """Where a backward is itself differentiated, ops that have no gradient run their reference."""

    def __torch_function__(
        self,
        function: Any,
        _: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return REFERENCES.get(function, function)(*args, **(kwargs or {}))


REFERENCES: dict[Any, Callable[..., Any]] = {}  # of the ops that declare no gradient


def _parameters(function: Callable[..., Any]) -> list[str]:
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return list(inspect.signature(function).parameters)
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])  # 40 us less


def _forward_mode(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them carries a tangent; in a compiled graph Python does not know the level."""
    possible = (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    ) and torch._C._is_fwd_grad_enabled()
    return possible and any(map(_has_tangent, tensors))


def _has_tangent(tensor: torch.Tensor) -> bool:
    found = runtime()
    if found and found.provides(*AUTOGRAD):
        return found.has_tangent(tensor)
    return forward_ad.unpack_dual(tensor, level=0).tangent is not None


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class _Node:
    """What a node of the graph does.

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
        ctx.mark_non_differentiable(*(r for r in results if not _is_floating(r)))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = {**ctx.plain, **dict(zip(ctx.kept, ctx.saved_tensors))}
        return None, None, *ctx.gradient.backward(grads, kept, ctx.needs_input_grad[2:])


class _Recorded(_Node, torch.autograd.Function):
    """A node of the graph."""


class _RecordedAtLevel(_Node, torch.autograd.function._SingleLevelFunction):
    """A node of the graph of one level of torch.func."""
