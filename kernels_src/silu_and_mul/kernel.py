"""out = f(gate) * up, where the last dimension of gate_up has all of gate, then all of up.

`silu_and_mul`, `gelu_and_mul`, `gelu_tanh_and_mul` and `relu2_and_mul` (the square of relu) are the
gated linear units of Shazeer 2020, "GLU variants improve Transformer", in the packed layout of one
matrix product for both halves: [.., 2 * d] -> [.., d]. They are computed in float32 (float64 for
float64) and rounded once. The gradient is one launch, packed in the same way; f is computed again.

Rows may lie apart, as those of a part of a wider tensor; the numbers of a row are dense.
"""

import math

import torch
from torch.nn import functional

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import elements

CUDA = Cuda("gated.cu", strided=True)
SHAPES = ((4, 32), (3, 5, 14), (4, 0))
BLOCK = 128


def _rows(x):
    """Return a tensor whose rows are dense and evenly apart, their number, and the step."""
    even = x.dim() > 0 and x.stride(-1) == 1
    for i in range(x.dim() - 2):
        even = even and x.stride(i) == x.shape[i + 1] * x.stride(i + 1)
    rows = math.prod(x.shape[:-1])
    if even and x.dim() > 1:
        return x, rows, x.stride(-2)
    return x.contiguous(), rows, x.shape[-1]  # a dimension of size 1 may have any stride there


def _check(name, gate_up):
    torch._check(
        gate_up.dtype in elements.DTYPES,
        lambda: f"{name}: it takes floating point, got {gate_up.dtype}",
    )
    torch._check(
        gate_up.dim() >= 1 and gate_up.shape[-1] % 2 == 0,
        lambda: (
            f"{name}: the last dimension is gate and up, an even number, got the shape "
            f"{tuple(gate_up.shape)}"
        ),
    )


def _geometry(layouts, rows, width, number):
    """Return the template arguments, the threads, and how many of them a row has."""
    x, _ = layouts[0]
    vector = elements.width_of((width,), *layouts)
    n = rows * (width // vector)
    template = {"T": x.dtype, "I": elements.index_for(n), "V": vector, "KIND": number}
    return template, n, width // vector


def _forward(k, gate_up, name, number):
    _check(name, gate_up)
    gate_up, rows, step = _rows(gate_up)
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if k.fake:
        return out
    template, n, width = _geometry([(gate_up, (step,))], rows, width, number)
    k.gated[template](out, gate_up, n, width, step, grid=elements.blocks(n, BLOCK), block=BLOCK)
    return out


def _backward(k, grad, gate_up, name, number):
    _check(name, gate_up)
    gate_up, rows, step = _rows(gate_up)
    width = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], width)
    torch._check(
        grad.dtype == gate_up.dtype and tuple(grad.shape) == shape,
        lambda: (
            f"{name}: grad must be {gate_up.dtype} of shape {shape}, got {grad.dtype} of shape "
            f"{tuple(grad.shape)}"
        ),
    )
    grad, _, grad_step = _rows(grad)
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if k.fake:
        return out
    layouts = (gate_up, (step,)), (grad, (grad_step,))
    template, n, width = _geometry(layouts, rows, width, number)
    k.gated_backward[template](
        out, grad, gate_up, n, width, step, grad_step, grid=elements.blocks(n, BLOCK), block=BLOCK
    )
    return out


def _samples(device, shapes):
    for dtype in elements.DTYPES:
        for shape in shapes:
            yield (torch.randn(shape, dtype=dtype, device=device),)
    yield (torch.randn(0, 8, device=device),)
    yield (torch.randn(6, 100, device=device)[:, 1:41],)


# ------------------------------------------------------------------ in plain PyTorch


def _in_double(function, *tensors):
    """Call the function in float64, and round its result once: tails of gelu are small."""
    return function(*(tensor.double() for tensor in tensors)).to(tensors[0].dtype)


def _silu_slope(x):
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu(x):  # functional.gelu is NaN at infinity in some builds for the CPU
    return x * torch.special.ndtr(x)


def _gelu_slope(x):
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(x) + x * density


def _twice_inner(x):  # (1 + tanh(u)) / 2 = sigmoid(2 * u), which does not cancel
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh(x):
    return x * torch.sigmoid(_twice_inner(x))


def _gelu_tanh_slope(x):
    s, rest = torch.sigmoid(_twice_inner(x)), torch.sigmoid(-_twice_inner(x))
    return s + x * s * rest * math.sqrt(8 / math.pi) * (1 + 0.134145 * x * x)


def _declared(activation, number, f, slope):
    """Declare the op of an activation, and that of its gradient."""
    name = f"{activation}_and_mul"
    forward = kernel(f"{name}(Tensor gate_up) -> Tensor", cuda=CUDA)
    backward = kernel(f"{name}_backward(Tensor grad, Tensor gate_up) -> Tensor", cuda=CUDA)

    def in_torch(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return f(gate) * up

    def gradient_in_torch(grad, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.cat([grad * up * slope(gate), grad * f(gate)], -1)

    forward.reference(lambda gate_up: _in_double(in_torch, gate_up))
    backward.reference(lambda grad, gate_up: _in_double(gradient_in_torch, grad, gate_up))
    back = f"{name}_backward"
    forward.launch("cuda")(lambda k, gate_up: _forward(k, gate_up, name, number))
    backward.launch("cuda")(lambda k, grad, x: _backward(k, grad, x, back, number))
    forward.backward(backward)
    shapes = SHAPES if activation == "silu" else SHAPES[:1]  # one kernel for all
    forward.samples(lambda device: _samples(device, shapes))

    @backward.samples
    def _(device):
        for (gate_up,) in _samples(device, shapes):
            shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
            yield torch.randn(shape, dtype=gate_up.dtype, device=device), gate_up

    forward.cost(lambda gate_up: (gate_up.nbytes * 3 // 2, 5 * gate_up.numel()))
    backward.cost(lambda grad, gate_up: (grad.nbytes + 2 * gate_up.nbytes, 10 * gate_up.numel()))
    return forward, backward


# The numbers are those in gated.cu.
silu_and_mul, silu_and_mul_backward = _declared("silu", 0, functional.silu, _silu_slope)
gelu_and_mul, gelu_and_mul_backward = _declared("gelu", 1, _gelu, _gelu_slope)
gelu_tanh_and_mul, gelu_tanh_and_mul_backward = _declared(
    "gelu_tanh", 2, _gelu_tanh, _gelu_tanh_slope
)
relu2_and_mul, relu2_and_mul_backward = _declared(
    "relu2", 3, lambda x: functional.relu(x).square(), lambda x: 2 * functional.relu(x)
)
