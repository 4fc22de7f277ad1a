"""flag |= code if any value of a tensor, or of a list of tensors, is infinite or NaN."""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src.elements import blocks, check_floating

nonfinite_flag_tensor_ = kernel(
    "nonfinite_flag_tensor_(Tensor x, Tensor(a!) flag, int code=1) -> ()",
    cuda=Cuda("nonfinite_flag.cu"),
)


def _listed(dtype, count):
    """Return a call with so many tensors, for prewarm."""
    flag = torch.empty((), dtype=torch.int32, device="meta")
    return [torch.empty(1, dtype=dtype, device="meta")] * count, flag


nonfinite_flag_ = kernel(
    "nonfinite_flag_(Tensor[] tensors, Tensor(a!) flag, int code=1) -> ()",
    cuda=Cuda("nonfinite_flag.cu"),
    prewarm=[_listed(dtype, n) for dtype in (torch.bfloat16, torch.float32) for n in (128, 512)],
)

EXPONENTS = (  # of dtypes, in bits
    (torch.float32, 8), (torch.float16, 5), (torch.bfloat16, 8), (torch.float64, 11),
)  # fmt: skip
CHUNK = 65536  # values that a block reads; a multiple of 16 bytes, which keeps the alignment


def _set(flag, code, found):
    flag.copy_(torch.where(found, flag | code, flag))


@nonfinite_flag_tensor_.reference
def _(x, flag, code):
    _set(flag, code, x.isfinite().logical_not().any())


def _check(name, flag, code):
    torch._check(
        flag.dtype == torch.int32 and flag.numel() == 1,
        lambda: f"{name}: flag must be one int32, got {flag.dtype} of shape {tuple(flag.shape)}",
    )
    torch._check(
        0 < code < 2**31,
        lambda: f"{name}: code must be bits of a positive int32, got {code}",
    )


def _template(name, dtype):
    check_floating(name, "tensors", dtype)
    (bits,) = [bits for each, bits in EXPONENTS if each == dtype]
    return {"T": dtype, "EXPONENT": bits, "CHUNK": CHUNK}


@nonfinite_flag_tensor_.launch("cuda")
def _(k, x, flag, code):
    _check("nonfinite_flag_tensor_", flag, code)
    template = _template("nonfinite_flag_tensor_", x.dtype)
    x, n = x.contiguous(), x.numel()
    k.nonfinite_flag_tensor[template](flag, x, n, code, grid=blocks(n, CHUNK), block=512)


@nonfinite_flag_tensor_.samples
def _(device):
    for dtype, _ in EXPONENTS:
        for shape in ((1000,), (3, 7, 33), (), (0,)):
            yield torch.randn(shape, dtype=dtype, device=device), _flag(device)
        for value in ("inf", "-inf", "nan"):
            x = torch.randn(70_001, dtype=dtype, device=device)
            x[-1] = float(value)
            yield x[1:], _flag(device), 4
            yield x.view(-1, 1).T, _flag(device, 2)
    yield torch.randn(8, 6, device=device).T, _flag(device)


def _flag(device, bits=0):
    return torch.full((), bits, dtype=torch.int32, device=device)


@nonfinite_flag_.reference
def _(tensors, flag, code):
    for x in tensors:
        _set(flag, code, x.isfinite().logical_not().any())


@nonfinite_flag_.launch("cuda")
def _(k, tensors, flag, code):
    _check("nonfinite_flag_", flag, code)
    for table in k.tables(tensors, chunk=CHUNK, dense=True):  # one for a dtype
        template = {**_template("nonfinite_flag_", table.dtype), "N": table.capacity}
        k.nonfinite_flag[template](flag, table, code, grid=table.chunks, block=512)


@nonfinite_flag_.samples
def _(device):
    def some(*dtypes):
        shapes = ((1000,), (3, 7, 33), (), (0,), (70_001,))
        return [torch.randn(s, dtype=d, device=device) for d in dtypes for s in shapes]

    yield [], _flag(device)
    yield some(torch.bfloat16), _flag(device)
    yield some(torch.float16, torch.float64) + some(torch.float32, torch.float16), _flag(device)
    for dtype, _ in EXPONENTS:
        bad = some(dtype, torch.float32)
        bad[-1][-1] = float("inf")
        yield bad, _flag(device, 1), 2
    x = torch.randn(8, 6, 2, 2, device=device).to(memory_format=torch.channels_last)
    yield [x], _flag(device)


@nonfinite_flag_tensor_.cost
def _(x, flag, _code):
    return x.nbytes + 2 * flag.nbytes, x.numel()


@nonfinite_flag_.cost
def _(tensors, flag, _code):
    return sum(x.nbytes for x in tensors) + 2 * flag.nbytes, sum(x.numel() for x in tensors)
