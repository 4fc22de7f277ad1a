"""One small Llama that generates text, by PyTorch eagerly, by torch.compile, and by jitkern.

    eager          plain PyTorch: a cache of a fixed length, scaled_dot_product_attention
    torch.compile  the same, compiled with mode="reduce-overhead" (CUDA graphs on a GPU)
    jitkern        PagedCache and jitkern's ops; on a GPU a step is one CUDA graph
    jitkern-w4     the same with weights of 4 bits, but for the last layer

Each way runs in a process of its own and starts from the same weights. The first steps of all ways
are fed with the same tokens, and their logits must agree with those of eager, or the exit code is
1; those of jitkern-w4 with eager that has the same weights of 4 bits, written out. Then each way
goes on with its own tokens, and these steps are timed.

    python decode.py                    # on the GPU, if there is one
    python decode.py --starts           # a cold and a prewarmed start of jitkern-w4
    python decode.py --device cpu --ways eager jitkern jitkern-w4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from model import Llama, use_jitkern
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitkern
from jitkern.ops import int4

WAYS = ("eager", "torch.compile", "jitkern", "jitkern-w4")
WRITTEN_OUT = "eager-w4"  # eager with the weights of jitkern-w4, for the comparison alone
SIZES = {  # by device
    "cuda": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336,
             "vocabulary": 128256, "prompt": 128, "steps": 256, "dtype": "bfloat16", "bound": 0.15},
    "cpu": {"layers": 2, "width": 128, "heads": 2, "kv_heads": 1, "hidden": 256,
            "vocabulary": 512, "prompt": 20, "steps": 16, "dtype": "float32", "bound": 1e-4},
}  # fmt: skip
BATCHES = {"cuda": [1, 8, 32], "cpu": [1, 3]}
HELP = {
    "prompt": "tokens of each prompt",
    "steps": "timed steps",
    "bound": "of the differences of logits, as a share of the largest logit",
}
CHECKED = 8  # steps


def next_of(
    model: Llama, tokens: Tensor, positions: Tensor, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits [batch, vocabulary] and the next tokens [batch, 1]."""
    logits = model(tokens, positions, slots)
    return logits, logits.argmax(-1, keepdim=True)


class Plain:
    """Generates by plain PyTorch. tokens: [batch, 1], which the next step reads and replaces."""

    def __init__(self, model: Llama, batch: int, *, compiled: bool) -> None:
        model.make_cache(batch)
        device = model.cos.device
        self.model, self.next, self.backends = model, next_of, contextlib.nullcontext
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        if compiled:
            mode = "reduce-overhead" if device.type == "cuda" else "default"
            self.next = torch.compile(next_of, mode=mode, fullgraph=True, dynamic=False)
            # As gpt-fast does: Inductor then makes kernels of attention, too.
            self.backends = lambda: sdpa_kernel(SDPBackend.MATH)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Begin all sequences; returns the logits of their last tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        self.position.copy_(positions[-1:])
        logits, token = next_of(self.model, tokens, positions)
        self.tokens.copy_(token)
        return logits

    def step(self) -> Tensor:
        """Take one token of each sequence; returns logits, which the next step may overwrite."""
        self.position += 1
        with self.backends():
            logits, token = self.next(self.model, self.tokens, self.position)
        self.tokens.copy_(token)
        return logits

    def capture(self) -> None:
        """Do nothing: torch.compile captures by itself."""


