"""Calls to make ready ahead of time: what of them is known, and how `prewarm=` spells them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES

_OPTIONS = frozenset(("dtype", "device", "requires_grad"))


class ShapesAlone(TorchFunctionMode):
    """What makes meta tensors of a known shape makes them at once.

    Torch's own way, for what samples and launch functions mostly do, imports sympy: 0.5 s.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What Torch's function returns, but for the content that no meta tensor has."""
        kwargs = kwargs or {}
        made = None
        if func in (torch.randn, torch.rand):
            if kwargs.keys() <= _OPTIONS and str(kwargs.get("device")) == "meta":
                made = torch.empty(*args, **kwargs)
        elif func in (torch.empty_like, torch.randn_like, torch.rand_like):
            if len(args) == 1 and kwargs.keys() <= {"dtype"}:
                made = _like(args[0], **kwargs)
        elif func in (torch.softmax, torch.Tensor.softmax):
            dims = (*args[1:], *(kwargs[name] for name in kwargs if name == "dim"))
            if len(args) + len(kwargs) == 2 and len(dims) == 1 and _is_dim(args[0], dims[0]):
                made = _like(args[0])
        return func(*args, **kwargs) if made is None else made


def _like(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """A tensor like a plain contiguous one on the device "meta"."""
    plain = type(x) is torch.Tensor and x.is_meta and not x.requires_grad
    if not plain or not x.is_contiguous():
        return None
    return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")


def _is_dim(x: torch.Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and -x.dim() <= dim < x.dim() and x.is_floating_point()


class Sample(NamedTuple):
    """A call to make ready, with meta tensors for tensors.

    origin: where it stands. problem: why it is none.
    """

    origin: str
    args: tuple[Any, ...] = ()
    problem: str = ""


def tensor(text: str) -> torch.Tensor:
    """The meta tensor that `f16[64, 1000]` spells, contiguous. Raises DeclarationError."""
    name, _, sizes = text.strip().partition("[")
    shape = [part.strip() for part in sizes[:-1].split(",") if part.strip()]
    wrong = f"`{text:.80}` is no tensor like `f16[64, 1000]`"
    if name not in DTYPES or not sizes.endswith("]") or not all(map(_is_size, shape)):
        raise DeclarationError(f"{wrong}; dtypes are {', '.join(DTYPES)}")
    try:
        dtype = getattr(torch, DTYPES[name].torch)
        return torch.empty([*map(int, shape)], dtype=dtype, device="meta")
    except (ValueError, TypeError, RuntimeError) as e:
        raise DeclarationError(f"{wrong}: it is too large") from e


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit()


def misfit(schema: str, args: Sequence[Any]) -> str:
    """Why these are no arguments for this schema, in its order; empty if their number fits."""
    arguments = _arguments(schema)
    if len(args) > len(arguments):
        return f"{len(args)} arguments, and {schema} takes {len(arguments)}"
    missing = [a.name for a in arguments[len(args) :] if not a.has_default_value()]
    return f"no {' and no '.join(missing)} for {schema}" if missing else ""


@functools.cache
def _arguments(schema: str) -> list[Any]:
    return list(torch._C.parse_schema(schema).arguments)


def samples_of(schema: str, calls: Iterable[Any]) -> list[Sample]:
    """What `prewarm=` lists, with a meta tensor for each text where the schema has a tensor."""
    return [
        _sample(schema, f"call {number} of prewarm=", call if _is_list(call) else (call,))
        for number, call in enumerate(calls, 1)
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _sample(schema: str, origin: str, call: Sequence[Any]) -> Sample:
    problem = misfit(schema, call)
    if problem:
        return Sample(origin, problem=f"{origin} has {call!r:.200}: {problem}")
    types = [str(a.type) for a in _arguments(schema)]
    try:
        args = [_tensors(a) if "Tensor" in type_ else a for a, type_ in zip(call, types)]
    except DeclarationError as e:
        return Sample(origin, problem=f"{origin}: {e}")
    return Sample(origin, tuple(args))


def _tensors(value: Any) -> Any:
    """With a meta tensor for each text."""
    if _is_list(value):
        return [_tensors(item) for item in value]
    return tensor(value) if isinstance(value, str) else value
