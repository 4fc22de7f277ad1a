"""out = a @ b, of bfloat16, accumulated in float32."""

import cuda.tile as ct

Int = ct.Constant[int]


@ct.kernel(num_worker_warps=8)  # two warpgroups hold the sums of a large tile in registers
def gemm(out, a, b, M: Int, N: Int, K: Int, GROUP: Int):
    """Compute one tile of M x N. GROUP rows of tiles share columns of b in the L2 cache."""
    rows, columns = ct.cdiv(a.shape[0], M), ct.cdiv(b.shape[1], N)
    first = ct.bid(0) // (GROUP * columns) * GROUP
    inside = ct.bid(0) % (GROUP * columns)
    height = min(rows - first, GROUP)
    i, j = first + inside % height, inside // height
    total = ct.zeros((M, N), dtype=ct.float32)
    for step in range(ct.cdiv(a.shape[1], K)):
        left = ct.load(a, index=(i, step), shape=(M, K), padding_mode=ct.PaddingMode.ZERO)
        right = ct.load(b, index=(step, j), shape=(K, N), padding_mode=ct.PaddingMode.ZERO)
        total = ct.mma(left, right, total)
    ct.store(out, index=(i, j), tile=ct.astype(total, out.dtype))
