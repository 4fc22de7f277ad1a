"""Block-sparse attention beside flex_attention and dense attention, for some densities of blocks.

Contenders take turns on the same bf16 tensors [1, heads, length, d], forward, and forward and
backward: `jitkern` over a mask with so many random blocks of 128 x 128 in each row, `dense` the
same op over a mask with all blocks, `flex` torch.compile of flex_attention, `sdpa` PyTorch's
dense attention. The kernels alone are timed, by replays of a CUDA graph. `mask` and `flex mask` are
the times to make the masks, the host's included: from a tensor of blocks on the device, and by
torch.compile of create_block_mask from a function that looks into this tensor. `of bound` is the
time of jitkern as a part of dense x (density + 0.1). Results of some queries are compared with
float64 first. On the CPU, where the reference answers, flex is left out.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benches import common
from jitkern.devtools import timing
from jitkern.ops import BlockSparseMask, flash_attention

BLOCK, CHECKED = 128, 64  # queries and keys of a block; queries that are compared with float64
DENSITIES = (1.0, 0.5, 0.25, 0.1)
SECONDS = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--length", type=int, default=16384, help="tokens; default: %(default)s")
    parser.add_argument("--heads", type=int, default=16, help="of q; default: %(default)s")
    parser.add_argument("--key-heads", type=int, help="default: as many")
    parser.add_argument("--head-size", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--densities", type=lambda text: [*map(float, text.split(","))], default=DENSITIES,
        metavar="D,…", help="default: 1,0.5,0.25,0.1",
    )  # fmt: skip
    options = common.parsed(parser, arguments)
    rows = [row for density in options.densities for row in measured(options, density)]
    header = ("density", "direction", *(f"{name} us" for name in rows[0]["us"]), "of bound")
    cells = [
        (
            f"{row['density']:.3f}", row["direction"],
            *(f"{us:.0f}" for us in row["us"].values()), f"{row['of_bound']:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    common.report(options, header, cells, results=rows)
    return 0


def measured(options: Any, density: float) -> list[dict[str, Any]]:
    """Return the medians of all contenders at a density, forward, and with the backward pass."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    count = math.ceil(options.length / BLOCK)
    wanted = max(1, round(density * count))
    blocks = torch.rand(count, count, device=device).argsort(1).argsort(1) < wanted
    every = torch.ones_like(blocks)
    shapes = [
        (1, heads, options.length, options.head_size)
        for heads in (options.heads, *[options.key_heads or options.heads] * 2)
    ]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes)
    contenders, makers = contenders_of(options, blocks, every)
    check(contenders["jitkern"](q, k, v), q, k, v, blocks)
    masks = {
        name: statistics.median(each)
        for name, each in timing.interleaved(makers, SECONDS, options.rounds or 20).items()
    }
    rows = []
    for direction in ("forward", "both"):
        calls = {n: call_of(f, (q, k, v), direction) for n, f in contenders.items()}
        samplers = {name: sampler(call, device) for name, call in calls.items()}
        found = timing.interleaved(samplers, SECONDS, options.rounds or timing.MOST)
        us = {n: statistics.median(s) * 1e6 for n, s in found.items()}
        us |= {name: seconds * 1e6 for name, seconds in masks.items()}
        part = us["jitkern"] / (us["dense"] * (wanted / count + 0.1))
        rows.append({"density": wanted / count, "direction": direction, "us": us, "of_bound": part})
        print(f"{direction} at {wanted / count:.3f}", file=sys.stderr, flush=True)
    return rows


def contenders_of(
    options: Any, blocks: torch.Tensor, every: torch.Tensor
) -> tuple[dict[str, Callable[..., torch.Tensor]], dict[str, Callable[[], float]]]:
    """Return functions of q, k and v, and samplers of the making of masks."""

    def ours(which: torch.Tensor) -> BlockSparseMask:
        return BlockSparseMask.from_blocks(which, options.length, options.length, block=BLOCK)

    mask, dense = ours(blocks), ours(every)
    contenders: dict[str, Callable[..., torch.Tensor]] = {
        "jitkern": lambda q, k, v: flash_attention(q, k, v, mask),
        "dense": lambda q, k, v: flash_attention(q, k, v, dense),
        "sdpa": flash_attention,
    }
    makers = {"mask": making(lambda: ours(blocks), blocks.device)}
    if blocks.is_cuda:
        compiled_mask, compiled = compiled_flex()

        def seen(_b: Any, _h: Any, i: Any, j: Any) -> Any:
            return blocks[i // BLOCK, j // BLOCK]

        def flex_mask() -> Any:
            return compiled_mask(seen, None, None, options.length, options.length, blocks.device)

        of_flex = flex_mask()
        grouped = (options.key_heads or options.heads) != options.heads
        contenders["flex"] = lambda q, k, v: compiled(
            q, k, v, block_mask=of_flex, enable_gqa=grouped
        )
        makers["flex mask"] = making(flex_mask, blocks.device)
    return contenders, makers


@functools.cache
def compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return create_block_mask and flex_attention, compiled at the first call for all densities."""
    return torch.compile(create_block_mask), torch.compile(flex_attention)


def call_of(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], direction: str
) -> Callable[[], object]:
    """Return a call of the function, with the backward pass or without."""
    grad = torch.randn_like(tensors[0])

    def forward() -> object:
        with torch.no_grad():
            return function(*tensors)

    def both() -> object:
        return torch.autograd.grad(function(*tensors), tensors, grad)

    call = forward if direction == "forward" else both
    call()  # compiles
    return call


def sampler(call: Callable[[], object], device: torch.device) -> timing.Sampler:
    """Return a sampler of the kernels of a call; on the CPU, of the call."""
    if device.type == "cuda":
        return timing.captured([call], device)
    return timing.issued(lambda: [call], device)


def making(make: Callable[[], object], device: torch.device) -> timing.Sampler:
    """Return a sampler of the making of a mask, from an idle device to an idle device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def sample() -> float:
        wait()
        start = time.perf_counter()
        make()
        wait()
        return time.perf_counter() - start

    return sample


def check(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Compare the results of some queries of the first head with float64."""
    picked = torch.randperm(q.shape[2], device=q.device)[:CHECKED]
    seen = blocks[picked // BLOCK].repeat_interleave(BLOCK, 1)[:, : k.shape[2]]
    with torch.no_grad():
        wide = (x.double() for x in (q[0, 0, picked], k[0, 0], v[0, 0]))
        want = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
        error = (out[0, 0, picked].double() - want).norm() / want.norm()
    if not error < 1e-2:
        raise SystemExit(f"wrong: a relative error of {error:.2g} against float64")


if __name__ == "__main__":
    sys.exit(main())