class Paged:
    """Generates by jitkern, with the methods of Plain."""

    def __init__(self, model: Llama, batch: int) -> None:
        block, device = model.blocks[0], model.cos.device
        self.cache = jitkern.ops.PagedCache(
            pages=batch * -(-model.length // 16), heads=block.parts[1], head_size=block.d,
            sequences=batch, layers=len(model.blocks), max_length=model.length,
            dtype=model.kind["dtype"], device=device,
        )  # fmt: skip
        self.model = use_jitkern(model, self.cache)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def prompt(self, tokens: Tensor) -> Tensor:
        sequences = [self.cache.add() for _ in tokens]
        slots = self.cache.append(dict.fromkeys(sequences, tokens.shape[1]))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits, token = next_of(self.model, tokens, positions, slots)
        self.tokens.copy_(token)
        return logits

    def step(self) -> Tensor:
        self.slots = self.cache.advance()  # always the same tensor
        if self.graph:
            self.graph.replay()
        else:
            self._queue()
        return self.logits

    def _queue(self) -> None:
        """Queue what is the same in each step: a graph holds exactly this."""
        positions = (self.cache.seq_lens - 1).unsqueeze(1)
        self.logits, token = next_of(self.model, self.tokens, positions, self.slots)
        self.tokens.copy_(token)

    def capture(self) -> None:
        """Capture the steps to come, behind a first one, which compiled what they need."""
        if self.tokens.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._queue()


def made(args: argparse.Namespace) -> Llama:
    """Make the model of a way."""
    torch.manual_seed(0)
    model = Llama(
        args.vocabulary, args.layers, args.width, args.heads, args.kv_heads, args.hidden,
        length=-(-(args.prompt + CHECKED + args.steps) // 16) * 16,
        device=args.device, dtype=getattr(torch, args.dtype),
    )  # fmt: skip
    if args.way == "jitkern-w4":
        jitkern.ops.quantize_linears(model, "int4", only=lambda name, _: name != "logits")
    elif args.way == WRITTEN_OUT:
        for linear in model.blocks.modules():
            if isinstance(linear, nn.Linear):
                linear.weight.copy_(int4.quantize(linear.weight).values(linear.weight.dtype))
    return model


def decoder_of(args: argparse.Namespace, model: Llama, batch: int) -> Plain | Paged:
    if args.way.startswith("jitkern"):
        return Paged(model, batch)
    return Plain(model, batch, compiled=args.way == "torch.compile")


def tokens_of(args: argparse.Namespace, batch: int) -> Tensor:
    """Return the prompts and the tokens of the checked steps, [batch, prompt + CHECKED]."""
    shape = batch, args.prompt + CHECKED
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(args.vocabulary, shape, generator=generator).to(args.device)


def now(args: argparse.Namespace) -> float:
    """Wait until the device has done its work; returns the time of day, in seconds."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.time()


@torch.inference_mode()
def decode(args: argparse.Namespace) -> dict:
    """Decode in one way; returns seconds, and writes the logits of the checked steps."""
    model, checked, row = made(args), [], {"seconds": []}
    for batch in args.batch:
        decoder, given = decoder_of(args, model, batch), tokens_of(args, batch)
        begin = now(args)
        logits = [decoder.prompt(given[:, : args.prompt])]
        for i in range(args.prompt, args.prompt + CHECKED):
            decoder.tokens.copy_(given[:, i : i + 1])
            logits.append(decoder.step().clone())
            if i == args.prompt:
                row.setdefault("first", now(args) - begin)
                decoder.capture()
        checked.append(torch.stack(logits).cpu())
        begin = now(args)
        for _ in range(args.steps if args.way in args.ways else 0):
            decoder.step()
        row["seconds"].append(now(args) - begin)
    torch.save(checked, args.logits)
    memory = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0.0
    return {**row, "memory": memory}


@torch.inference_mode()
def start(args: argparse.Namespace) -> dict:
    """Generate two tokens, the second by a step; returns times of day, and what was compiled."""
    decoder, given = decoder_of(args, made(args), args.batch[0]), tokens_of(args, args.batch[0])
    times = [now(args)]
    decoder.prompt(given[:, : args.prompt])
    times.append(now(args))
    decoder.step()
    times.append(now(args))
    decoder.capture()
    decoder.step()
    return {"times": times, **jitkern.stats()}


# ------------------------------------------------------------------ processes


def output_of(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def in_a_process(way: str, folder: str) -> dict:
    """Decode in one way in a new process, whose caches are empty."""
    names = ("JITKERN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    caches = {name: f"{folder}/{way}/{name}" for name in names}
    logits = f"{folder}/{way}.pt"
    command = [sys.executable, *sys.argv, "--way", way, "--logits", logits]
    row = json.loads(output_of(command, **caches).splitlines()[-1])
    print(f"{way}: the prompt and a first step took {row['first']:.2f} s", file=sys.stderr)
    return {**row, "logits": torch.load(logits)}


def apart(logits: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference, as a share of the largest logit."""
    pairs = [(a.double(), b.double()) for a, b in zip(logits, others)]
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()


def compare_ways(args: argparse.Namespace) -> None:
    """Print how far the logits of the ways are apart, and what each way costs."""
    peers = {way: WRITTEN_OUT if way == "jitkern-w4" else "eager" for way in args.ways}
    with tempfile.TemporaryDirectory() as folder:
        processes = dict.fromkeys([*args.ways, *peers.values()])
        rows = {way: in_a_process(way, folder) for way in processes}
    differences = []
    for way, peer in peers.items():
        if way != peer:
            differences.append(apart(rows[way]["logits"], rows[peer]["logits"]))
            shown = f"{differences[-1]:.2g} of the largest"
            print(f"{way} and {peer}: logits differ by at most {shown}")

    print(f"\n{described(args)}")
    batches = "".join(f"{batch:>9}" for batch in args.batch)
    print(f"{'tokens a second, batch of':26}{batches} {'first step, s':>14} {'GB at most':>11}")
    for way in args.ways:
        row = rows[way]
        rates = "".join(
            f"{batch * args.steps / seconds:9.0f}"
            for batch, seconds in zip(args.batch, row["seconds"])
        )
        print(f"{way:26}{rates} {row['first']:14.2f} {row['memory']:11.2f}")
    if not all(difference <= args.bound for difference in differences):  # or NaN
        sys.exit(f"the logits do not agree within {args.bound}")


def compare_starts(args: argparse.Namespace) -> None:
    """Print a cold and a prewarmed start of jitkern-w4, and what the prewarm costs."""
    command = [sys.executable, *sys.argv, "--way", "jitkern-w4"]
    with tempfile.TemporaryDirectory() as folder:
        cold, filled = ({"JITKERN_CACHE_DIR": f"{folder}/{name}"} for name in ("cold", "filled"))
        program, calls = [sys.executable, "-m", "jitkern"], f"{folder}/calls.jsonl"
        rows = {"cold": started(command, cold)}
        output_of([*program, "record", "-o", calls, "--", *command], **cold)
        begin = time.time()
        output_of([*program, "prewarm", "--from", calls], **filled)
        seconds = time.time() - begin
        rows["prewarmed"] = started(command, filled)
    print(f"{described(args)}, a batch of {args.batch[0]}")
    columns = ("model", "first token", "second", "kernels compiled", "launchers")
    print(f"{'seconds from the start to':26}" + "".join(f"{c:>{len(c) + 2}}" for c in columns))
    for name, (times, *counts) in rows.items():
        print(
            f"{name:26}{times[0]:7.2f}{times[1]:13.2f}{times[2]:8.2f}{counts[0]:18}{counts[1]:11}"
        )
    print(f"jitkern prewarm took {seconds:.1f} s")


def started(command: list[str], environment: dict[str, str]) -> tuple[list[float], int, int]:
    """Start a process; returns seconds from its start, and how much it compiled."""
    begin = time.time()
    row = json.loads(output_of(command, **environment).splitlines()[-1])
    return [at - begin for at in row["times"]], row["compiles"], row["runtimes"]


def described(args: argparse.Namespace) -> str:
    where = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    return (
        f"{args.layers} layers of {args.width}, vocabulary {args.vocabulary}, prompts of "
        f"{args.prompt}, {args.dtype}, on {where}"
    )


def parsed() -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    first.add_argument("--device", choices=SIZES, default=default, help="decides on the sizes")
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], parents=[first],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    device = first.parse_known_args()[0].device
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="to decode")
    parser.add_argument("--starts", action="store_true", help="compare starts instead of ways")
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES[device], help="sequences")
    for name, value in SIZES[device].items():
        option, text = "--" + name.replace("_", "-"), HELP.get(name, "of the model")
        parser.add_argument(option, type=type(value), default=value, help=text)
    hidden = argparse.SUPPRESS  # of the processes that main makes
    parser.add_argument("--way", choices=[*WAYS, WRITTEN_OUT], help=hidden)
    parser.add_argument("--logits", type=Path, help=hidden)
    return parser.parse_args()


def main() -> None:
    """Compare ways or starts, or be one of them."""
    args = parsed()
    if args.way:
        print(json.dumps((start if args.starts else decode)(args)))
    elif args.starts:
        compare_starts(args)
    else:
        compare_ways(args)


if __name__ == "__main__":
    main()
