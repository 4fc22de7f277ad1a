"""What is benched: an op, or a function that has one, with its cost and where it is found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitkern.calls.signature import tensors_in
from jitkern.cli.choose import choose_ops
from jitkern.cli.parser import UsageError
from jitkern.devtools.roofline import cost_of
from jitkern.errors import DeclarationError
from jitkern.launch.measure import copied
from jitkern.op.op import Op


@dataclass(frozen=True)
class Subject:
    """An op, and the function that is called: the op itself, or one whose `op` it is.

    spec: `module:attribute`, by which another process finds the function; "" if it cannot.
    """

    name: str
    op: Op
    function: Callable[..., Any]
    spec: str = ""

    @property
    def pointwise(self) -> bool:
        """Whether the function is more than its op: made of an expression, for any shape."""
        return self.function is not self.op

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a function with the op's parameters on complete arguments in their order."""
        positional, by_name = self.op.signature.split(args)
        return function(*positional, **by_name)

    def results(self, function: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that a call returns, and those that it changes, which are copies."""
        changed = [position for position, _ in self.op.signature.changed]
        args = copied(list(args), {}) if changed else args
        result = self.call(function, args)
        return tensors_in([result, *(args[position] for position in changed)])

    def complete(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments completed by the defaults of the schema, in order."""
        signature = self.op.signature
        return signature.in_order(*signature.complete(*signature.split(args)))

    def bytes(self, args: Sequence[Any]) -> int | None:
        """Return the least bytes that a forward pass moves; None if nothing says how many."""
        if self.op.declaration.cost is None:
            return None
        positional, by_name = self.op.signature.split(args)
        return cost_of(self.function, positional, by_name).bytes

    def backward_bytes(self, args: Sequence[Any], results: Sequence[Any]) -> int | None:
        """Return the least bytes that the backward pass moves: what it asks for, and gradients."""
        gradient = self.op.gradient
        if gradient is None:
            return None
        outputs = dict(zip(self.op.signature.outputs, results))
        known = {
            **dict(zip(gradient.inputs, args)),
            **outputs,
            **{name: outputs[output] for name, output in gradient.grads.items()},
        }
        read = tensors_in(known[name] for name in gradient.asked if name in known)
        return sum(tensor.nbytes for tensor in [*read, *differentiable(args)])

    def reference(self) -> Callable[..., Any]:
        """Return what a user would write: the function operation by operation, or the reference.

        Raises DeclarationError for an op without a reference: nothing can be checked.
        """
        reference = getattr(self.function, "in_torch", self.op.declaration.reference)
        if reference is None:
            raise DeclarationError(
                f"{self.op.name}: {self.op.place}a wrong result must not be timed, and the op has "
                f"no reference to compare with: add `@{self.op.__name__}.reference`"
            )
        return reference


def differentiable(args: Iterable[Any]) -> list[torch.Tensor]:
    """Return the arguments that a gradient is computed for: the leaves of a graph among them."""
    return [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]


def subject_of(function: Any, spec: str = "") -> Subject:
    """Return the subject of an op, or of a function with an `op`. Raises UsageError."""
    op = getattr(function, "op", function)
    if not isinstance(op, Op):
        raise UsageError(
            f"`{spec or repr(function):.80}` is not an op of jitkern, and has none as .op"
        )
    own = getattr(function, "__name__", "") if function is not op else ""
    name = own or op.name.removeprefix("jitkern::")
    return Subject(name, op, function, spec or _spec_of(function, op))


def _spec_of(function: Any, op: Op) -> str:
    """Return where another process finds the function: in its module, or in that of its op."""
    for module in (getattr(function, "__module__", ""), op.module):
        attributes = vars(sys.modules[module]) if module in sys.modules else {}
        for name, value in attributes.items():
            if value is function and module != "__main__":
                return f"{module}:{name}"
    return ""


def subjects_of(names: Sequence[str]) -> list[Subject]:
    """Return the subjects that a command line names: ops, packages, `module:attribute`.

    Raises UsageError, with what was perhaps meant.
    """
    specs = [name for name in names if ":" in name.replace("::", "")]
    plain = [name for name in names if name not in specs]
    ops = choose_ops(plain).ops if plain or not specs else []
    return [*map(subject_of, ops), *(subject_of(found(spec), spec) for spec in specs)]


def found(spec: str) -> Any:
    """Return the attribute of `module:attribute`. Raises UsageError."""
    module, _, attribute = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as e:
        raise UsageError(f"`{spec}` cannot be found: {e}") from e
    return value
