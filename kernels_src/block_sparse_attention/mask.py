"""Which keys each query sees, by blocks: the mask of `jitkern.ops.flash_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from jitkern.kernels_src import block_mask as layout

_CHUNK = 1 << 22  # elements of a flex mask that are computed at once


@dataclass(frozen=True, eq=False)
class BlockSparseMask:
    """The blocks of queries and keys that attention visits; a query sees no key of another block.

    Made by its class methods, outside of captured CUDA graphs. A block is full, if each of its
    queries sees each of its keys, or partial; then it has the elements of a band (`left`, `right`)
    and of patterns of bits. Both sorts are listed row by row (CSR), full ones first, and again
    column by column for the gradients of keys and values.

    q_len, k_len: the lengths that the mask is for; the last blocks may be shorter than others.
    block_q, block_k: queries and keys of a block, multiples of 32.
    left, right: in partial blocks query i sees the keys j with i - left <= j <= i + right; -1 for
        no limit. Positions are counted from the first query and the first key, as `is_causal` of
        PyTorch and flex_attention count them, also where the lengths differ.
    starts, columns, key_starts, key_columns, patterns, key_patterns, bits: int32, see
        `jitkern.ops.block_sparse_attention`.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    left: int
    right: int
    starts: torch.Tensor
    columns: torch.Tensor
    key_starts: torch.Tensor
    key_columns: torch.Tensor
    patterns: torch.Tensor | None = None
    key_patterns: torch.Tensor | None = None
    bits: torch.Tensor | None = None

    # ---------------------------------------------------------------- how it is made

    @classmethod
    def causal(
        cls, q_len: int, k_len: int | None = None, *, block: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockSparseMask:  # fmt: skip
        """Return the mask in which query i sees the keys up to i; k_len is q_len by default."""
        return cls.sliding_window(q_len, k_len, left=None, right=0, block=block, device=device)

    @classmethod
    def sliding_window(
        cls, q_len: int, k_len: int | None = None, *, left: int | None, right: int | None = 0,
        block: int | tuple[int, int] = 128, device: torch.device | str | None = None,
    ) -> BlockSparseMask:  # fmt: skip
        """Return the mask in which query i sees the keys from i - left to i + right.

        left, right: None for no limit. A causal window of w tokens, the own one included, has
            left = w - 1.

        It is computed on the host, from the lengths alone, and copied to the device.
        Raises ValueError for lengths or limits below 0, and for blocks of other sizes.
        """
        k_len = q_len if k_len is None else k_len
        block_q, block_k = _sizes(block)
        limits = [-1 if limit is None else limit for limit in (left, right)]
        if min(q_len, k_len) < 0 or (left or 0) < 0 or (right or 0) < 0:
            raise ValueError(
                "BlockSparseMask: lengths and limits are at least 0, got "
                f"q_len={q_len}, k_len={k_len}, left={left}, right={right}"
            )
        kinds = layout.band(q_len, k_len, block_q, block_k, *limits)
        full, partial = (kind[None, None] for kind in kinds)
        made = _made(cls, q_len, k_len, block_q, block_k, full, partial, limits=limits)
        return made.to(torch.get_default_device() if device is None else device)

    @classmethod
    def from_blocks(
        cls, blocks: torch.Tensor, q_len: int, k_len: int, *,
        block: int | tuple[int, int] = 128, causal: bool = False,
    ) -> BlockSparseMask:  # fmt: skip
        """Return the mask whose blocks are visited where `blocks` is True.

        blocks: bool [batch or 1, heads or 1, blocks of queries, blocks of keys], on the device of
            the mask; leading dimensions may be missing.
        causal: query i also sees no key behind i.

        The host waits for the device, to learn how many blocks there are. Raises ValueError.
        """
        block_q, block_k = _sizes(block)
        wanted = -(-q_len // block_q), -(-k_len // block_k)
        if blocks.dtype != torch.bool or not 2 <= blocks.dim() <= 4 or blocks.shape[-2:] != wanted:
            raise ValueError(
                f"BlockSparseMask.from_blocks: {q_len} queries and {k_len} keys in blocks of "
                f"{block_q} and {block_k} need bool [batch, heads, {wanted[0]}, {wanted[1]}], got "
                f"{blocks.dtype} {tuple(blocks.shape)}"
            )
        blocks = blocks.view((1,) * (4 - blocks.dim()) + blocks.shape)
        limits = [-1, 0 if causal else -1]
        kinds = layout.band(q_len, k_len, block_q, block_k, *limits, blocks.device)
        full, partial = (blocks & kind for kind in kinds)
        return _made(cls, q_len, k_len, block_q, block_k, full, partial, limits=limits)

    @classmethod
    def from_dense(
        cls, seen: torch.Tensor, *, block: int | tuple[int, int] = 128
    ) -> BlockSparseMask:
        """Return the mask in which query i sees key j where seen[..., i, j] is True.

        seen: bool [batch or 1, heads or 1, q_len, k_len]; leading dimensions may be missing.

        The host waits for the device, to learn how many blocks there are. Raises ValueError.
        """
        block_q, block_k = _sizes(block)
        if seen.dtype != torch.bool or not 2 <= seen.dim() <= 4:
            raise ValueError(
                "BlockSparseMask.from_dense: seen must be bool [batch, heads, q_len, k_len], got "
                f"{seen.dtype} {tuple(seen.shape)}"
            )
        q_len, k_len = seen.shape[-2:]
        seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)
        padding = 0, -k_len % block_k, 0, -q_len % block_q

        def tiles(*, value: bool) -> torch.Tensor:
            padded = torch.nn.functional.pad(seen, padding, value=value)
            tiled: torch.Tensor = padded.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q))
            return tiled.transpose(3, 4)  # [batch, heads, rows, columns, block_q, block_k]

        some, full = tiles(value=False).any(-1).any(-1), tiles(value=True).all(-1).all(-1)
        partial = some & ~full
        bits = layout.packed(tiles(value=False)[partial])
        return _made(cls, q_len, k_len, block_q, block_k, full, partial, bits=bits)

    @classmethod
    def from_flex(cls, mask: Any) -> BlockSparseMask:
        """Return the mask of a `torch.nn.attention.flex_attention.BlockMask`, exactly.

        Its `mask_mod` is computed for the partial blocks alone. The host waits for the device, to
        learn how many blocks there are. Raises ValueError for blocks of other sizes.
        """
        from torch.nn.attention.flex_attention import noop_mask

        block_q, block_k = _sizes(mask.BLOCK_SIZE)
        q_len, k_len = mask.seq_lengths
        rows, columns = -(-q_len // block_q), -(-k_len // block_k)
        partial = _listed(mask.kv_num_blocks, mask.kv_indices, columns)[:, :, :rows]
        full = torch.zeros_like(partial)
        if mask.full_kv_num_blocks is not None:
            full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns)[:, :, :rows]
        sizes = q_len, k_len, block_q, block_k
        if mask.mask_mod is noop_mask:
            return _made(cls, *sizes, full | partial, torch.zeros_like(partial))
        partial &= ~full
        return _made(cls, *sizes, full, partial, bits=_elements(mask.mask_mod, partial, *sizes))

    # ---------------------------------------------------------------- what it says

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `jitkern.ops.block_sparse_attention` between v and the scale."""
        return (
            self.starts, self.columns, self.key_starts, self.key_columns, self.patterns,
            self.key_patterns, self.bits, self.block_q, self.block_k, self.left, self.right,
        )  # fmt: skip

    @property
    def density(self) -> float:
        """The share of blocks that are visited, full or partial, of all; 0 if there are none."""
        batch, heads, size = self.starts.shape
        blocks = batch * heads * (size // 2) * -(-self.k_len // self.block_k)
        return self.columns.shape[0] / blocks if blocks else 0.0

    def to_dense(self) -> torch.Tensor:
        """Return which keys each query sees: bool [batch or 1, heads or 1, q_len, k_len]."""
        seen: torch.Tensor = layout.seen(
            self.starts, self.columns, self.patterns, self.bits, self.block_q, self.block_k,
            self.left, self.right, self.q_len, self.k_len,
        )  # fmt: skip
        return seen

    def to(self, device: torch.device | str) -> BlockSparseMask:
        """Return the mask on a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {k: _moved(v, device) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return type(self)(**values | tensors)


def _moved(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on a device; on its way to a GPU, the host does not wait for it."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _sizes(block: int | tuple[int, int]) -> tuple[int, int]:
    """Return the queries and the keys of a block. Raises ValueError."""
    block_q, block_k = (block, block) if isinstance(block, int) else block
    if min(block_q, block_k) < 32 or block_q % 32 or block_k % 32:
        raise ValueError(
            f"BlockSparseMask: blocks must be multiples of 32, got {block_q} queries and {block_k} "
            "keys"
        )
    return block_q, block_k


def _made(
    cls: type[BlockSparseMask], q_len: int, k_len: int, block_q: int, block_k: int,
    full: torch.Tensor, partial: torch.Tensor, *, limits: list[int] | None = None,
    bits: torch.Tensor | None = None,
) -> BlockSparseMask:  # fmt: skip
    """Return the mask of these blocks; bits: of the partial blocks in their order."""
    numbers = None
    if bits is not None:
        numbers = torch.zeros(partial.shape, dtype=torch.int32, device=partial.device)
        numbers[partial] = torch.arange(bits.shape[0], dtype=torch.int32, device=partial.device)
    starts, columns, patterns = layout.lists(full, partial, numbers)
    if columns.shape[0] >= 1 << 31:
        raise ValueError(f"BlockSparseMask: {columns.shape[0]} blocks are more than 2**31 - 1")
    left, right = limits or (-1, -1)
    key_starts, key_columns, key_patterns = layout.lists(
        full.mT, partial.mT, None if numbers is None else numbers.mT
    )
    return cls(
        q_len, k_len, block_q, block_k, left, right, starts, columns, key_starts, key_columns,
        patterns, key_patterns, bits,
    )  # fmt: skip


def _listed(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the blocks that a flex mask lists, bool [batch, heads, rows, columns]."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    listed = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    at = torch.where(valid, indices, columns).long()
    return listed.scatter_(-1, at, value=True)[..., :columns]


def _elements(
    mask_mod: Callable[..., torch.Tensor], partial: torch.Tensor, q_len: int, k_len: int,
    block_q: int, block_k: int,
) -> torch.Tensor:  # fmt: skip
    """Return the bits of the partial blocks, in their order."""
    from torch.nn.attention.flex_attention import create_mask

    device = partial.device
    places = partial.nonzero(as_tuple=True)
    count = places[0].shape[0]
    bits = torch.empty(count, block_q, block_k // 32, dtype=torch.int32, device=device)
    most = max(1, _CHUNK // (block_q * block_k))
    for first in range(0, count, most):
        chunk = slice(first, first + most)
        batch, head, row, column = (place[chunk] for place in places)

        def element(
            n: torch.Tensor, _: torch.Tensor, i: torch.Tensor, j: torch.Tensor,
            of: tuple[torch.Tensor, ...] = (batch, head, row * block_q, column * block_k),
        ) -> torch.Tensor:  # fmt: skip
            at_q, at_k = (of[2][n] + i).clamp(max=q_len - 1), (of[3][n] + j).clamp(max=k_len - 1)
            return mask_mod(of[0][n], of[1][n], at_q, at_k)

        elements = create_mask(element, batch.shape[0], 1, block_q, block_k, device)
        bits[chunk] = layout.packed(elements[:, 0])
    return bits
