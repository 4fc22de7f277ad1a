"""A RawKernel, an elementwise kernel and a reduction of CuPy."""

import cupy

x = cupy.arange(1000, dtype=cupy.float32)
raw = cupy.RawKernel('extern "C" __global__ void f(float* x) { x[threadIdx.x] += 1; }', "f")
y = x.copy()
raw((1,), (1000,), (y,))
assert (y == x + 1).all()
assert float(cupy.ElementwiseKernel("T x", "T y", "y = x * 2", "g")(x).sum()) == 999_000.0
