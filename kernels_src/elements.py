"""What ops on single elements share: dtypes, how much a thread takes at once, indices, grids."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
VECTOR = 16  # bytes of the widest access


def wide_dtype(dtype):
    """Return the dtype that numbers of a dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x):
    """Return a tensor in the dtype that its numbers are computed in, and None as it is."""
    return None if x is None else x.to(wide_dtype(x.dtype))


def check_floating(name, what, dtype):
    """Refuse a dtype that kernels do not compute in."""
    torch._check(dtype in DTYPES, lambda: f"{name}: {what} must be floating point, got {dtype}")


def dense(x):
    """Return a tensor contiguous, and None as it is."""
    return None if x is None else x.contiguous()


def dense_rows(x):
    """Return a tensor whose last dimension is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def blocks(count, size):
    """Return how many blocks of a size have room for so many."""
    return (count + size - 1) // size


def index_for(threads):
    """Return the type that numbers so many threads."""
    return torch.uint32 if threads < 2**31 else torch.int64


def width_of(sizes, *layouts):
    """Return how many elements a thread takes at once: 16 bytes of the first tensor, or less.

    sizes: numbers of elements that are multiples of it. layouts: pairs of a tensor and those of its
    strides by which pieces are apart: each piece begins at a multiple of its size.
    """
    width = VECTOR // layouts[0][0].element_size()
    while width > 1:
        fits = True
        for size in sizes:
            fits = fits and size % width == 0
        for x, strides in layouts:
            piece = min(VECTOR, width * x.element_size())
            for stride in strides:
                fits = fits and stride * x.element_size() % piece == 0
            fits = fits and x.data_ptr() % piece == 0
        if fits:
            return width
        width = width // 2
    return 1
