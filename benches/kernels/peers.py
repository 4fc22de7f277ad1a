"""Who is measured: jitkern, its reference in eager mode and compiled, and kernels of others.

A peer from elsewhere is one row of ADAPTERS: the op it computes, the package it needs, and a
function that imports it and returns the call, with the op's parameters.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benches import common
from benches.kernels.subject import Subject
from jitkern import config
from jitkern.cli.parser import UsageError
from jitkern.errors import meant
from jitkern.kernels_src.int4_weight import Int4Weight

Function = Callable[..., Any]
OURS = "jitkern"


class Unsupported(Exception):
    """A peer takes no such arguments: it is left out, and nothing is wrong with it."""


@dataclass(frozen=True)
class Contender:
    """One way to compute an op.

    differentiable: autograd knows its backward. exact: it rounds nothing that the op keeps.
    version: the distribution of a peer from elsewhere, e.g. `liger-kernel 0.8.5`.
    """

    name: str
    function: Function
    differentiable: bool = True
    exact: bool = True
    version: str = ""


@dataclass(frozen=True)
class Adapter:
    """How to call a peer from elsewhere; `make` imports it."""

    name: str
    package: str
    make: Callable[[], Function]
    differentiable: bool = True
    exact: bool = True


def of_its_own(function: Function) -> Function:
    """Return the function with a code object that nobody shares.

    Dynamo keeps what it compiled by code object: static and dynamic shapes would mix.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def compiled(function: Function, *, dynamic: bool) -> Function:
    """Return what torch.compile makes of a function, apart from all others."""
    return torch.compile(of_its_own(function), dynamic=dynamic)


def _liger(name: str) -> Callable[[], Function]:
    def make() -> Function:
        from liger_kernel.transformers import functional

        function: Function = getattr(functional, name)
        return function

    return make


def _liger_norm(name: str) -> Callable[[], Function]:
    """Return a maker of Liger's norm, which is not to write over the gradient that it is given."""
    return lambda: functools.partial(_liger(name)(), in_place=False)


def _torch_cross_entropy() -> Function:
    from torch.nn.functional import cross_entropy

    def call(logits: torch.Tensor, target: torch.Tensor, *_options: Any) -> torch.Tensor:
        return cross_entropy(logits.float(), target)  # in 16 bits its loss has 3 digits

    return call


def _liger_cross_entropy() -> Function:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def call(logits: torch.Tensor, target: torch.Tensor, *_options: Any) -> torch.Tensor:
        return liger_cross_entropy(logits, target).float()

    return call


