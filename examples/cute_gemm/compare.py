"""Compare the GEMM with `torch.matmul` on a GPU: errors, and TFLOP/s of both."""

import statistics

import torch
from cute_gemm.kernel import LARGE, ODD, gemm


def error_of(a, b):
    """The largest error of the GEMM, as a part of the largest element."""
    exact = a.double() @ b.double()
    return ((gemm(a, b).double() - exact).abs().max() / exact.abs().max()).item()


def seconds_of(function, a, b, times=20):
    """The median time of a call."""
    for _ in range(3):
        function(a, b)
    spans = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(a, b)
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1000)
    return statistics.median(spans)


def main():
    print(f"{'m n k':18} {'error':>8} {'CuTe':>8} {'Torch':>8}  TFLOP/s")
    for m, n, depth in (*ODD, *LARGE):
        a = torch.randn(m, depth, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(depth, n, device="cuda", dtype=torch.bfloat16)
        error = error_of(a, b)
        assert error < 4e-3, f"{m} x {n} x {depth}: the error is {error}"  # half a unit of bfloat16
        rates = [2e-12 * m * n * depth / seconds_of(f, a, b) for f in (gemm, torch.matmul)]
        print(f"{m:<5} {n:<5} {depth:<6} {error:8.1e} {rates[0]:8.1f} {rates[1]:8.1f}")


if __name__ == "__main__":
    main()
