"""Pointwise functions to measure: `python -m benches.kernels benches.formulas:swiglu`."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from jitkern import pointwise


@pointwise
def square(x: Any) -> Any:
    """Return x²."""
    return x * x


@pointwise
def swiglu(gate: Any, up: Any) -> Any:
    """Return silu(gate) · up."""
    return functional.silu(gate) * up


@pointwise
def geglu(gate: Any, up: Any) -> Any:
    """Return gelu(gate) · up."""
    return functional.gelu(gate) * up


@pointwise
def scaled(x: Any) -> Any:
    """Return x / 2 + 1."""
    return x * 0.5 + 1.0


double_square = square >> square
chain_of_8 = square >> scaled >> square >> scaled >> square >> scaled >> square >> scaled
