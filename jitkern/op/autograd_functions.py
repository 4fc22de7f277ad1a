"""Autograd functions in Python, which record calls of ops as nodes of the graph.

A process whose calls need no gradient does without this module.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils import _pytree

from jitkern import config
from jitkern.calls.signature import tensors_in
from jitkern.errors import DeclarationError
from jitkern.op.gradient import Gradient, inside_backward, spec_of
from jitkern.op.recording import DEPTH, plainly_on
from jitkern.runtime.symbols import AUTOGRAD, symbols

if TYPE_CHECKING:
    from jitkern.op.declaration import DeclaredOp


def apply(op: DeclaredOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call of an op at its Autograd key, recorded if that is needed."""
    tensors = tensors_in((*args, *kwargs.values()))
    if _forward_mode(tensors):
        return _in_forward_mode(op, args, kwargs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _recorded(op, tensors, args, kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return op.overload(*args, **kwargs)


def _in_forward_mode(op: DeclaredOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not op.declaration.reference:
        raise DeclarationError(
            f"{op.name}: forward-mode differentiation runs the reference of an op, and "
            f"this op has none; add @{op.__name__}.reference"
        )
    return op.run_reference(*args, **kwargs)


def _recorded(
    op: DeclaredOp,
    inputs: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the op, and record the call for differentiation."""
    gradient = op.gradient
    if gradient is not None:
        args, kwargs = op.signature.complete(args, kwargs)
        call = _Differentiable(op, gradient, {**dict(zip(gradient.inputs, args)), **kwargs})
        return call.results(_apply(_Recorded, call, *call.tensors()))
    if inside_backward() and op.declaration.reference:
        return op.run_reference(*args, **kwargs)
    return _refused(op, inputs, args, kwargs)


def _refused(
    op: DeclaredOp,
    inputs: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the op, and add nodes that raise to the graph of its results and changes."""
    changed = [kwargs[name] if name in kwargs else args[i] for i, name in op.signature.changed]
    changed = [tensor for tensor in tensors_in(changed) if _is_floating(tensor)]
    for tensor in changed:
        _check_changeable(op.name, tensor)
    call = _Call(op, args, kwargs)
    results = _apply(_Returned, call, *inputs)
    for tensor in changed:
        _apply(_Changed, op, tensor, *inputs)
    return _pytree.tree_unflatten(results, call.outline)


def _below(op: DeclaredOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the op itself, below Autograd."""
    DEPTH.value += 1
    try:
        with contextlib.ExitStack() as stack:
            if torch._C._are_functorch_transforms_active():  # outer levels record, too
                stack.enter_context(torch.enable_grad())
                stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            return op.overload(*args, **kwargs)
    finally:
        DEPTH.value -= 1


def _apply(node: type, *args: Any) -> Any:
    """Apply a node of the graph to these arguments."""
    plain, at_level = _functions(node)
    if not torch._C._are_functorch_transforms_active():
        return plain.apply(*args)
    with enable_single_level_autograd_function():  # below torch.func's own handling of levels
        return at_level.apply(*args)


@functools.cache
def _functions(node: type) -> tuple[Any, Any]:
    """Return the node as a function of the plain graph, and of one level of torch.func."""
    kinds: tuple[Any, Any] = torch.autograd.Function, torch.autograd.function._SingleLevelFunction
    plain, at_level = (type(node.__name__, (node, kind), {}) for kind in kinds)
    return plain, at_level


def _check_changeable(op: str, tensor: torch.Tensor) -> None:
    """Refuse the tensors that Torch's own in-place ops refuse, before any change."""
    if not tensor.requires_grad:
        return
    base = tensor._base if tensor._is_view() else None
    if tensor.is_leaf or (base is not None and base.is_leaf):
        what = "a view of a leaf" if base is not None else "a leaf"
        raise RuntimeError(
            f"{op} changes {what} of the graph in place, a tensor that requires grad; call the op "
            "under torch.no_grad(), or pass a clone()"
        )


def _forward_mode(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor carries a tangent; in a compiled graph Python cannot see the level."""
    possible = (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    ) and torch._C._is_fwd_grad_enabled()
    return possible and any(map(_has_tangent, tensors))


def _has_tangent(tensor: torch.Tensor) -> bool:
    if symbols().provides(*AUTOGRAD):
        return symbols().has_tangent(tensor)
    return forward_ad.unpack_dual(tensor, level=0).tangent is not None


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _mark(ctx: Any, op: DeclaredOp, results: Sequence[Any]) -> None:
    """Mark results without a gradient for Torch."""
    plain = op.declaration.nondifferentiable
    without = [
        tensor
        for name, result in zip(op.signature.outputs, results)
        for tensor in ((result,) if isinstance(result, torch.Tensor) else tensors_in([result]))
        if name in plain or not _is_floating(tensor)
    ]
    if without:
        ctx.mark_non_differentiable(*without)


def _flat(values: Iterable[Any]) -> list[Any]:
    """Return the values, with the items of each list in its place."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += value
        else:
            flat.append(value)
    return flat


def _lengths(values: Iterable[Any]) -> list[int | None]:
    """Return the length of each list, and None for each other value."""
    return [len(value) if isinstance(value, (list, tuple)) else None for value in values]


def _grouped(flat: Iterable[Any], lengths: Iterable[int | None]) -> list[Any]:
    """Return the nested values: the inverse of `_flat`, by `_lengths`."""
    items = iter(flat)
    return [
        next(items) if length is None else list(itertools.islice(items, length))
        for length in lengths
    ]


class _Differentiable:
    """A call of an op that has a gradient. Autograd sees only tensors, and none in lists.

    taken, returned: the results of `_lengths` for the inputs and the outputs.
    """

    def __init__(self, op: DeclaredOp, gradient: Gradient, named: dict[str, Any]) -> None:
        self.op = op
        self.gradient = gradient
        self.named = named
        self.taken = _lengths(named[name] for name in gradient.tensors)
        self.returned: list[int | None] = []

    def tensors(self) -> list[Any]:
        """Return the tensors that the op takes, or None in place of one."""
        return _flat(self.named[name] for name in self.gradient.tensors)

    def results(self, flat: Any) -> Any:
        """Return the op's results from the flat results of the autograd function."""
        if self.returned == [None]:
            return flat
        results = _grouped(flat, self.returned)
        return results[0] if len(results) == 1 else tuple(results)


class _RecordedPlainly(torch.autograd.Function):
    """Autograd function for ops without lists, outside of torch.func transforms."""

    @staticmethod
    def forward(ctx: Any, op: DeclaredOp, gradient: Any, *args: Any) -> Any:
        order = gradient.order
        DEPTH.value += 1
        try:
            with torch._C._AutoDispatchBelowAutograd():
                if config.current().record is None:
                    result = op.overload._op(*args)
                else:  # C would serve the call unseen, and its gradient be unknown to a recording
                    result = op.backends[plainly_on(args)](*args)
        finally:
            DEPTH.value -= 1
        results = result if len(gradient.outputs) > 1 else (result,)
        known = (*args, *results)
        ctx.save_for_backward(*[known[i] for i in order.saved])
        ctx.gradient, ctx.plain = gradient, [known[i] for i in order.plain]
        ctx.inputs = [spec_of(args[i]) for i in order.tensors]
        ctx.outputs = [spec_of(value) for value in results]
        ctx.set_materialize_grads(False)  # zeros for an output that nothing depends on: `backward`
        _mark(ctx, op, results)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient, needed = ctx.gradient, ctx.needs_input_grad
        order = gradient.order
        kept = dict(zip(order.names, (*ctx.saved_tensors, *ctx.plain)))
        needs = tuple([needed[i + 2] for i in order.tensors])
        found = gradient.backward(grads, kept, needs, ctx.inputs, ctx.outputs)
        everything = [None] * len(needed)
        for i, one in zip(order.tensors, found):
            everything[i + 2] = one
        return tuple(everything)


record: Any = _RecordedPlainly.apply


class _Recorded:
    """Autograd function for any op that has a gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Differentiable, *tensors: Any) -> Any:
        gradient, inputs = call.gradient, _grouped(tensors, call.taken)
        named = {**call.named, **dict(zip(gradient.tensors, inputs))}
        result = _below(call.op, (), named)
        results = [result] if len(gradient.outputs) == 1 else [*result]
        call.returned = _lengths(results)
        known = {**named, **dict(zip(gradient.outputs, results))}
        saved = [name for name in gradient.asked if _holds_tensors(known.get(name))]
        ctx.save_for_backward(*_flat(known[name] for name in saved))
        ctx.kept = dict(zip(saved, _lengths(known[name] for name in saved)))
        ctx.gradient, ctx.taken, ctx.returned = gradient, call.taken, call.returned
        ctx.inputs = [spec_of(value) for value in inputs]
        ctx.plain = {
            name: known.get(name) for name in gradient.asked if name in known and name not in saved
        }
        ctx.outputs = [spec_of(value) for value in results]
        ctx.set_materialize_grads(False)  # zeros for an output that nothing depends on: `backward`
        _mark(ctx, call.op, results)
        return result if call.returned == [None] else tuple(_flat(results))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = zip(ctx.kept, _grouped(ctx.saved_tensors, ctx.kept.values()))
        values = {**ctx.plain, **dict(kept)}
        needs = tuple(_grouped(ctx.needs_input_grad[1:], ctx.taken))
        by_output = tuple(_grouped(grads, ctx.returned))
        gradients = ctx.gradient.backward(by_output, values, needs, ctx.inputs, ctx.outputs)
        return None, *_flat(gradients)


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a list of tensors."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


class _Call:
    """A call of an op that has no gradient. `outline`: the tree structure of its flat results."""

    def __init__(self, op: DeclaredOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.outline: Any = None


class _Refusal:
    """Autograd function whose backward pass raises."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        op: DeclaredOp = ctx.op
        raise DeclarationError(
            f"{op.name}: a backward pass reached a call of this op, which has no gradient; "
            + (
                "an op that changes its arguments can have none: call it under torch.no_grad(), or "
                "from a torch.autograd.Function, as under `In place` in docs/gradients.md"
                if op.signature.changed
                else f"add @{op.__name__}.backward, or call the op under torch.no_grad()"
            )
        )


class _Returned(_Refusal):
    """Autograd function for the results of an op without a gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Any) -> Any:
        ctx.op = call.op
        results, call.outline = _pytree.tree_flatten(_below(call.op, call.args, call.kwargs))
        _mark(ctx, ctx.op, results)
        return tuple(results)


class _Changed(_Refusal):
    """Autograd function for a tensor that an op without a gradient has changed."""

    @staticmethod
    def forward(ctx: Any, op: DeclaredOp, changed: torch.Tensor, *_: Any) -> Any:
        ctx.op = op
        ctx.mark_dirty(changed)
        return changed
