"""out = a @ b, of bfloat16, accumulated in float32 by the tensor cores of any GPU since sm_80."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Constexpr, Float32, cute
from cutlass.cute.nvgpu.warp import MmaF16BF16Op

THREADS = 256  # of a block: four by two warps
PADDING = 8  # elements behind each row in shared memory, so that rows begin in different banks


@cute.jit
def fill(tile: cute.Tensor, of: cute.Tensor, first: cute.Coord, along: Constexpr):
    """Copy a tile of a matrix to shared memory, with zeros beyond the end of the matrix.

    along: the dimension in which neighbouring threads read neighbouring elements.
    """
    thread = cute.arch.thread_idx()[0]
    width = tile.shape[along]
    for part in cutlass.range_constexpr(cute.size(tile) // THREADS):
        at = part * THREADS + thread
        row, column = (at // width, at % width) if along == 1 else (at % width, at // width)
        value = BFloat16(0.0)
        if row + first[0] < of.shape[0] and column + first[1] < of.shape[1]:
            value = of[row + first[0], column + first[1]]
        tile[row, column] = value


@cute.kernel
def multiply(
    out: cute.Tensor, a: cute.Tensor, b: cute.Tensor, mma: cute.TiledMma,
    M: Constexpr, N: Constexpr, K: Constexpr,
):  # fmt: skip
    """Compute one tile of M x N. b is given as N x K."""
    i, j, _ = cute.arch.block_idx()
    memory = cutlass.utils.SmemAllocator()
    left = memory.allocate_tensor(BFloat16, cute.make_layout((M, K), stride=(K + PADDING, 1)), 16)
    right = memory.allocate_tensor(BFloat16, cute.make_layout((N, K), stride=(K + PADDING, 1)), 16)
    own = mma.get_slice(cute.arch.thread_idx()[0])
    own_left, own_right = own.partition_A(left), own.partition_B(right)
    rows, columns = mma.make_fragment_A(own_left), mma.make_fragment_B(own_right)
    places = own.partition_C(cute.make_identity_tensor((M, N)))
    total = cute.make_rmem_tensor(places.shape, Float32)
    total.fill(0.0)
    for step in range(cute.ceil_div(a.shape[1], K)):
        fill(left, a, (i * M, step * K), 1)
        fill(right, b, (j * N, step * K), 0)
        cute.arch.sync_threads()
        cute.autovec_copy(own_left, rows)
        cute.autovec_copy(own_right, columns)
        cute.gemm(mma, total, rows, columns, total)
        cute.arch.sync_threads()
    for element in cutlass.range_constexpr(cute.size(total)):
        row, column = places[element][0] + i * M, places[element][1] + j * N
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = total[element].to(BFloat16)


@cute.jit
def gemm(
    out: cute.Tensor, a: cute.Tensor, b: cute.Tensor, M: Constexpr, N: Constexpr, K: Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    mma = cute.make_tiled_mma(
        MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)), cute.make_layout((4, 2, 1)), (64, 32, 16)
    )
    turned = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))
    grid = [cute.ceil_div(out.shape[0], M), cute.ceil_div(out.shape[1], N), 1]
    multiply(out, a, turned, mma, M, N, K).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)
