"""Kernels beside their peers: how long calls take, and what share of the memory's rate that is.

`bench_op` measures one op; `python -m benches.kernels` measures any, and writes tables and plots.
"""

from __future__ import annotations

from benches.kernels.bench import Bench as Bench, bench_op as bench_op
