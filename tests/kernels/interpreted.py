"""Launch functions and kernels of block-sparse attention on the CPU, in Triton's interpreter.

Run it as a script, with TRITON_INTERPRET=1; it prints how many results were compared. Without
bfloat16, which the interpreter computes wrongly (Triton 3.9).
"""

import importlib
import math

import torch

from jitkern.ops import BlockSparseMask, block_sparse_attention, block_sparse_attention_backward

MODULE = "jitkern.kernels_src.block_sparse_attention.block_sparse_attention_triton"
BOUND = 4  # in units of the dtype's epsilon, as in tests/test_kernels.py


class Kernels:
    """A stand-in for the first argument of a launch function: kernels on a GPU of sm_90."""

    fake = False
    capability = (9, 0)
    shared_memory_per_block = 227 << 10

    def __getattr__(self, name):
        return Function(getattr(importlib.import_module(MODULE), name))


class Function:
    """A kernel, which takes its template, and is launched by a call."""

    def __init__(self, function, template=None):
        self._function, self._template = function, template

    def __getitem__(self, template):
        return Function(self._function, template)

    def __call__(self, *args, grid, **_options):
        if grid:
            self._function[(grid,)](*args, **self._template)


def launched(op, args):
    """Return the results of the launch function, which allocates memory full of NaN."""
    complete, by_name = op.signature.complete(args, {})
    torch.use_deterministic_algorithms(True)
    try:
        return op.declaration.launchers["triton"](Kernels(), *complete, **by_name)
    finally:
        torch.use_deterministic_algorithms(False)


def widened(args):
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
    ]


def compare(op, args):
    """Compare a call with the reference in float64; return the number of results."""
    results, exact = launched(op, args), op.run_reference(*widened(args))
    for got, want in zip(results, exact):
        assert (got is None) == (want is None)
        if got is not None and got.numel():
            error = (got.double() - want).abs() / (want.abs() + 1)
            error = torch.where(got.double() == want, 0, error).max()
            assert error <= BOUND * torch.finfo(got.dtype).eps, (op, got.dtype, error, args)
    return sum(got is not None for got in results)


def calls():
    """Calls of tiles that are smaller than a block, beside the samples."""
    for dtype, block in (
        (torch.float32, 64),
        (torch.float16, (64, 128)),
        (torch.float32, (96, 32)),
    ):
        q, k, v = (
            torch.randn(1, h, n, 16, dtype=dtype) / 2 for h, n in ((2, 130), (1, 100), (1, 100))
        )
        yield q, k, v, *BlockSparseMask.causal(130, 100, block=block).arguments
        seen = torch.rand(1, 2, 130, 100) < 0.1
        seen[:, :, 7] = False
        yield q, k, v, *BlockSparseMask.from_dense(seen, block=block).arguments, -0.25
        blocks = torch.ones(1, 1, -(-130 // 96), -(-100 // 32), dtype=torch.bool)
        mask = BlockSparseMask.from_blocks(blocks, 130, 100, block=(96, 32))
        yield q, k, v, *mask.arguments, 0.0
        few = BlockSparseMask.causal(64, 64, block=(64, 32))  # whole tiles
        yield q[:, :, :64], k[:, :, :64], v[:, :, :64], *few.arguments
    # Lengths of whole tiles, and blocks that end behind them, where the next head begins.
    q, k, v = (torch.randn(1, 2, n, 128, dtype=torch.float16) / 2 for n in (320, 192, 192))
    for blocks in (torch.ones(3, 2) > 0, torch.eye(3, 2) > 0):
        yield q, k, v, *BlockSparseMask.from_blocks(blocks, 320, 192).arguments
        yield q, k, v, *BlockSparseMask.from_blocks(blocks, 320, 192, causal=True).arguments


def gradient_call(args):
    q, k, v, *mask = args
    out, lse = block_sparse_attention.run_reference(*args)
    grad, of_lse = (torch.randn(x.shape, dtype=x.dtype) / 2 for x in (out, lse))
    of_lse[lse == -math.inf] = math.nan
    return grad, of_lse, out, lse, q, k, v, *mask


def main():
    torch.manual_seed(0)
    count = 0
    for op in (block_sparse_attention, block_sparse_attention_backward):
        for args in op.sample_inputs("cpu"):
            if args[0].dtype != torch.bfloat16:
                count += compare(op, args)
    for args in calls():
        count += compare(block_sparse_attention, args)
        count += compare(block_sparse_attention_backward, gradient_call(args))
    q, k, v, *mask = next(calls())
    out, lse = launched(block_sparse_attention, (q * math.nan, k, v, *mask))
    assert out.isnan().all() and lse.isnan().all()
    print(count)


if __name__ == "__main__":
    main()
