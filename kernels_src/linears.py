"""Linear layers with weights of 4 or 8 bits, and a function that puts them into a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from jitkern import ops
from jitkern.calls import autocast
from jitkern.kernels_src import int4_weight as int4

SCHEMES = ("int4", "int8", "int8_dynamic")


class Int4Linear(nn.Module):
    """A linear layer with a weight of 4 bits, by `jitkern.ops.w4a16_linear`.

    order: of a weight whose columns are for `x[..., order]` (`converters.from_gptq_reordered`).

    The state dict has `qweight` (int32), `scale`, `zero` where the weight has zeros, and `bias` and
    `order` where there is one: all are buffers, without a gradient.
    """

    qweight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self, weight: int4.Int4Weight, bias: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, tensor in zip(weight._fields, weight, strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("order", order)
        self.in_features, self.out_features = 64 * weight.qweight.shape[1], weight.scale.shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times the weight transposed, plus the bias."""
        x = x if self.order is None else x.index_select(-1, self.order)
        x, scale, zero, bias = autocast.cast(x, self.scale, self.zero, self.bias)
        y: torch.Tensor = ops.w4a16_linear(x, self.qweight, scale, zero, bias)
        return y

    def extra_repr(self) -> str:
        """Return sizes and group, for `repr`."""
        group = self.in_features // self.scale.shape[0]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, group={group}, "
            f"symmetric={self.zero is None}, bias={self.bias is not None}"
        )


class Int8Linear(nn.Module):
    """A linear layer with a weight of 8 bits and a scale for each of its rows.

    dynamic: whether each row of x is rounded to 8 bits, too (`jitkern.ops.int8_linear`), or is
        multiplied as it is (`jitkern.ops.w8a16_linear`).

    The state dict has `qweight` (int8 [N, K]), `scale` [N], and `bias` where there is one: all are
    buffers, without a gradient.
    """

    qweight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, qweight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, *,
        dynamic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_buffer("qweight", qweight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.dynamic = dynamic
        self.out_features, self.in_features = qweight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times the weight transposed, plus the bias."""
        op = ops.int8_linear if self.dynamic else ops.w8a16_linear
        x, scale, bias = autocast.cast(x, self.scale, self.bias)
        y: torch.Tensor = op(x, self.qweight, scale, bias)
        return y

    def extra_repr(self) -> str:
        """Return sizes, for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"dynamic={self.dynamic}, bias={self.bias is not None}"
        )


def quantize_linears(
    model: nn.Module, scheme: str = "int4", *, group: int = 128, symmetric: bool = True,
    only: Callable[[str, nn.Linear], bool] | None = None,
) -> nn.Module:  # fmt: skip
    """Replace each `nn.Linear` of a model by a layer with a weight of 4 or 8 bits.

    scheme: "int4" (`Int4Linear`), "int8" (`Int8Linear`), or "int8_dynamic" (`Int8Linear` that
        also rounds its inputs to 8 bits).
    group, symmetric: of "int4", see `jitkern.ops.int4.quantize`.
    only: called with the name and the module of each linear layer; those for which it returns False
        stay. Subclasses of `nn.Linear` stay in any case, since others may read their weights, and
        so do the layers of `nn.TransformerEncoderLayer`, which reads them itself.

    The layers are replaced one by one. The weight of a layer is freed before the next one is
    quantized, unless others hold it.

    Returns the model, which is changed, unless it is itself an `nn.Linear`. Its state dict then has
    the tensors of the new layers, and is loaded into a model that the same call has changed; that
    one may be on the device "meta", with `load_state_dict(..., assign=True)`.

    Raises ValueError for another scheme or group, and for a layer whose input features are not a
    multiple of the group, of 64 for 8 bits; nothing is replaced then.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_linears: scheme must be one of {SCHEMES}, got {scheme!r}")
    places: dict[nn.Linear, list[str]] = {}  # a layer in two places stays one
    for name, module in model.named_modules(remove_duplicate=False):
        above = model.get_submodule(name.rpartition(".")[0])
        if isinstance(above, nn.TransformerEncoderLayer) or type(module) is not nn.Linear:
            continue
        if only is None or only(name, module):
            places.setdefault(module, []).append(name)
    for module, names in places.items():
        try:
            int4.check(module.weight.shape, group if scheme == "int4" else 64)
        except ValueError as e:
            raise ValueError(
                f"quantize_linears: layer {names[0]!r}: {e}; leave it out by only="
            ) from None
    while places:
        module, names = places.popitem()  # so that its weight is freed once it is replaced
        layer = _quantized(module, scheme, group, symmetric=symmetric)
        for name in names:
            if not name:
                return layer
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)
    return model


@torch.no_grad()
def _quantized(module: nn.Linear, scheme: str, group: int, *, symmetric: bool) -> nn.Module:
    if scheme == "int4":
        weight = int4.quantize(module.weight, group, symmetric=symmetric)
        layer: nn.Module = Int4Linear(weight, module.bias)
    else:
        wide = module.weight.float()
        scale = (wide.abs().amax(1) / 127).to(module.weight.dtype)
        unit = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        q = (wide / unit[:, None]).round().clamp(-127, 127).to(torch.int8)
        layer = Int8Linear(q, scale, module.bias, dynamic=scheme == "int8_dynamic")
    return layer.train(module.training)
