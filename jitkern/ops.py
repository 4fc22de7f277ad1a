"""The shipped ops; each is declared at its first use, and compiles on its first call.

`jitkern.ops.softmax` is the op as a function, `torch.ops.jitkern.softmax` the same op in Torch.
Beside the ops are what uses them: a loop's meters (`AsyncScalar`, `LossMeter`), attention and its
masks (`flash_attention`, `BlockSparseMask`), `cross_entropy_in_place`, `PagedCache` with its
`KVCacheFull`, `quantize_linears` with its layers (`Int4Linear`, `Int8Linear`), and the modules
`int4` (packing, and rounding to the nearest) and `converters` (from GPTQ, AWQ and torchao).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jitkern.op.all_ops import attach

if TYPE_CHECKING:
    from torch import Tensor

    from jitkern.declare import Op
    from jitkern.kernels_src import int4_converters as converters, int4_weight as int4
    from jitkern.kernels_src.async_scalar import AsyncScalar
    from jitkern.kernels_src.block_sparse_attention.flash_attention import flash_attention
    from jitkern.kernels_src.block_sparse_attention.mask import BlockSparseMask
    from jitkern.kernels_src.cross_entropy.in_place import cross_entropy_in_place
    from jitkern.kernels_src.linears import Int4Linear, Int8Linear, quantize_linears
    from jitkern.kernels_src.loss_meter.meter import LossMeter
    from jitkern.kernels_src.paged_decode.paged_cache import KVCacheFull, PagedCache

    __all__ = [
        "AsyncScalar", "BlockSparseMask", "Int4Linear", "Int8Linear", "KVCacheFull", "LossMeter",
        "PagedCache", "converters", "cross_entropy_in_place", "flash_attention", "int4",
        "quantize_linears",
    ]  # fmt: skip

    # What each returns, for type checkers, which read no schema; tests/test_types.py compares.
    add_rms_norm: Op[tuple[Tensor, Tensor]]
    add_rms_norm_quantized: Op[tuple[Tensor, Tensor, Tensor]]
    block_sparse_attention: Op[tuple[Tensor, Tensor]]
    block_sparse_attention_backward: Op[tuple[Tensor | None, Tensor | None, Tensor | None]]
    cross_entropy: Op[Tensor]
    cross_entropy_backward: Op[Tensor]
    cross_entropy_rescale_: Op[None]
    cross_entropy_with_grad: Op[tuple[Tensor, Tensor]]
    cross_entropy_with_grad_: Op[Tensor]
    gelu_and_mul: Op[Tensor]
    gelu_and_mul_backward: Op[Tensor]
    gelu_tanh_and_mul: Op[Tensor]
    gelu_tanh_and_mul_backward: Op[Tensor]
    int8_linear: Op[Tensor]
    kv_cache_append: Op[None]
    layer_norm: Op[Tensor]
    layer_norm_backward: Op[tuple[Tensor | None, Tensor | None, Tensor | None]]
    log_softmax: Op[Tensor]
    log_softmax_backward: Op[Tensor]
    loss_meter_: Op[None]
    muladd: Op[Tensor]
    nonfinite_flag_: Op[None]
    nonfinite_flag_tensor_: Op[None]
    paged_decode: Op[tuple[Tensor, Tensor]]
    quantize_rowwise: Op[tuple[Tensor, Tensor]]
    relu2_and_mul: Op[Tensor]
    relu2_and_mul_backward: Op[Tensor]
    rms_norm: Op[Tensor]
    rms_norm_backward: Op[tuple[Tensor | None, Tensor | None]]
    rms_norm_quantized: Op[tuple[Tensor, Tensor]]
    rope: Op[tuple[Tensor, Tensor]]
    rope_: Op[None]
    sample: Op[Tensor]
    sample_filter: Op[Tensor]
    silu_and_mul: Op[Tensor]
    silu_and_mul_backward: Op[Tensor]
    softmax: Op[Tensor]
    softmax_backward: Op[Tensor]
    topk: Op[tuple[Tensor, Tensor]]
    vec_add: Op[Tensor]
    w4a16_linear: Op[Tensor]
    w8a16_linear: Op[Tensor]
else:
    _op, _ops = attach(__name__, "jitkern.kernels_src", namespace="jitkern")
    _BESIDE = {  # modules of the kernels, and names in them
        "AsyncScalar": "async_scalar", "BlockSparseMask": "block_sparse_attention.mask",
        "Int4Linear": "linears", "Int8Linear": "linears", "KVCacheFull": "paged_decode.paged_cache",
        "LossMeter": "loss_meter.meter", "PagedCache": "paged_decode.paged_cache",
        "converters": "int4_converters", "cross_entropy_in_place": "cross_entropy.in_place",
        "flash_attention": "block_sparse_attention.flash_attention", "int4": "int4_weight",
        "quantize_linears": "linears",
    }  # fmt: skip

    def __dir__() -> list[str]:
        return sorted((*_ops(), *_BESIDE))

    def __getattr__(name: str) -> Any:
        if name not in _BESIDE:
            return _op(name)
        found = importlib.import_module(f"jitkern.kernels_src.{_BESIDE[name]}")
        return getattr(found, name, found)  # a name in the module, or the module
