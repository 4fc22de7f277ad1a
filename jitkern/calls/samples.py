"""Samples: calls to prewarm, from the functions of `.samples` and the texts of `prewarm=`."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jitkern.calls.signature import Signature
from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES, codes_of_torch

_OPTIONS = frozenset(("dtype", "device", "requires_grad"))
_IS_ON = {getattr(torch.Tensor, f"is_{device}").__get__: device for device in ("cuda", "cpu")}


@contextlib.contextmanager
def same_random_numbers(device: str) -> Iterator[None]:
    """Have Torch draw the same numbers in each such block, and go on after it as before it.

    Else the sizes of a sample, and so the records of its calls, would be others in each process.
    """
    here = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(here):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed all GPUs, too
        if here:
            torch.cuda.manual_seed(0)
        yield


class ShapesAlone(TorchFunctionMode):
    """A mode in which the most used functions make meta tensors without Torch's own meta kernels.

    Torch's meta kernels import sympy, which takes 0.5 s.

    device: the type of the device for which meta tensors stand: `is_cuda` and `is_cpu` answer for
    it.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Return the same shape, dtype and strides as Torch's function."""
        if func in _IS_ON and args[0].is_meta:
            return self._device == _IS_ON[func]
        kwargs = kwargs or {}
        tensor_like = None
        made_on_meta = kwargs.keys() <= _OPTIONS and str(kwargs.get("device")) == "meta"
        if func in (torch.randn, torch.rand):
            if made_on_meta:
                tensor_like = torch.empty(*args, **kwargs)
        elif func is torch.randint:
            if made_on_meta and _are_bounds_and_sizes(args):
                tensor_like = torch.empty(args[-1], **{"dtype": torch.int64, **kwargs})
        elif func in (torch.empty_like, torch.randn_like, torch.rand_like):
            if len(args) == 1 and kwargs.keys() <= {"dtype"}:
                tensor_like = _like(args[0], **kwargs)
        elif func in (torch.Tensor.mul, torch.Tensor.div):
            if len(args) == 2 and not kwargs and _are_tensor_and_number(*args):
                tensor_like = _like(args[0])
        elif func in (torch.softmax, torch.Tensor.softmax):
            dims = (*args[1:], *(kwargs[name] for name in kwargs if name == "dim"))
            if len(args) + len(kwargs) == 2 and len(dims) == 1 and _is_dim(args[0], dims[0]):
                tensor_like = _like(args[0])
        return func(*args, **kwargs) if tensor_like is None else tensor_like


def _like(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return a meta tensor like `x`; None unless `x` is a plain, contiguous meta tensor."""
    plain = type(x) is torch.Tensor and x.is_meta and not x.requires_grad
    if not plain or not x.is_contiguous():
        return None
    return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")


def _are_bounds_and_sizes(args: Sequence[Any]) -> bool:
    """Whether `torch.randint` takes these: at most two bounds, the lower one first, and sizes."""
    low, high = args[:-1] if len(args) == 3 else (0, args[0])
    return len(args) in (2, 3) and isinstance(args[-1], (tuple, list)) and low < high


def _are_tensor_and_number(x: Any, number: Any) -> bool:
    """Whether a product or quotient of these has the dtype of `x`."""
    is_real = isinstance(x, torch.Tensor) and x.is_floating_point()
    return is_real and isinstance(number, (int, float))


def _is_dim(x: torch.Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and -x.dim() <= dim < x.dim() and x.is_floating_point()


class Sample(NamedTuple):
    """A call to prewarm, with meta tensors for tensors.

    origin: where the call is listed. problem: why the listed call cannot be used, or "".
    """

    origin: str
    args: tuple[Any, ...] = ()
    problem: str = ""


def tensor(text: str) -> torch.Tensor:
    """Return a contiguous meta tensor for a text like `f16[64, 1000]`. Raises DeclarationError."""
    name, _, sizes = text.strip().partition("[")
    shape = [part.strip() for part in sizes[:-1].split(",") if part.strip()]
    problem = f"`{text:.80}` does not describe a tensor, as `f16[64, 1000]` does"
    if name not in DTYPES:
        raise DeclarationError(f"{problem}; dtypes are {', '.join(DTYPES)}")
    if not sizes.endswith("]") or not all(s.isascii() and s.isdigit() for s in shape):
        raise DeclarationError(f"{problem}: sizes are whole numbers between `[` and `]`")
    try:
        dtype = getattr(torch, DTYPES[name].torch)
        return torch.empty([*map(int, shape)], dtype=dtype, device="meta")
    except (ValueError, TypeError, RuntimeError) as e:
        raise DeclarationError(f"{problem}: its sizes are too large") from e


def samples_of(signature: Signature, calls: Iterable[Any]) -> list[Sample]:
    """Return the calls of `prewarm=`, with a meta tensor for each text that describes a tensor."""
    return [
        _sample(signature, f"call {number} of prewarm=", call if _is_list(call) else (call,))
        for number, call in enumerate(calls, 1)
    ]


def spelt(signature: Signature, texts: Iterable[str]) -> list[Sample]:
    """Return the calls that texts spell: arguments with commas or spaces between them.

    A tensor is spelt like `f16[64, 1000]`, anything else as in Python.
    """
    samples = []
    for text in texts:
        parts = [part for part in re.findall(r"(?:\[[^\]]*\]?|'[^']*'|[^\s,\[])+", text) if part]
        samples.append(_sample(signature, f"the call `{text}`", [_value(part) for part in parts]))
    return samples


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def spell(args: Sequence[Any]) -> str:
    """Return the text of a call that `spelt` reads, or "" if it would not build the same."""
    parts = []
    for value in args:
        if isinstance(value, torch.Tensor):
            code = codes_of_torch().get(value.dtype)
            if not code or not value.is_contiguous():
                return ""
            parts.append(f"{code}[{', '.join(map(str, value.shape))}]")
        elif value is None or (isinstance(value, (int, float)) and math.isfinite(value)):
            parts.append(repr(value))
        else:
            return ""
    return ", ".join(parts)


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _sample(signature: Signature, origin: str, call: Sequence[Any]) -> Sample:
    types = [str(argument.type) for argument in signature.arguments]
    try:
        args = [_tensors(a) if "Tensor" in type_ else a for a, type_ in zip(call, types)]
        args += call[len(args) :]
    except DeclarationError as e:
        return Sample(origin, problem=f"{origin}: {e}")
    problem = signature.misfit(args)
    return Sample(origin, problem=f"{origin}: {problem}") if problem else Sample(origin, (*args,))


def _tensors(value: Any) -> Any:
    """Return `value` with a meta tensor for each text in it. Raises DeclarationError."""
    if _is_list(value):
        return [_tensors(item) for item in value]
    return value if value is None or isinstance(value, torch.Tensor) else tensor(str(value))
