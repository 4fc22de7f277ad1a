"""The shipped ops; each is declared at its first use, and compiles on its first call.

`jitkern.ops.softmax` is the op as a function, `torch.ops.jitkern.softmax` the same op in Torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.op.all_ops import attach

if TYPE_CHECKING:
    from torch import Tensor

    from jitkern.declare import Op

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
    __getattr__, __dir__ = attach(__name__, "jitkern.kernels_src", namespace="jitkern")
