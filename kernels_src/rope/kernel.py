"""Rotary position embedding (Su et al. 2021, RoFormer) of queries and keys, in one launch.

For each token at position p and each head, the pairs (x1, x2) of the first `2 * cos.shape[1]`
numbers are turned by an angle a, whose cosine and sine are in row p of the tables:

    y1 = x1 * cos(a) - x2 * sin(a)
    y2 = x2 * cos(a) + x1 * sin(a)

The other numbers of a head are copied. Pairs are (x[i], x[i + half]), as in Llama and GPT-NeoX, or
(x[2 * i], x[2 * i + 1]) if interleaved, as in GPT-J.

    q, k       [batch, seq, heads, d] or [tokens, heads, d], as for FlashAttention and vLLM, of any
               strides: parts of a packed qkv, and `x.transpose(1, 2)` of [batch, heads, seq, d], as
               Hugging Face has it, are read where they lie. Heads of q and k may differ in number.
    cos, sin   [rows, half], 2 * half <= d; float32, or the dtype of q
    positions  int32 or int64, [seq], [1, seq] or [batch, seq], or [tokens]: rows of the tables;
               without them, the i-th token of a sequence has row i. A position that the tables
               do not have is not read: it gives NaN in place of the turned numbers.
    inverse    turns by -a: the gradient, and the way back

`rope` returns dense tensors; the tables have no gradient. `rope_` turns q and k in place, whose
last dimension must be dense, and has no gradient. What does not fit raises RuntimeError.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import elements

CUDA = Cuda("rope.cu", strided=True)

PREWARM = [  # of a server, whose tokens have positions
    (f"{dtype}[8, 32, 128]", f"{dtype}[8, 8, 128]", "f32[64, 64]", "f32[64, 64]", f"{index}[8]")
    for dtype in ("bf16", "f16")
    for index in ("i32", "i64")
]

rope = kernel(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? positions=None, "
    "bool interleaved=False, bool inverse=False) -> (Tensor, Tensor)",
    cuda=CUDA,
    nondifferentiable=["cos", "sin"],
    prewarm=PREWARM,
)

rope_ = kernel(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor? positions=None, "
    "bool interleaved=False, bool inverse=False) -> ()",
    cuda=CUDA,
    prewarm=PREWARM,
)

BLOCK = 128


# ------------------------------------------------------------------ in plain PyTorch


def _turned(x, cos, sin, positions, interleaved, inverse):
    wide = elements.wide_dtype(x.dtype)
    rows, half = cos.shape
    if positions is None:
        cos, sin = cos[: x.shape[-3]], sin[: x.shape[-3]]
    else:  # another row for positions that the tables do not have
        row = torch.where((positions >= 0) & (positions < rows), positions, rows)
        cos, sin = (torch.cat([t, t.new_full((1, half), torch.nan)])[row] for t in (cos, sin))
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    if inverse:
        sin = -sin
    turned = x[..., : 2 * half].to(wide)
    if interleaved:
        x1, x2 = turned[..., ::2], turned[..., 1::2]
        y = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2)
    else:
        x1, x2 = turned[..., :half], turned[..., half:]
        y = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    return torch.cat([y.to(x.dtype), x[..., 2 * half :]], -1)


@rope.reference
def _(q, k, cos, sin, positions, interleaved, inverse):
    return tuple(_turned(x, cos, sin, positions, interleaved, inverse) for x in (q, k))


@rope_.reference
def _(q, k, cos, sin, positions, interleaved, inverse):
    for x in (q, k):
        x.copy_(_turned(x, cos, sin, positions, interleaved, inverse))


# ------------------------------------------------------------------ launches


def _check(name, q, k, cos, sin, positions):
    torch._check(
        q.dim() in (3, 4)
        and k.dim() == q.dim()
        and q.shape[:-2] == k.shape[:-2]
        and q.shape[-1] == k.shape[-1],
        lambda: (
            f"{name}: q and k must be [batch, seq, heads, d] or [tokens, heads, d] and differ "
            f"in heads alone, got {tuple(q.shape)} and {tuple(k.shape)}"
        ),
    )
    torch._check(
        q.dtype in elements.DTYPES and k.dtype == q.dtype,
        lambda: (
            f"{name}: q and k must be floating point and of one dtype, got {q.dtype} and {k.dtype}"
        ),
    )
    torch._check(
        cos.dim() == 2 and cos.shape == sin.shape and 2 * cos.shape[1] <= q.shape[-1],
        lambda: (
            f"{name}: cos and sin must be [positions, up to {q.shape[-1] // 2}], got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        ),
    )
    torch._check(
        cos.dtype == sin.dtype and cos.dtype in (torch.float32, q.dtype),
        lambda: (
            f"{name}: cos and sin must both be float32 or {q.dtype}, got {cos.dtype} and "
            f"{sin.dtype}"
        ),
    )
    if positions is None:
        torch._check(
            q.shape[-3] <= cos.shape[0],
            lambda: f"{name}: {q.shape[-3]} tokens, and cos and sin have {cos.shape[0]} rows",
        )
    else:
        torch._check(
            positions.dtype in (torch.int32, torch.int64),
            lambda: f"{name}: positions must be int32 or int64, got {positions.dtype}",
        )
        torch._check(
            1 <= positions.dim() <= q.dim() - 2
            and positions.shape[-1] == q.shape[-3]
            and (positions.dim() == 1 or positions.shape[0] in (1, q.shape[0])),
            lambda: (
                f"{name}: positions must have the shape {tuple(q.shape[:-2])} or "
                f"({q.shape[-3]},), got {tuple(positions.shape)}"
            ),
        )


def _arguments(q, k, cos, sin, positions, inverse):
    """Return what kernels take behind the outputs: tensors, sizes, and strides in elements."""
    batches = q.shape[0] if q.dim() == 4 else 1
    batch_step = token_step = 0
    if positions is not None:
        token_step = positions.stride(-1)
        if positions.dim() == 2 and positions.shape[0] != 1:
            batch_step = positions.stride(0)
    return (
        q, k, cos, sin, positions, inverse, batches, q.shape[-3], q.shape[-2], k.shape[-2],
        q.shape[-1], cos.shape[1], cos.shape[0], *_strides(q), *_strides(k), cos.stride(0),
        sin.stride(0), batch_step, token_step,
    )  # fmt: skip


def _strides(x):
    return x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2)


def _fill(k_, q_out, k_out, q, k, cos, sin, positions, interleaved, inverse, in_place):
    if k_.fake:
        return
    d, half = q.shape[-1], cos.shape[1]
    width = elements.width_of(
        (half, d - 2 * half),
        *((x, _strides(x)) for x in (q, k)), *((table, (table.stride(0),)) for table in (cos, sin)),
    )  # fmt: skip
    columns = half // width + elements.blocks(d - 2 * half, 2 * width)
    tokens = (q.shape[0] if q.dim() == 4 else 1) * q.shape[-3]
    threads = tokens * (q.shape[-2] + k.shape[-2]) * columns
    index = torch.int64 if positions is None else positions.dtype
    k_.rope[
        {
            "T": q.dtype, "C": cos.dtype, "P": index, "INTERLEAVED": interleaved,
            "IN_PLACE": in_place, "I": elements.index_for(threads), "V": width,
        }
    ](
        q_out, k_out, *_arguments(q, k, cos, sin, positions, inverse),
        grid=elements.blocks(threads, BLOCK), block=BLOCK,
    )  # fmt: skip


@rope.launch("cuda")
def _(k_, q, k, cos, sin, *rest):
    _check("rope", q, k, cos, sin, rest[0])
    q, k, cos, sin = (elements.dense_rows(x) for x in (q, k, cos, sin))
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _fill(k_, q_out, k_out, q, k, cos, sin, *rest, False)
    return q_out, k_out


@rope_.launch("cuda")
def _(k_, q, k, cos, sin, *rest):
    _check("rope_", q, k, cos, sin, rest[0])
    torch._check(
        q.stride(-1) == 1 and k.stride(-1) == 1,
        lambda: (
            "rope_: the last dimension of q and k must be dense, got the strides "
            f"{q.stride()} and {k.stride()}"
        ),
    )
    for x in (q, k):
        for i in range(x.dim() - 1):
            torch._check(
                x.stride(i) != 0 or x.shape[i] <= 1,
                lambda: (
                    "rope_: q and k are changed in place, and one of them is expanded: its "
                    "elements share memory"
                ),
            )
    cos, sin = elements.dense_rows(cos), elements.dense_rows(sin)
    _fill(k_, q, k, q, k, cos, sin, *rest, True)


@rope.backward
def _(grad_out0, grad_out1, cos, sin, positions, interleaved, inverse):
    turned = rope(grad_out0, grad_out1, cos, sin, positions, interleaved, not inverse)
    return (*turned, None, None, None)


def _cost(q, k, cos, _sin, positions, _interleaved, _inverse):
    numbers = q.numel() + k.numel()
    tokens = q.shape[:-2].numel() if positions is not None else q.shape[-3]
    tables = 2 * min(tokens, cos.shape[0]) * cos.shape[1] * cos.element_size()
    return 2 * numbers * q.element_size() + tables, 3 * numbers


rope.cost(_cost)
rope_.cost(_cost)


def _tables(rows, half, dtype, device):
    angles = torch.arange(rows).unsqueeze(1) * 0.5 ** torch.arange(half)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _samples(device):
    for dtype in elements.DTYPES:
        table = elements.wide_dtype(dtype)
        for batch, seq, q_heads, k_heads, d, half in (
            (2, 5, 4, 2, 32, 16), (1, 3, 1, 1, 3, 1), (2, 0, 2, 1, 8, 4),
        ):  # fmt: skip
            q = torch.randn(batch, seq, q_heads, d, dtype=dtype, device=device)
            k = torch.randn(batch, seq, k_heads, d, dtype=dtype, device=device)
            yield q, k, *_tables(8, half, table, device)
    # Parts of a packed qkv, a partial dimension, tables of the dtype, and positions.
    qkv = torch.randn(6, 8, 16, dtype=torch.bfloat16, device=device)
    positions = torch.tensor([0, 7, 3, 3, 1, 2], dtype=torch.int32, device=device)
    tables = _tables(8, 4, torch.bfloat16, device)
    yield qkv[:, :4], qkv[:, 4:6], *tables, positions, True
    # [batch, heads, seq, d], as in Hugging Face's models.
    x = torch.randn(2, 6, 5, 8, device=device).transpose(1, 2)
    rows = torch.tensor([[1, 2, 3, 4, 5], [2, 2, 0, 6, 7]], device=device)
    yield x[:, :, :4], x[:, :, 4:], *_tables(8, 4, torch.float32, device), rows, False, True


rope.samples(_samples)
rope_.samples(_samples)