def _unpaged(attend: Function) -> Function:
    """Return attention of PyTorch over dense keys and values, which the first call makes."""
    kept: dict[int, tuple[torch.Tensor, ...]] = {}  # the caches too, so that addresses stay theirs

    def call(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
        _lens: torch.Tensor, scale: float | None = None, *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if not q.is_cuda or q.dim() != 3 or any(isinstance(x, torch.Tensor) or x for x in rest):
            raise Unsupported("it is beside one new token of each sequence, on a GPU, without more")
        if k_cache.data_ptr() not in kept:
            if {caches[0].shape for caches in kept.values()} - {k_cache.shape}:
                kept.clear()
            dense = (c[table.long()].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
            kept[k_cache.data_ptr()] = k_cache, v_cache, *(c.contiguous() for c in dense)
        out, lse, *_ = attend(q[:, :, None], *kept[k_cache.data_ptr()][2:], scale=scale)
        return out[:, :, 0], lse.reshape(q.shape[:2])

    return call


def _unpaged_flash() -> Function:
    return _unpaged(torch.ops.aten._scaled_dot_product_flash_attention)


def _unpaged_cudnn() -> Function:
    """Return what `F.scaled_dot_product_attention` chooses for such calls on an H200."""

    def attend(*args: torch.Tensor, scale: float | None) -> tuple[Any, ...]:
        aten = torch.ops.aten._scaled_dot_product_cudnn_attention
        results: tuple[Any, ...] = aten(*args, None, compute_log_sumexp=True, scale=scale)
        return results

    return _unpaged(attend)


def _liger_packed(name: str) -> Callable[[], Function]:
    """Return a maker of Liger's function of gate and up, which copies both out of the tensor."""

    def make() -> Function:
        function = _liger(name)()
        return lambda gate_up: function(*gate_up.chunk(2, -1))

    return make


def _of_rows(make: Callable[[], Function]) -> Callable[[], Function]:
    """Return a maker of a peer's softmax of rows, called with all parameters of the op."""

    def made() -> Function:
        function = make()

        def call(x: torch.Tensor, dim: int, scale: float) -> torch.Tensor:
            if dim not in (-1, x.dim() - 1) or scale != 1:
                raise Unsupported("it has neither `dim` nor `scale`")
            result: torch.Tensor = function(x)
            return result

        return call

    return made


def _quack_softmax() -> Function:
    from quack.softmax import softmax

    return lambda x: softmax(_two_dimensions(x))


def _flashinfer_softmax() -> Function:
    from flashinfer.sampling import softmax

    def call(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise Unsupported("its softmax is that of a sampler: it gives float32 alone")
        return softmax(_two_dimensions(x))

    return call


def _two_dimensions(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        raise Unsupported(f"it takes two dimensions, not {x.dim()}")
    return x


def _cupy_elementwise(parameters: str, expression: str) -> Callable[[], Function]:
    def make() -> Function:
        import cupy

        kernel = cupy.ElementwiseKernel(parameters, "T out", expression)

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            if tensors[0].dtype == torch.bfloat16:
                raise Unsupported("it has no bfloat16")
            out = torch.empty_like(tensors[0])  # CuPy's own memory cannot be captured in a graph
            stream = torch.cuda.current_stream()
            with cupy.cuda.ExternalStream(stream.cuda_stream):
                kernel(*map(cupy.from_dlpack, tensors), cupy.from_dlpack(out))
            return out

        return call

    return make


def _of_written_out_weights() -> Function:
    """Return `F.linear` with the weight in 16 bits, which is written out once and kept."""
    from torch.nn.functional import linear
    from torch.utils.weak import WeakIdKeyDictionary

    kept = WeakIdKeyDictionary()

    def call(
        x: torch.Tensor, qweight: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        if qweight not in kept:
            if qweight.dtype == torch.int8:
                kept[qweight] = (qweight * scale.float()[:, None]).to(x.dtype)
            else:
                kept[qweight] = Int4Weight(qweight, scale, *rest[:1]).values().to(x.dtype)
        return linear(x, kept[qweight])

    return call


ADAPTERS = {
    "softmax": (
        Adapter("liger", "liger_kernel", _of_rows(_liger("liger_softmax"))),
        Adapter("quack", "quack", _of_rows(_quack_softmax)),
        Adapter(
            "flashinfer", "flashinfer", _of_rows(_flashinfer_softmax), differentiable=False
        ),
    ),
    "rms_norm": (Adapter("liger", "liger_kernel", _liger_norm("liger_rms_norm")),),
    "add_rms_norm": (Adapter("liger", "liger_kernel", _liger_norm("liger_fused_add_rms_norm")),),
    "layer_norm": (Adapter("liger", "liger_kernel", _liger("liger_layer_norm")),),
    "cross_entropy": (
        Adapter("F.cross_entropy", "torch", _torch_cross_entropy),
        # Where a gradient is wanted it overwrites the logits.
        Adapter("liger", "liger_kernel", _liger_cross_entropy, differentiable=False),
    ),
    "vec_add": (
        Adapter("cupy", "cupy", _cupy_elementwise("T x, T y", "out = x + y"), False),
    ),
    "muladd": (
        Adapter("cupy", "cupy", _cupy_elementwise("T a, T b, T c", "out = a * b + c"), False),
    ),
    "paged_decode": (
        Adapter("unpaged cuDNN attention", "torch", _unpaged_cudnn, differentiable=False),
        Adapter("unpaged flash attention", "torch", _unpaged_flash, differentiable=False),
    ),
    **{
        f"{name}_linear": (Adapter("F.linear", "torch", _of_written_out_weights, exact=False),)
        for name in ("w4a16", "w8a16", "int8")
    },
    "topk": (Adapter("torch.topk", "torch", lambda: torch.topk),),
    "swiglu": (Adapter("liger", "liger_kernel", _liger("liger_swiglu")),),
    "silu_and_mul": (Adapter("liger", "liger_kernel", _liger_packed("liger_swiglu")),),
    "gelu_tanh_and_mul": (Adapter("liger", "liger_kernel", _liger_packed("liger_geglu")),),
}  # fmt: skip
STATIC, DYNAMIC = "torch.compile", "torch.compile-dynamic"
BUILT_IN = (OURS, "eager", STATIC, DYNAMIC)


class Peers:
    """The contenders of one subject, and what is left out, with the reasons.

    wanted: names of peers; by default all. jitkern itself is always there.
    """

    def __init__(self, subject: Subject, device: str, wanted: Sequence[str] = ()) -> None:
        self.subject = subject
        self.left_out: dict[str, str] = {}
        reference = subject.reference()
        self._reference = reference
        self._wanted = [*wanted] or known_names()
        self._fixed = {OURS: Contender(OURS, subject.function, subject.op.gradient is not None)}
        for source in subject.op.sources[device][1:]:  # the first is what a call runs
            name = f"{OURS}-{source.kind}"
            if name in self._wanted:
                if subject.function is not subject.op:
                    self.left_out[name] = f"{subject.name} is more than one op"
                    continue
                alone = common.of_kind(subject.op, device, source.kind)
                self._fixed[name] = Contender(name, alone, differentiable=False)
        if "eager" in self._wanted:
            self._fixed["eager"] = Contender("eager", reference)
        if DYNAMIC in self._wanted:  # one for all shapes
            self._fixed[DYNAMIC] = Contender(DYNAMIC, compiled(reference, dynamic=True))
        for contender in self._from_elsewhere(device):
            self._fixed[contender.name] = contender

    def of_shape(self) -> list[Contender]:
        """Return the contenders for one shape, for which alone the static one is compiled."""
        contenders = dict(self._fixed)
        if STATIC in self._wanted:
            contenders[STATIC] = Contender(STATIC, compiled(self._reference, dynamic=False))
        order = known_names()
        return sorted(contenders.values(), key=lambda contender: order.index(contender.name))

    def _from_elsewhere(self, device: str) -> Iterator[Contender]:
        """Yield the adapters of this op that can be imported; note why others cannot."""
        names = (self.subject.name, self.subject.op.__name__)
        for adapter in next((ADAPTERS[name] for name in names if name in ADAPTERS), ()):
            if adapter.name not in self._wanted:
                continue
            if device != "cuda" and adapter.package != "torch":
                self.left_out[adapter.name] = "its kernels are for CUDA devices"
            elif not importlib.util.find_spec(adapter.package):
                self.left_out[adapter.name] = f"there is no package `{adapter.package}` here"
            else:
                elsewhere = adapter.package != "torch"
                version = common.distribution(adapter.package) if elsewhere else ""
                try:
                    function = adapter.make()
                except Exception as e:  # noqa: BLE001  whatever the import of a package raises
                    self.left_out[adapter.name] = failure(e, version)
                else:
                    rest = adapter.differentiable, adapter.exact, version
                    yield Contender(adapter.name, function, *rest)


def known_peers() -> list[str]:
    """Return the names of the adapters."""
    return list(dict.fromkeys(a.name for adapters in ADAPTERS.values() for a in adapters))


def known_names() -> list[str]:
    """Return the names of all contenders; `jitkern-triton` and the like are other sources."""
    return [*BUILT_IN, *(f"{OURS}-{kind}" for kind in config.KINDS), *known_peers()]


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError for a peer that there is not."""
    known = known_names()
    for name in names:
        if name not in known:
            raise UsageError(f"there is no peer `{name}`{meant(name, known)}: {', '.join(known)}")


def failure(e: BaseException, version: str = "") -> str:
    """Return what failed, in one line. version: of the peer whose error it is, or ""."""
    first = (str(e).strip().splitlines() or [""])[0][:200]
    text = f"{type(e).__name__}: {first}"
    return f"fails with {version}: {text}" if version else text
