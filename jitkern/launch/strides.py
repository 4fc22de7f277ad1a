"""Check of strides: a kernel gets the address of a tensor, not its layout.

A launch function that neither makes a tensor contiguous nor asks how the tensor lies takes for
granted that it is contiguous. So a tensor that is not, of whose strides the launch function asked
nothing, is not passed. `trace/tracer.py` holds programs to the same rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ASKS = frozenset(("stride", "is_contiguous"))  # the methods of a tensor by which a function asks


class Strides:
    """The strides that a launch function has read, in one call.

    given: the tensors of the call. asks: returns whether the function asks about any strides.
    questions: those that are being noted, if any are.
    """

    def __init__(self, given: Iterable[torch.Tensor], asks: Callable[[], bool]) -> None:
        self._asks = asks
        self._apart = [t for t in given if t.layout is torch.strided and not t.is_contiguous()]
        self.questions: _Questions | None = None

    def noted(self) -> contextlib.AbstractContextManager[object]:
        """Return a block in which the questions of the launch function are noted."""
        if not self._apart or not self._asks():
            return contextlib.nullcontext()
        self.questions = _Questions(self._apart)
        return self.questions

    def refuses(self, tensor: torch.Tensor) -> bool:
        """Whether no kernel may take a tensor.

        A function that asks about some strides may pass views of its own of contiguous tensors.
        """
        if tensor.is_contiguous():
            return False
        return not self._asks() or bool(self.questions and self.questions.lack(tensor))


class _Questions(TorchFunctionMode):
    """The tensors whose strides are read while a launch function runs.

    A view, and new memory that lies like a tensor, count as this tensor.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._origins = {id(tensor): (tensor, tensor) for tensor in tensors}  # which keeps them
        self._asked: set[int] = set()  # ids of origins

    def lack(self, tensor: torch.Tensor) -> bool:
        """Whether the layout of this tensor, which the op's caller chose, was never read."""
        _, origin = self._origins.get(id(tensor), (None, None))
        return origin is not None and id(origin) not in self._asked

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        known = [arg for arg in args if id(arg) in self._origins]
        if known and getattr(function, "__name__", "") in ASKS:
            self._asked.add(id(self._origins[id(known[0])][1]))
        elif known:
            for made in result if isinstance(result, (tuple, list)) else (result,):
                self._follow(made, args, known[0])
        return result

    def _follow(self, made: Any, args: Iterable[Any], known: torch.Tensor) -> None:
        memory = _memory(made)
        if memory is not None:
            like = next((arg for arg in args if _memory(arg) == memory), None)
            if like is None and not made.is_contiguous():
                like = known
            if id(like) in self._origins:
                self._origins[id(made)] = made, self._origins[id(like)][1]


def _memory(value: Any) -> int | None:
    """Return what two tensors have in common if one is a view of the other; None for others."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
