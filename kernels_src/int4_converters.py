"""Weights of 4 bits from the layouts of GPTQ, AWQ and torchao, in plain PyTorch.

Nothing is quantized again: the values are the same as there. Each function returns an
`jitkern.ops.int4.Int4Weight`, and raises ValueError for what the kernels do not take.
"""

from __future__ import annotations

from typing import Any

import torch

from jitkern.kernels_src.int4_weight import Int4Weight, check, pack

_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ has each of eight neighbouring columns in a word


def from_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor,
    g_idx: torch.Tensor | None = None, *, v2: bool = False, dtype: torch.dtype | None = None,
) -> Int4Weight:  # fmt: skip
    """Return a weight that GPTQ quantized (AutoGPTQ, GPTQModel; 4 bits).

    qweight: int32 [K / 8, N], eight numbers along K in a word.
    qzeros: int32 [K / group, N / 8].
    scales: [K / group, N].
    g_idx: [K], the group of each k; one whose groups are not neighbours (`desc_act`) is for
        `from_gptq_reordered`.
    v2: of the checkpoint format `gptq_v2`, whose zeros are as they are; the older format has them
        less 1, of 4 bits, so that 15 stands for 0.
    dtype: of the scale; by default that of scales.
    """
    q, zeros, group = _of_gptq("from_gptq", qweight, qzeros, scales, v2=v2)
    if g_idx is not None:
        plain = torch.arange(q.shape[1], device=g_idx.device) // group
        if g_idx.shape != plain.shape or not torch.equal(g_idx.long(), plain):
            raise ValueError(
                "from_gptq: g_idx gives groups numbers that are not neighbours (desc_act): call "
                "from_gptq_reordered"
            )
    return _with_zeros(q, scales, zeros, dtype)


def from_gptq_reordered(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor, *,
    v2: bool = False, dtype: torch.dtype | None = None,
) -> tuple[Int4Weight, torch.Tensor]:  # fmt: skip
    """Return a weight that GPTQ quantized with groups of any numbers (`desc_act`), and an order.

    The arguments are those of `from_gptq`. The numbers of the weight are sorted by their groups,
    so that the weight is for inputs `x[..., order]`, which `Int4Linear(weight, bias, order)` makes.
    order: int64 [K].
    """
    q, zeros, group = _of_gptq("from_gptq_reordered", qweight, qzeros, scales, v2=v2)
    members = torch.arange(q.shape[1], device=g_idx.device) // group
    order = g_idx.long().argsort(stable=True)
    if g_idx.shape != members.shape or not torch.equal(g_idx[order].long(), members):
        raise ValueError(
            f"from_gptq_reordered: g_idx must name each of {scales.shape[0]} groups {group} times"
        )
    return _with_zeros(q[:, order.to(q.device)], scales, zeros, dtype), order


def from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *,
    dtype: torch.dtype | None = None,
) -> Int4Weight:  # fmt: skip
    """Return a weight that AWQ quantized (AutoAWQ, version GEMM; 4 bits).

    qweight: int32 [K, N / 8], eight columns in a word, in the order 0 2 4 6 1 3 5 7.
    qzeros: int32 [K / group, N / 8], likewise.
    scales: [K / group, N].
    dtype: of the scale; by default that of scales.
    """
    numbers = (_eights(t).unbind(-1) for t in (qweight, qzeros))
    q, zeros = (torch.stack([n[place] for place in _AWQ], -1).flatten(1) for n in numbers)
    q = q.T
    _group("from_awq", q, scales, zeros)
    return _with_zeros(q, scales, zeros, dtype)


