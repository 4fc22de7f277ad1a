"""Functions of values in Triton, one after the other."""

import triton
import triton.language as tl

from jitkern import compose


@triton.jit
def scale(x, factor: float):
    return x * factor


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def both(x, added):
    return x + added, x - added


@triton.jit
def inside(at, scale, count):
    return at * scale + count


chain = compose(scale, relu, both)
clashing = compose(scale, inside)  # its parameters are called like functions and like our variables
