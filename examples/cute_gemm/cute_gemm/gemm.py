"""out = a @ b, of bfloat16, accumulated in float32 by the tensor cores of any GPU since sm_80.

Asynchronous copies bring tiles of a and b to rings in shared memory, and `ldmatrix` takes them
to registers, one step ahead of the tensor cores.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Constexpr, Float32, const_expr, cute, range_constexpr
from cutlass.cute import Tensor
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp

THREADS = 128  # of a block: two by two warps
STAGES = 3  # of a ring: one tile is multiplied while two are on their way
GROUP = 8  # rows of tiles that share columns of b in the L2 cache
LINE, VECTOR = 64, 8  # elements in 128 bytes, which are all banks of shared memory, and in 16


def ring(rows, columns):
    """Return a swizzled layout of tiles: the eight vectors that `ldmatrix` reads share no bank."""
    lines = cute.make_ordered_layout((8, LINE), order=(1, 0))
    swizzled = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, lines)
    return cute.tile_to_shape(swizzled, (rows, columns, STAGES), order=(0, 1, 2))


def is_aligned(matrix):
    """Whether each row is of whole vectors, and begins at a multiple of 16 bytes."""
    return matrix[1, None].iterator.alignment % 16 == 0


def tile_of(matrix, shape, at):
    """Return a tile of a matrix, and the places of its elements there."""
    places = cute.make_identity_tensor(matrix.shape)
    return cute.local_tile(matrix, shape, at), cute.local_tile(places, shape, at)


@cute.jit
def fetch(matrix: Tensor, shape: Constexpr, at: cute.Coord, shared: Tensor):
    """Begin to copy a tile to shared memory, with zeros beyond the end of the matrix."""
    op = cpasync.CopyG2SOp(LoadCacheMode.GLOBAL)
    atom = cute.make_copy_atom(op, BFloat16, num_bits_per_copy=16 * VECTOR)
    threads = cute.make_ordered_layout((THREADS * VECTOR // LINE, LINE // VECTOR), order=(1, 0))
    copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))
    own = copy.get_slice(cute.arch.thread_idx()[0])
    tiles = *tile_of(matrix, shape, at), shared
    source, place, target = [cute.group_modes(own.partition_S(t), 1, 3) for t in tiles]
    parts = cute.size(source, mode=[1])
    if const_expr(not is_aligned(matrix)):
        for i in cutlass.range(parts, unroll=2):  # so that 16 loads are on their way
            for e in range_constexpr(VECTOR):
                inside = cute.elem_less(place[e, i], matrix.shape)
                target[e, i] = source[e, i] if inside else BFloat16(0.0)
    elif cute.elem_less(tiles[1][cute.size(shape) - 1], matrix.shape):  # all are inside
        cute.copy(copy, source, target)
    else:
        for i in range_constexpr(parts):
            if cute.elem_less(place[0, i], matrix.shape):
                cute.copy(copy, source[None, i], target[None, i])
            else:
                target[None, i].fill(0.0)


@cute.kernel
def multiply(out: Tensor, a: Tensor, b: Tensor, M: Constexpr, N: Constexpr, K: Constexpr):
    """Compute one tile of M x N. M, N and K are multiples of LINE."""
    row, j, group = cute.arch.block_idx()
    i, thread = group * GROUP + row, cute.arch.thread_idx()[0]
    memory = cutlass.utils.SmemAllocator()
    left = memory.allocate_tensor(BFloat16, ring(M, K), 128)
    right = memory.allocate_tensor(BFloat16, ring(K, N), 128)
    turned = cute.make_tensor(right.iterator, cute.select(right.layout, mode=[1, 0, 2]))  # N x K

    op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(op, cute.make_layout((2, 2, 1)), (32, 32, 16))
    own = mma.get_slice(thread)
    total = mma.make_fragment_C(own.partition_shape_C((M, N)))
    lefts = mma.make_fragment_A(own.partition_A(left)[None, None, None, 0])
    rights = mma.make_fragment_B(own.partition_B(turned)[None, None, None, 0])
    plain, turning = [warp.LdMatrix8x8x16bOp(transpose, 4) for transpose in (False, True)]
    load_a = cute.make_tiled_copy_A(cute.make_copy_atom(plain, BFloat16), mma)
    load_b = cute.make_tiled_copy_B(cute.make_copy_atom(turning, BFloat16), mma)
    own_a, own_b = load_a.get_slice(thread), load_b.get_slice(thread)
    from_a, from_b = own_a.partition_S(left), own_b.partition_S(turned)
    to_a, to_b = own_a.retile(lefts), own_b.retile(rights)

    for tile in range(STAGES - 1):
        fetch(a, (M, K), (i, tile), left[None, None, tile])
        fetch(b, (K, N), (tile, j), right[None, None, tile])
        cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(STAGES - 2)
    cute.arch.sync_threads()
    cute.copy(load_a, from_a[None, None, 0, 0], to_a[None, None, 0])
    cute.copy(load_b, from_b[None, None, 0, 0], to_b[None, None, 0])
    total.fill(0.0)
    steps = cute.size(lefts, mode=[2])
    tiles = cute.ceil_div(a.shape[1], K) if i * M < out.shape[0] else 0  # the last group is short
    for tile in range(tiles):
        ahead = tile + STAGES - 1
        for step in range_constexpr(steps):
            if const_expr(step == steps - 1):  # all of this tile is read, and the next one is there
                cute.arch.cp_async_wait_group(STAGES - 2)
                cute.arch.sync_threads()
            after, stage = (step + 1) % steps, (tile + (step + 1) // steps) % STAGES
            cute.copy(load_a, from_a[None, None, after, stage], to_a[None, None, after])
            cute.copy(load_b, from_b[None, None, after, stage], to_b[None, None, after])
            if const_expr(step == 0):
                fetch(a, (M, K), (i, ahead), left[None, None, ahead % STAGES])
            if const_expr(step == 1):
                fetch(b, (K, N), (ahead, j), right[None, None, ahead % STAGES])
                cute.arch.cp_async_commit_group()
            cute.gemm(mma, total, lefts[None, None, step], rights[None, None, step], total)

    width = 2 if is_aligned(out) else 1  # a thread holds pairs of neighbours
    results = *[own.partition_C(t) for t in tile_of(out, (M, N), (i, j))], total
    target, place, source = [cute.zipped_divide(t, (width,)) for t in results]
    for part in range_constexpr(cute.size(source, mode=[1])):
        if cute.elem_less(place[0, part], out.shape):
            target[None, part].store(source[None, part].load().to(BFloat16))


@cute.jit
def gemm(
    out: Tensor, a: Tensor, b: Tensor, M: Constexpr, N: Constexpr, K: Constexpr, stream: CUstream
):
    rows, columns = cute.ceil_div(out.shape[0], M), cute.ceil_div(out.shape[1], N)
    grid = [cutlass.min(rows, GROUP), columns, cute.ceil_div(rows, GROUP)]
    multiply(out, a, b, M, N, K).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)
