"""The gradient of an op: a check of the arguments and results of the function of `Op.backward`."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from jitkern.calls.signature import Signature
from jitkern.errors import DeclarationError, defined_at

_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]")
_RECORDED = frozenset("TtiIfFbBsS")  # kinds of arguments that recorder.cpp knows; see runtime.c


class _Depth(threading.local):
    """The number of backward functions that this thread is inside of.

    It is an attribute of the object from the beginning: compiled autograd traces its change, and
    Dynamo's guards would fail where the attribute first comes to be.
    """

    def __init__(self) -> None:
        self.value = 0


_depth = _Depth()


def inside_backward() -> bool:
    """Whether this thread runs the backward function of an op."""
    return _depth.value > 0


class ArgumentLayout:
    """The places of values in a call of an op without lists of tensors: arguments, then results.

    tensors: the places of the tensor inputs. saved, plain: the places of the tensors, and of the
    other values, that the backward function asks for; names: the names of these two, in order.
    """

    def __init__(self, gradient: Gradient) -> None:
        names = [*gradient.inputs, *gradient.outputs]
        asked = [i for i, name in enumerate(names) if name in gradient.asked]
        given = {*gradient.tensors, *gradient.outputs}
        self.tensors = [gradient.inputs.index(name) for name in gradient.tensors]
        self.saved = [i for i in asked if names[i] in given]
        self.plain = [i for i in asked if names[i] not in given]
        self.names = [names[i] for i in (*self.saved, *self.plain)]


class Gradient:
    """The function given to `Op.backward`, and the parameter names that it may have.

    The function gets its arguments by parameter name: `grad` (or `grad_<output>` if several outputs
    have a gradient), an input by its name in the schema, an output by its name (`out`, or `out0`,
    …, if the schema names none), `needs` (a bool for each tensor input) or `needs_<input>` (one of
    these). Only these values are kept for the backward pass. It returns one gradient, or None, for
    each tensor input, in order. For a list of tensors, all of these are lists. The gradient of an
    output that nothing depends on is zeros, but None if the function has an attribute `takes_none`.

    An op in place of the function gets its arguments by the same names; what it has beside them
    keeps its default. Its results are the gradients of the first tensor inputs; the others have
    none.

    plain: the names of outputs, and of tensor inputs, that have no gradient.
    op: the op, if it is one.
    fills: whether zeros stand for the gradient of an output that nothing depends on. partial:
    whether an input or an output has no gradient, or the function does not ask for one.
    """

    def __init__(
        self, signature: Signature, plain: Collection[str], function: Callable[..., Any]
    ) -> None:
        arguments, outputs, name = signature.arguments, signature.outputs, signature.name
        self.signature, self.name = signature, name
        given: Any = function
        self.op: Any = given if isinstance(getattr(given, "signature", None), Signature) else None
        self.place: str = given.place if self.op else defined_at(function)
        self.inputs = [argument.name for argument in arguments]
        self.tensors = [a.name for a in arguments if str(a.type) in _TENSORS]
        self.outputs = outputs
        self.constants = [name for name in self.tensors if name in plain]
        with_gradient = [output for output in outputs if output not in plain]
        single = len(with_gradient) == 1
        self.grads = {"grad" if single else f"grad_{output}": output for output in with_gradient}
        self.needs = {f"needs_{name}": place for place, name in enumerate(self.tensors)}
        known = {*self.inputs, *self.outputs, *self.grads, *self.needs, "needs"}
        self.function = function
        self.asked = _parameters(function) if not self.op else _asked(self.op.signature, known)
        self._given = [(n, outputs.index(o)) for n, o in self.grads.items() if n in self.asked]
        flags: dict[str, int | None] = {"needs": None, **self.needs}
        self._flags = [(name, flags[name]) for name in self.asked if name in flags]
        self.fills = not getattr(function, "takes_none", False)
        self.partial = bool(plain) or len(self._given) < len(outputs)
        if signature.changed:
            raise DeclarationError(
                f"{name}: {self.place}an op that changes its arguments cannot have a backward: "
                "call it from an autograd.Function, as under `In place` in docs/gradients.md"
            )
        lists = any(str(a.type) == "List[Tensor]" for a in (*arguments, *signature.returns))
        self.order = ArgumentLayout(self) if not lists else None
        clash = {*self.inputs} & {*self.outputs, *self.grads, *self.needs, "needs"}
        if clash:
            raise DeclarationError(
                f"{name}: {self.place}a backward cannot tell the input `{min(clash)}` from a "
                "gradient, an output or a `needs` of that name; rename the argument, or name the "
                "returns in the schema"
            )
        if any("Tensor" in str(a.type) and a.name not in self.tensors for a in arguments):
            raise DeclarationError(
                f"{name}: {self.place}an op with a list of optional tensors cannot have a backward"
            )
        if not known.issuperset(self.asked):
            unknown = ", ".join(sorted({*self.asked} - known))
            raise DeclarationError(
                f"{name}: {self.place}its backward has the unknown parameters {unknown}; "
                f"it may have: {', '.join(sorted(known - self.needs.keys()))}"
            )
        returned = len(self.op.signature.outputs) if self.op else 1
        if self.op and not 0 < returned <= len(self.tensors):
            raise DeclarationError(
                f"{name}: {self.place}its backward, the op {self.op.name}, returns {returned} "
                f"gradients for the tensors {', '.join(self.tensors)}: return one for each of the "
                "first of them"
            )
        if self.op and self.op.signature.changed:
            raise DeclarationError(
                f"{name}: {self.place}its backward, the op {self.op.name}, changes its arguments, "
                "which other nodes of the graph may read: give an op that returns new tensors"
            )

    def backward(
        self,
        grads: tuple[Any, ...],
        kept: dict[str, Any],
        needs: tuple[Any, ...],
        inputs: list[Any],
        outputs: list[Any],
    ) -> tuple[Any, ...]:
        """Return one gradient, or None, for each tensor input; for a list, a list of as many.

        kept: the inputs and outputs that the function asks for, by name.
        grads: for each output its gradient, or None, which stands for zeros. inputs, outputs: the
        result of `spec_of` for each tensor input and each output. Raises DeclarationError.
        """
        for name in self.constants:
            needed = needs[self.tensors.index(name)]
            if any(needed) if isinstance(needed, (list, tuple)) else needed:
                raise DeclarationError(
                    f"{self.name}: a backward pass reached `{name}`, which has no gradient in this "
                    f"op: pass `{name}.detach()`"
                )
        filled = [*grads]
        for _, place in self._given if self.fills else ():
            if grads[place] is None or isinstance(grads[place], list):
                filled[place] = _filled(grads[place], outputs[place])
        return self.check(self._run(filled, needs, kept), needs, inputs)

    @functools.cached_property
    def in_cpp(self) -> bool:
        """Whether `recorder.cpp` can record calls with this gradient."""
        signature = self.signature
        if self.order is None or self.partial or signature.parameters is None:
            return False
        kinds = {parameter.kind for parameter in signature.parameters}
        return kinds <= _RECORDED and {*signature.results} == {"T"}

    def taken(self) -> list[tuple[str, int]] | None:
        """Return where each argument of `op` comes from, as `Gradient` in recorder.cpp has it.

        Returns None if one has another type than what it gets, or if a result is not a tensor:
        Python converts, or raises an error.
        """
        assert self.op and self.order
        if "?" in self.op.signature.results:
            return None
        types = {a.name: str(a.type) for a in self.signature.arguments}
        found: list[tuple[str, int]] = []
        for argument in self.op.signature.arguments:
            name, wanted = argument.name, str(argument.type)
            if name not in self.asked:
                found.append(("d", 0))
                continue
            if name in self.grads:
                given, source = "Tensor", ("g", self.outputs.index(self.grads[name]))
            elif name in self.needs:
                given, source = "bool", ("n", self.needs[name])
            elif name not in self.order.names:
                return None
            else:
                place, saved = self.order.names.index(name), len(self.order.saved)
                given = types.get(name, "Tensor")
                source = ("s", place) if place < saved else ("p", place - saved)
            if wanted not in (given, f"Optional[{given}]"):
                return None
            found.append(source)
        return found

    def of_values(
        self, grads: tuple[Any, ...], needs: tuple[bool, ...], *values: Any
    ) -> tuple[Any, ...]:
        """Return unchecked gradients of a call that C++ recorded, see `recorder.cpp`.

        values: those that `order` names, in order.
        """
        assert self.order
        return self._run(grads, needs, dict(zip(self.order.names, values)))

    def _run(
        self, grads: Sequence[Any], needs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Run the function; return one value for each tensor input. Raises DeclarationError.

        named: the inputs and outputs that the function asks for, to which the rest is added.
        """
        for name, place in self._given:
            named[name] = grads[place]
        for name, of_tensor in self._flags:
            named[name] = needs if of_tensor is None else needs[of_tensor]
        _depth.value += 1
        try:
            result = self.function(**named)
        finally:
            _depth.value -= 1
        gradients = result if isinstance(result, tuple) else (result,)
        if self.op:
            gradients += (None,) * (len(self.tensors) - len(gradients))
        if len(gradients) != len(self.tensors):
            raise DeclarationError(
                f"{self.name}: {self.place}its backward returned {len(gradients)} gradients for "
                f"the tensors {', '.join(self.tensors)}: return one gradient, or None, for each, "
                "and a list for a list of tensors"
            )
        return gradients

    def check(
        self, gradients: tuple[Any, ...], needs: tuple[Any, ...], inputs: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the gradients, lists as lists. Raises DeclarationError for one that Torch refuses.

        inputs: the result of `spec_of` for each tensor input; one that is None has no gradient.
        """
        checked = zip(self.tensors, gradients, needs, inputs)
        return tuple(self._checked(*of_input) for of_input in checked)

    def _checked(self, name: str, gradient: Any, needed: Any, expected: Any) -> Any:
        """Check and return the gradient of a tensor or list. Raises DeclarationError."""
        if isinstance(expected, list):
            gradients = [None] * len(expected) if gradient is None else gradient
            if not isinstance(gradients, (list, tuple)) or len(gradients) != len(expected):
                raise DeclarationError(
                    f"{self.name}: {self.place}its backward returned no list of {len(expected)} "
                    f"gradients for the list `{name}`: return one, or None, for each of its tensors"
                )
            each = enumerate(zip(gradients, needed, expected))
            return [self._checked(f"{name}[{i}]", *of_item) for i, of_item in each]
        is_tensor = isinstance(gradient, torch.Tensor)
        if gradient is not None and (not is_tensor or spec_of(gradient) != expected):
            self._check(name, gradient, expected, needed=needed)
        return None if expected is None else gradient

    def _check(self, name: str, gradient: Any, expected: Any, *, needed: bool) -> None:
        """Refuse what Torch refuses: Torch sums over broadcast dimensions, and converts dtypes."""
        failure = f"{self.name}: {self.place}its backward returned, for `{name}`, "
        if not isinstance(gradient, torch.Tensor):
            raise DeclarationError(
                f"{failure}a {type(gradient).__name__} in place of a gradient: return a tensor or "
                "None"
            )
        if not needed or expected is None:
            return
        shape, device, dtype = expected
        if not _sums_to(gradient.shape, shape):
            raise DeclarationError(
                f"{failure}a gradient of shape {list(gradient.shape)}, and `{name}` has the shape "
                f"{list(shape)}: return a gradient of that shape"
            )
        if gradient.device != device and gradient.dim():
            raise DeclarationError(
                f"{failure}a gradient on {gradient.device}, and `{name}` is on {device}: return it "
                "on that device"
            )
        if gradient.is_complex() and not dtype.is_complex:
            raise DeclarationError(
                f"{failure}a gradient of {gradient.dtype}, and `{name}` is of {dtype}: return its "
                "real part"
            )


def spec_of(tensor: Any) -> Any:
    """Return the shape, device and dtype that a gradient must have; None if not a tensor.

    For a list, return a list of these.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.device, tensor.dtype
    if isinstance(tensor, (list, tuple)):
        return [spec_of(item) for item in tensor]
    return None


def _filled(gradient: Any, output: Any) -> Any:
    """Return the gradient of an output, by its spec, with zeros where nothing depends on it."""
    if isinstance(output, list):
        return [_filled(*both) for both in zip(gradient, output)]
    return _zeros(output) if gradient is None and output is not None else gradient


def _zeros(spec: Any) -> torch.Tensor:
    """Return the gradient of an output that nothing depends on."""
    shape, device, dtype = spec
    return torch.zeros(shape, device=device, dtype=dtype)


def _sums_to(shape: torch.Size, smaller: torch.Size) -> bool:
    """Whether a tensor of the smaller shape broadcasts to this shape."""
    return len(shape) >= len(smaller) and all(
        size in (1, length) for size, length in zip(reversed(smaller), reversed(shape))
    )


def _asked(signature: Signature, known: Collection[str]) -> list[str]:
    """Return the arguments that an op needs, or that have one of the known names."""
    arguments = signature.arguments
    return [a.name for a in arguments if a.name in known or not a.has_default_value()]


def _parameters(function: Callable[..., Any]) -> list[str]:
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return list(inspect.signature(function).parameters)
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])  # 40 us less