def from_torchao(weight: Any) -> Int4Weight:
    """Return a weight of torchao, of 4 bits.

    weight: an `Int4Tensor` (qdata [N, K / 2], scale and zero_point [K / group, N]), an
        `Int4TilePackedTo4dTensor` (qdata [N / 8, K / 128, 32, 4], scale_and_zero
        [K / group, N, 2]), or an older tensor with a `tensor_impl` of the latter layout. Any object
        with these attributes, `shape` and `block_size` is taken; torchao itself is not needed.
    """
    if getattr(weight, "act_pre_scale", None) is not None:
        raise ValueError("from_torchao: the weight wants its inputs scaled first (act_pre_scale)")
    rows, columns = weight.shape
    group = int(weight.block_size[-1])
    check(weight.shape, group)
    source = getattr(weight, "tensor_impl", weight)
    pairs = getattr(source, "scale_and_zero", None)
    if pairs is not None:
        packed = getattr(source, "packed_weight", None)
        q = _from_tiles(source.qdata if packed is None else packed)
        scale, zero = pairs.unbind(-1)
    elif hasattr(source, "qdata") and hasattr(source, "zero_point"):
        signed = torch.stack([source.qdata & 15, source.qdata >> 4 & 15], -1).flatten(1)
        q, scale, zero = signed ^ 8, source.scale, source.zero_point  # -8 to 7 become 0 to 15
    else:
        raise ValueError(
            f"from_torchao: {type(weight).__name__} is not of a layout that is known: plain, or "
            "tile_packed_to_4d"
        )
    groups = columns // group
    scale, zero = (t[:groups, :rows].contiguous() for t in (scale, zero))  # torchao pads
    return Int4Weight(pack(q[:rows, :columns]), scale, zero.to(scale.dtype))


def _eights(words: torch.Tensor) -> torch.Tensor:
    """Return the eight numbers of each word as another dimension."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(
            f"packed tensors are int32 of 2 dimensions, got {words.dtype} {words.shape}"
        )
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return words[..., None] >> places & 15


def _of_gptq(
    name: str, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, v2: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the numbers [N, K], the zeros [K / group, N], and the numbers of a group."""
    q = _eights(qweight).permute(0, 2, 1).reshape(-1, qweight.shape[1]).T
    zeros = _eights(qzeros).flatten(1)
    return q, zeros if v2 else zeros + 1 & 15, _group(name, q, scales, zeros)


def _group(name: str, q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> int:
    """Return the numbers of a group, and refuse tensors that do not fit each other."""
    rows, columns = q.shape
    if scales.dim() != 2 or scales.shape[1] != rows or scales.shape != zeros.shape:
        raise ValueError(
            f"{name}: for {rows} output features scales must be [K / group, {rows}] and qzeros "
            f"[K / group, {rows} / 8], got scales {tuple(scales.shape)} and zeros "
            f"{tuple(zeros.shape)}"
        )
    group = columns // scales.shape[0]
    check(q.shape, group)
    return group


def _with_zeros(
    q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype | None
) -> Int4Weight:
    scale = scales.to(dtype or scales.dtype).contiguous()
    is_symmetric = not zeros.is_meta and bool((zeros == 8).all())
    return Int4Weight(pack(q), scale, None if is_symmetric else zeros.to(torch.uint8).contiguous())


def _from_tiles(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `aten._convert_weight_to_int4pack`, as of CUDA.

    words: [N / 8, K / (16 * inner), 32, inner / 2]. One has of row 8 * tile + lane / 4 the eight
    numbers of two steps of 16, k = 2 * (lane % 4) + (0, 1, 8, 9, 16, 17, 24, 25), in the bits from
    0 16 4 20 8 24 12 28 on.
    """
    if words.dim() != 4 or words.shape[2] != 32:
        raise ValueError(
            f"from_torchao: packed weights are [N / 8, K / (16 * inner), 32, inner / 2], got "
            f"{tuple(words.shape)}; those for CPUs have another layout"
        )
    tiles, outer, _, pairs = words.shape
    places = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32, device=words.device)
    q = words[..., None] >> places & 15  # tile, outer, lane, pair of steps, number
    q = q.view(tiles, outer, 8, 4, pairs, 4, 2)  # tile, outer, row, t, pair, eighth, parity
    return q.permute(0, 2, 1, 4, 5, 3, 6).reshape(tiles * 8, outer * pairs * 32)
