"""One token for each row of logits: temperature, then top-k, then top-p, then a draw by Philox.

    p_i   = softmax(logits / temperature)_i
    kept  = the top_k largest, and of these the smallest prefix, in descending order, whose share
            of their probability reaches top_p (at least one); the smaller index first among equals
    token = the first of the kept, in that order, at which the sum of p passes u * sum(p of kept)

Probabilities are integers in units of 2^-40 of the largest (`rule.h`), so that no sum depends on an
order: the kept set and the token are the same at each run, and the same on GPUs and CPUs. No row is
sorted: a radix search, by count and by weight, finds the ends of prefixes.
"""

import math

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import groups
from jitkern.kernels_src.elements import blocks

CUDA = Cuda("sample.cu", strided=True)
FILTERS = (
    "float temperature=1.0, int top_k=0, float top_p=1.0, "
    "Tensor? row_temperature=None, Tensor? row_top_k=None, Tensor? row_top_p=None"
)
CALLS = [("bf16[8, 128256]", *filters) for filters in ((1.0, 50, 0.9), (1.0, 0, 0.9))]
sample = kernel(
    f"sample(Tensor logits, Tensor seed, Tensor offset, {FILTERS}) -> Tensor",
    cuda=CUDA,
    prewarm=[(logits, "i64[1]", "i64[1]", *filters) for logits, *filters in CALLS],
)
sample_filter = kernel(
    f"sample_filter(Tensor logits, {FILTERS}) -> Tensor",
    cuda=CUDA,
    prewarm=CALLS,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = 1 << 23  # so many weights of up to 2^40 have a sum below 2^63
POOL = 4096  # elements that largest.cuh keeps for a search
MEMORY = 51248  # bytes of shared memory beside the groups: SampleMemory of sample.cu
WEIGHTS = 1281  # bins of sample.cu


# ------------------------------------------------------------------ the rule in PyTorch

_LOW = 0xFFFFFFFF
POWER = (  # a polynomial for 2^f, see rule.h
    "0x1.5bbap-10", "0x1.3cea88p-7", "0x1.c6b754p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "1",
)  # fmt: skip


def _halves(x):
    return x >> 32 & _LOW, x & _LOW


def random_bits(seed, offset, row):
    """64 bits of Philox 4x32-10 (Salmon et al. 2011) as int64; arguments are int64 tensors."""
    (b, a), (d, c), (l, k) = _halves(offset), _halves(row), _halves(seed)  # noqa: E741
    for _ in range(10):
        (p_high, p_low), (q_high, q_low) = _halves(0xD2511F53 * a), _halves(0xCD9E8D57 * c)
        a, b, c, d = q_high ^ b ^ k, q_low, p_high ^ d ^ l, p_low
        k, l = k + 0x9E3779B9 & _LOW, l + 0xBB67AE85 & _LOW  # noqa: E741
    return b << 32 | a


def _high_product(x, y):
    """The upper 64 bits of the product of unsigned integers, y below 2^63."""
    (a, b), (c, d) = _halves(x), _halves(y)
    bc, ad = _halves(b * c), _halves(a * d)
    return a * c + bc[0] + ad[0] + (_halves(b * d)[0] + bc[1] + ad[1] >> 32)


def _fused(a, b, c):
    """Return a * b + c of float32, rounded once."""
    product = a.double() * b
    total = product + c  # may be half way between two of float32 because it was rounded itself
    lost = product - (total - (total - product)) + (c - (total - product))
    nearer = torch.nextafter(total, lost.sign() * math.inf)
    near = total.float()
    half = (
        near.double() + torch.nextafter(near, (total - near).sign().float() * math.inf) == 2 * total
    )
    return torch.where(half & (lost != 0), nearer, total).float()


def weights(t):
    """Return the weights of exponents as rule.h computes them, bit for bit."""
    shifted = t.clamp(min=-40) + 12582912.0
    whole = shifted - 12582912.0
    y, f = torch.full_like(t, float.fromhex(POWER[0])), t.clamp(min=-40) - whole
    for factor in POWER[1:]:
        y = _fused(y, f, float.fromhex(factor))
    return torch.where(t >= -40, torch.ldexp(y.double(), whole + 40), 0.0).to(torch.int64)


def _kept(logits, temperature, top_k, top_p, row_temperature, row_top_k, row_top_p):
    """Return order, kept and cumulative weights, of each row in descending order."""
    rows, columns = logits.shape

    def each(value, of_row, dtype):
        if of_row is None:
            of_row = torch.full((rows,), value, device=logits.device)
        return of_row.to(dtype)[:, None]

    temperature = each(temperature, row_temperature, torch.float32)
    top_k = each(top_k, row_top_k, torch.int64)
    top_p = each(top_p, row_top_p, torch.float32).double()
    top_k = torch.where(temperature > 0, torch.where(top_k > 0, top_k, columns), 1)
    v, order = logits.float().sort(dim=-1, descending=True, stable=True)
    most = v[:, :1]
    factor = torch.full_like(temperature, 1.44269504) / temperature
    factor = torch.where((temperature > 0) & (factor < 3e38), factor, 3e38)
    weight = weights((v - most) * factor)
    weight = torch.where((v == most) | (v.isnan() & most.isnan()), 1 << 40, weight)
    kept = torch.arange(columns, device=logits.device) < top_k
    reached = torch.where(kept, weight, 0).cumsum(-1)
    total = reached[:, -1:]
    least = (top_p * total).ceil().nan_to_num(0).to(torch.int64).clamp(min=1)
    need = torch.minimum(least, total)
    kept = kept & ((reached - weight < need) | (top_p >= 1))
    return order, kept, torch.where(kept, weight, 0).cumsum(-1)


@sample.reference
def _(logits, seed, offset, *filters):
    order, _, reached = _kept(logits, *filters)
    row = torch.arange(logits.shape[0], device=logits.device)
    row = row if seed.numel() == 1 else torch.zeros_like(row)
    random = random_bits(seed.reshape(-1), offset.reshape(-1), row)
    mark = _high_product(random, reached[:, -1])
    return order.gather(-1, (reached <= mark[:, None]).sum(-1, keepdim=True))[:, 0]


@sample_filter.reference
def _(logits, *filters):
    order, kept, _ = _kept(logits, *filters)
    dropped = torch.empty_like(kept).scatter(-1, order, ~kept)
    return logits.masked_fill(dropped, -math.inf)


# ------------------------------------------------------------------ launches


def _checked(name, logits, temperature, top_p, row_temperature, row_top_k, row_top_p):
    torch._check(
        logits.dim() == 2 and logits.shape[1] > 0,
        lambda: f"{name}: logits must be [rows, columns] with columns, got {tuple(logits.shape)}",
    )
    torch._check(
        logits.dtype in DTYPES,
        lambda: f"{name}: logits must be float32, float16 or bfloat16, got {logits.dtype}",
    )
    rows, columns = logits.shape
    torch._check(
        columns <= COLUMNS, lambda: f"{name}: a row may have {COLUMNS} columns, got {columns}"
    )
    torch._check(
        temperature >= 0,
        lambda: f"{name}: temperature must be at least 0 (0: the largest), got {temperature}",
    )
    torch._check(top_p == top_p, lambda: f"{name}: top_p must be a number, got NaN")  # noqa: PLR0124
    by_row = [
        _checked_row(name, what, value, dtype, rows)
        for what, value, dtype in (
            ("row_temperature", row_temperature, torch.float32),
            ("row_top_k", row_top_k, torch.int64),
            ("row_top_p", row_top_p, torch.float32),
        )
    ]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, rows, columns, by_row


def _checked_row(name, what, value, dtype, rows):
    if value is None:
        return None
    torch._check(
        value.dim() == 1 and value.shape[0] == rows,
        lambda: (
            f"{name}: {what} must have one number for each of {rows} rows, got shape "
            f"{tuple(value.shape)}"
        ),
    )
    return value.to(dtype).contiguous()


def _checked_state(seed, offset, rows):
    for what, value in (("seed", seed), ("offset", offset)):
        torch._check(
            value.dtype == torch.int64 and (value.numel() == 1 or value.numel() == rows),
            lambda what=what, value=value: (
                f"sample: {what} must be int64, one number or one for each of {rows} rows, got "
                f"{value.dtype} of shape {tuple(value.shape)}"
            ),
        )
    return seed.contiguous(), offset.contiguous()


def _select(k, draw, out, logits, temperature, top_k, top_p, by_row, seed, offset):
    if k.fake:
        return
    rows, columns = logits.shape
    wanted = top_k if by_row[1] is None else 1024
    shift, chunks = groups.grouping(columns, logits.element_size(), wanted)
    best = torch.empty(rows * chunks * groups.THREADS, dtype=torch.int32, device=logits.device)
    of_rows = logits, logits.stride(0), columns, shift, chunks
    k.groups_of[{"T": logits.dtype}](best, *of_rows, grid=rows * chunks, block=groups.THREADS)
    parts, sums, counters = 1, None, None
    if by_row[1] is not None or not 0 < top_k <= POOL // 2:  # weights of whole rows
        parts = max(1, min(16, k.multiprocessors // max(rows, 1)))
        sums = k.workspace(8 * WEIGHTS * rows, zeroed=True, dtype=torch.int64)
        counters = k.workspace(4 * rows, zeroed=True, dtype=torch.int32)
    k.sample[{"T": logits.dtype, "DRAW": draw}](
        out, *of_rows, best, parts, sums, counters, temperature, top_k, top_p, *by_row,
        seed, seed.numel() if draw else 0, offset, offset.numel() if draw else 0,
        grid=rows * parts, block=groups.SEARCH_THREADS, smem=MEMORY + 4 * groups.THREADS * chunks,
        pdl=k.capability >= (9, 0),
    )  # fmt: skip


@sample.launch("cuda")
def _(k, logits, seed, offset, temperature, top_k, top_p, row_temperature, row_top_k, row_top_p):
    of_rows = row_temperature, row_top_k, row_top_p
    logits, rows, _, by_row = _checked("sample", logits, temperature, top_p, *of_rows)
    seed, offset = _checked_state(seed, offset, rows)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _select(k, True, out, logits, temperature, top_k, top_p, by_row, seed, offset)
    return out


@sample_filter.launch("cuda")
def _(k, logits, temperature, top_k, top_p, row_temperature, row_top_k, row_top_p):
    of_rows = row_temperature, row_top_k, row_top_p
    logits, rows, columns, by_row = _checked("sample_filter", logits, temperature, top_p, *of_rows)
    last = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _select(k, False, last, logits, temperature, top_k, top_p, by_row, None, None)
    out = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    chunks = blocks(columns, 4096)
    k.keep_until[{"T": logits.dtype}](
        out, logits, last, logits.stride(0), columns, chunks, grid=rows * chunks, block=256
    )
    return out


# ------------------------------------------------------------------ samples, costs


def _filtered(device):
    """Yield logits and filters."""
    for dtype in DTYPES:
        for shape in ((3, 1000), (2, 7), (1, 1), (0, 8)):
            yield torch.randn(shape, dtype=dtype, device=device), 0.8, 40, 0.9
    yield torch.randn(9000, 2, device=device).T, 1.0, 0, 0.5
    some = torch.tensor([0.0, 0.5, 2.0], device=device)
    yield (
        torch.randn(3, 50, device=device), 1.0, 0, 1.0,
        some, torch.tensor([3, 0, 7], device=device), torch.tensor([0.5, 1.0, 0.1], device=device),
    )  # fmt: skip


@sample_filter.samples
def _(device):
    yield from _filtered(device)


@sample.samples
def _(device):
    state = torch.tensor([17], device=device), torch.tensor([1 << 40], device=device)
    for logits, *filters in _filtered(device):
        yield logits, *state, *filters
    rows = torch.tensor([0, 1, 2, 3], device=device)
    yield torch.randn(4, 30, device=device), rows, rows


@sample.cost
def _(logits, *_):
    return logits.nbytes + 8 * logits.shape[0], logits.numel()


@sample_filter.cost
def _(logits, *_):
    return 2 * logits.nbytes, logits.numel()
