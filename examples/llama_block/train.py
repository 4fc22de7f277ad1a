"""One small Llama, trained by PyTorch eagerly, with jitkern's ops, and by torch.compile.

Each way starts from the same weights and sees the same data. It runs in a process of its own,
twice: with empty caches, where it trains all steps, and with the caches that this run left, for the
time of its first step. The losses must agree, or the exit code is 1: within a bound in the first 20
steps, and in the mean of the last 20; within ten times the bound in each. Where the loss falls
steeply, ways whose roundings differ are a few steps apart, and so their losses are, too.

    python train.py                     # on the GPU, if there is one: 200 steps
    python train.py --device cpu --steps 20 --ways eager jitkern
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from model import Llama, use_jitkern

WAYS = ("eager", "jitkern", "torch.compile", "both")  # both: torch.compile of jitkern's ops
SIZES = {  # by device
    "cuda": {"layers": 4, "width": 1024, "heads": 16, "kv_heads": 4, "vocabulary": 32000,
             "batch": 8, "seq": 1024, "dtype": "bfloat16", "bound": 0.05},
    "cpu": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 512,
            "batch": 4, "seq": 32, "dtype": "float32", "bound": 1e-4},
}  # fmt: skip
HELP = {
    "batch": "sequences a step",
    "seq": "tokens of a sequence",
    "bound": "of the differences of losses, see above",
}


def tokens_of(args: argparse.Namespace) -> torch.Tensor:
    """Make random walks, [steps, batch, seq + 1]: 64 tokens with four successors each."""
    generator = torch.Generator().manual_seed(0)
    successors = torch.randint(64, (64, 4), generator=generator)
    shape = args.steps * args.batch, args.seq + 1
    walks, choice = (torch.randint(n, shape, generator=generator) for n in (64, 4))
    for i in range(1, shape[1]):
        walks[:, i] = successors[walks[:, i - 1], choice[:, i]]
    return walks.view(args.steps, args.batch, -1).to(args.device)


def train(args: argparse.Namespace) -> dict:
    """Train in one way; returns the losses, and times in seconds."""
    data = tokens_of(args)
    torch.manual_seed(0)
    model = Llama(
        args.vocabulary, args.layers, args.width, args.heads, args.kv_heads, args.seq,
        device=args.device, dtype=getattr(torch, args.dtype),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.way in ("jitkern", "both"):
        use_jitkern(model)
    if args.way in ("torch.compile", "both"):
        model.compile(dynamic=False)
    wait = torch.cuda.synchronize if args.device == "cuda" else int
    losses = torch.zeros(args.steps, device=args.device)
    times = []
    for step in range(args.only or args.steps):
        if step in (0, 1, args.steps // 2):  # and else nothing waits
            wait()
            times.append(time.perf_counter())
        loss = model(data[step, :, :-1], data[step, :, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    wait()
    times.append(time.perf_counter())
    return {
        "losses": losses.tolist(),
        "first": times[1] - times[0],
        "step": (times[-1] - times[-2]) / (args.steps - args.steps // 2),
        "memory": torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0.0,
    }


def in_a_process(way: str, folder: str, only: int) -> dict:
    """Train in one way in a new process, whose caches are in this folder."""
    caches = {
        name: f"{folder}/{way}/{name}"
        for name in ("JITKERN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, *sys.argv, "--way", way, "--only", str(only)]
    done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: the first step took {row['first']:.2f} s", file=sys.stderr, flush=True)
    return row


def apart(losses: list[float], others: list[float]) -> tuple[float, float, float]:
    """Return how far losses are apart: in the first 20 steps, as means of the last 20, at most."""
    differences = [abs(a - b) for a, b in zip(losses, others)]
    end = abs(statistics.mean(losses[-20:]) - statistics.mean(others[-20:]))
    return max(differences[:20]), end, max(differences)


def parsed() -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    first.add_argument("--device", choices=SIZES, default=default, help="decides on the sizes")
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], parents=[first],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="to train")
    parser.add_argument("--steps", type=int, default=200, help="of each way")
    for name, value in SIZES[first.parse_known_args()[0].device].items():
        option, text = "--" + name.replace("_", "-"), HELP.get(name, "of the model")
        parser.add_argument(option, type=type(value), default=value, help=text)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a process made by main
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # so many steps; 0: all
    return parser.parse_args()


def main() -> None:
    """Print the losses of each way, how far they are apart, and what each way costs."""
    args = parsed()
    if args.way:
        print(json.dumps(train(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        cold = {way: in_a_process(way, folder, 0) for way in args.ways}
        warm = {way: in_a_process(way, folder, 1) for way in args.ways}

    print(f"{'step':>6}" + "".join(f"{way:>15}" for way in args.ways))
    shown = sorted({*range(0, args.steps, max(1, args.steps // 10)), args.steps - 1})
    for step in shown:
        print(f"{step:6}" + "".join(f"{cold[way]['losses'][step]:15.4f}" for way in args.ways))
    agree = True
    for way in args.ways[1:]:
        start, end, most = apart(cold[way]["losses"], cold[args.ways[0]]["losses"])
        agree = agree and max(start, end, most / 10) <= args.bound
        print(
            f"{way} and {args.ways[0]} differ by at most {start:.2g} in the first 20 steps, by "
            f"{end:.2g} in the mean of the last 20, by at most {most:.2g} in any step"
        )

    where = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    print(
        f"\n{args.layers} layers of {args.width}, vocabulary {args.vocabulary}, "
        f"{args.batch} x {args.seq} tokens a step, {args.dtype}, on {where}"
    )
    print(f"{'':14} {'ms a step':>10} {'GB at most':>11} {'first step, s: cold':>20} {'warm':>6}")
    for way in args.ways:
        row, first = cold[way], warm[way]["first"]
        numbers = f"{row['step'] * 1e3:10.2f} {row['memory']:11.2f} {row['first']:20.2f}"
        print(f"{way:14} {numbers} {first:6.2f}")
    if not agree:
        sys.exit(f"the losses do not agree within {args.bound}")


if __name__ == "__main__":
    main()
