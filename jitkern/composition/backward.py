"""The gradients of a pointwise function: as functions, and as the backward of its op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from jitkern.composition.definition import Definition, FormulaParameter, numbered
from jitkern.composition.derivative import gradients
from jitkern.composition.expression import CONST, INPUT, Node, inputs_of, node, replaced

F = TypeVar("F", bound=Definition)


class Backward(Generic[F]):
    """The gradients of a function by its arguments.

    As expressions they have other inputs than the function: the gradients of its outputs, then its
    arguments. `names` are those of these inputs for the backward of an op.
    """

    def __init__(self, function: F) -> None:
        self._function = function
        self._outputs = tuple(range(len(function.outputs)))
        self._found: dict[Any, dict[int, Node]] = {}
        self._made: dict[Any, tuple[F, list[str]]] = {}
        self.names = [*function.gradient_names, *function.argument_names]
        kinds = {frozenset(function.tensors).intersection(inputs_of(o)) for o in function.outputs}
        self._one_shape = len(kinds) == 1  # of all outputs, whatever the shapes of the arguments

    def expressions(
        self, positions: Sequence[int] = (), outputs: Sequence[int] = ()
    ) -> dict[int, Node]:
        """Return the gradients of these outputs by these arguments, where there are any.

        positions, outputs: by default all tensors, and all outputs.
        """
        function, count = self._function, len(self._outputs)
        wanted, chosen = tuple(positions or function.tensors), tuple(outputs or self._outputs)
        if (wanted, chosen) not in self._found:
            parameters = enumerate(function.parameters)
            moved = {i: node(INPUT, value=(count + i, p.kind)) for i, p in parameters}
            seeds = [node(INPUT, value=(i, "tensor")) for i in chosen]
            own = replaced([function.outputs[i] for i in chosen], moved)
            found = zip(wanted, gradients(own, seeds, [count + i for i in wanted]))
            self._found[wanted, chosen] = {i: one for i, one in found if one is not None}
        return self._found[wanted, chosen]

    def function_of(
        self, found: Mapping[int, Node], outputs: Sequence[int] = ()
    ) -> tuple[F, list[str]]:
        """Return the function of these gradients of some outputs (by default all).

        And the names of its arguments, among `names`.
        """
        key = tuple(found), tuple(outputs or self._outputs)
        if key not in self._made:
            function, count = self._function, len(self._outputs)
            taken = {parameter.name for parameter in function.parameters}
            seeds = [
                FormulaParameter(numbered(f"d_{r}", taken), "tensor") for r in function.result_names
            ]
            every = [*seeds, *(p._replace(default=None) for p in function.parameters)]
            used = sorted({i for one in found.values() for i in inputs_of(one)})
            new = {i: node(INPUT, value=(at, every[i].kind)) for at, i in enumerate(used)}
            made = function.like(
                f"{function.name}_backward",
                replaced([*found.values()], new),
                [every[i] for i in used],
                results=[f"d_{function.argument_names[i]}" for i in found],
                likes=[used.index(count + i) if count + i in used else -1 for i in found],
            )
            self._made[key] = made, [self.names[i] for i in used]
        return self._made[key]

    @property
    def nondifferentiable(self) -> tuple[str, ...]:
        """The names of the results that depend on no tensor by way of derivatives."""
        names = zip(self._function.result_names, self._function.differentiable)
        return tuple(name for name, has_one in names if not has_one)

    def functions(self) -> list[F]:
        """Return the functions that the backward calls for all gradients: one or none."""
        found = _computed(self.expressions())
        return [self.function_of(found)[0]] if found else []

    @functools.cached_property
    def of_op(self) -> Callable[..., Any]:
        """The backward of the op, see `jitkern.op.gradient.Gradient`."""
        count, tensors = len(self._outputs), self._function.tensors
        used = {i for one in self.expressions().values() for i in inputs_of(one)}
        # A gradient of zeros has the shape of one of these.
        used |= {i for i, has_one in enumerate(self._function.differentiable) if has_one}
        if not self._one_shape:
            used |= {count + i for i in tensors}
        asked = [*(self.names[i] for i in sorted(used)), "needs"]

        def backward(**known: Any) -> Any:
            needed = [i for i, need in zip(tensors, known["needs"]) if need]
            total: dict[int, Any] = {}
            groups = self._groups(known)
            for outputs in groups:
                for i, part in self._parts(needed, outputs, known).items():
                    if len(groups) > 1:  # each is summed over what its own outputs broadcast
                        part = part.sum_to_size(known[self.names[count + i]].shape)  # noqa: PLW2901
                    total[i] = total[i] + part if i in total else part
            return tuple(total.get(i) for i in tensors)

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        backward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        backward.takes_none = True  # type: ignore[attr-defined]  # zeros times infinity are NaN
        return backward

    def _groups(self, known: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Return the outputs that have a gradient, by the shapes that they have in this call."""
        given = [i for i in self._outputs if known.get(self.names[i]) is not None]
        if self._one_shape:
            return [tuple(given)] if given else []
        groups: list[tuple[Any, tuple[int, ...]]] = []
        for i in given:
            gradient = known[self.names[i]]
            for at, (shape, members) in enumerate(groups):
                if shape == gradient.shape:
                    groups[at] = shape, (*members, i)
                    break
            else:
                groups.append((gradient.shape, (i,)))
        return [members for _, members in groups]

    def _parts(
        self, needed: Sequence[int], outputs: Sequence[int], known: Mapping[str, Any]
    ) -> dict[int, Any]:
        """Return the gradients of these outputs by the arguments that need one, as tensors."""
        if not needed:
            return {}
        found = self.expressions(needed, outputs)
        parts = {i: known[self.names[one.value[0]]] for i, one in found.items() if one.op == INPUT}
        parts |= {
            i: torch.zeros_like(known[self.names[outputs[0]]])
            for i, one in found.items()
            if one.op == CONST
        }
        if computed := _computed(found):
            function, names = self.function_of(computed, outputs)
            made = function(*(known[name] for name in names))
            parts |= zip(computed, made if isinstance(made, tuple) else (made,))
        return parts


def _computed(found: Mapping[int, Node]) -> dict[int, Node]:
    """Return the gradients that a kernel must compute."""
    return {i: one for i, one in found.items() if one.op not in (INPUT, CONST)}
