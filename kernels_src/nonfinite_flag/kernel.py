"""flag |= code if any value of a tensor, or of a list of tensors, is infinite or NaN."""

import torch

from jitkern.declare import Cpp, Cuda, kernel

nonfinite_flag_tensor_ = kernel(
    "nonfinite_flag_tensor_(Tensor x, Tensor(a!) flag, int code=1) -> ()",
    cuda=Cuda("nonfinite_flag.cu"),
    cpu=Cpp("nonfinite_flag.cpp"),
)

EXPONENTS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 8, torch.float64: 11}  # in bits
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


def _check_values(name, dtype):
    torch._check(dtype in EXPONENTS, lambda: f"{name}: tensors must be floating point, got {dtype}")


@nonfinite_flag_tensor_.launch("cuda")
def _(k, x, flag, code):
    _check("nonfinite_flag_tensor_", flag, code)
    _check_values("nonfinite_flag_tensor_", x.dtype)
    x = x.contiguous()
    template = {"T": x.dtype, "EXPONENT": EXPONENTS[x.dtype], "CHUNK": CHUNK}
    grid = (x.numel() + CHUNK - 1) // CHUNK
    k.nonfinite_flag_tensor[template](flag, x, x.numel(), code, grid=grid, block=512)


@nonfinite_flag_tensor_.launch("cpu")
def _(k, x, flag, code):
    _check("nonfinite_flag_tensor_", flag, code)
    _check_values("nonfinite_flag_tensor_", x.dtype)
    x = x.contiguous()
    template = {"T": x.dtype, "EXPONENT": EXPONENTS[x.dtype]}
    k.nonfinite_flag_tensor[template](flag, x, x.numel(), code)


@nonfinite_flag_tensor_.samples
def _(device):
    for dtype in EXPONENTS:
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
