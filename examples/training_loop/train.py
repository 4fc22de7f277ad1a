"""Two loops that train one small model: what looking at the loss costs, and how not to pay for it.

`plain` asks in each step whether the loss and the gradients are finite, and what the loss is. Each
question makes the host wait until the GPU has done all its work. `quiet` leaves the questions to
kernels, and looks at what has reached the host by itself: every 50 steps it begins a copy.

    python train.py                     # on the GPU, if there is one
    python train.py --device cpu --steps 20 --every 5
    python train.py --spoil 30          # a NaN in the data of step 30: when does each loop notice?
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import jitkern


class NotFinite(Exception):
    """A loop found a loss or a gradient that is infinite or NaN."""


class Task:
    """A model, its optimizer, and its data, all on one device."""

    def __init__(self, args: argparse.Namespace, spoil: int = -1) -> None:
        torch.manual_seed(0)
        layers = [
            layer
            for _ in range(args.layers)
            for layer in (nn.Linear(args.width, args.width), nn.GELU())
        ]
        self.model = nn.Sequential(*layers, nn.Linear(args.width, 1)).to(args.device)
        self.parameters = [*self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-2, momentum=0.9)
        self.batches = [
            torch.randn(args.batch, args.width, device=args.device) for _ in range(args.steps)
        ]
        if spoil >= 0:
            self.batches[spoil][0, 0] = float("nan")

    def loss(self, step: int) -> torch.Tensor:
        """Compute the loss of a step and its gradients."""
        self.optimizer.zero_grad()
        x = self.batches[step]
        loss = nn.functional.mse_loss(self.model(x).squeeze(1), x.sin().mean(1))
        loss.backward()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the last step."""
        return [p.grad for p in self.parameters if p.grad is not None]


def plain(task: Task, steps: int, every: int, report: list[str]) -> None:
    """Train as it is mostly written."""
    total = 0.0
    for step in range(steps):
        loss = task.loss(step)
        if torch.isnan(loss):  # waits for the GPU
            raise NotFinite(f"the loss of step {step}, noticed in step {step}")
        if not torch.stack([g.isfinite().all() for g in task.gradients()]).all():  # waits
            raise NotFinite(f"a gradient of step {step}, noticed in step {step}")
        task.optimizer.step()
        total += loss.item()  # waits
        if (step + 1) % every == 0:
            report.append(f"steps {step + 1 - every} to {step}: mean loss {total / every:.4f}")
            total = 0.0


def quiet(task: Task, steps: int, every: int, report: list[str]) -> None:
    """Train without waiting: what is looked at has reached the host by itself."""
    device = task.batches[0].device
    flag = torch.zeros((), dtype=torch.int32, device=device)
    meter, bad = jitkern.ops.LossMeter(device), jitkern.ops.AsyncScalar()
    reported = 0

    def look(step: int) -> int:
        if bad.poll():
            what = "the loss" if bad.poll() & 1 else "a gradient"
            raise NotFinite(f"{what} of a step up to {step}, noticed in step {step}")
        seen = meter.poll()
        if seen and meter.number > reported:
            first = every * (meter.number - 1)
            report.append(f"steps {first} to {first + every - 1}: mean loss {seen.mean:.4f}")
        return meter.number

    for step in range(steps):
        loss = task.loss(step)
        jitkern.ops.nonfinite_flag_([loss.detach()], flag, 1)
        jitkern.ops.nonfinite_flag_(task.gradients(), flag, 2)
        task.optimizer.step()
        meter.add(loss)
        if (step + 1) % every == 0:
            meter.put()
            meter.reset()
            bad.put(flag)
        reported = look(step)
    bad.wait()  # after the last step, the one time that the host waits
    meter.wait()
    look(steps - 1)


# ------------------------------------------------------------------ counting and timing


class Questions(TorchDispatchMode):
    """Counts the operations whose result the host needs to go on: on a GPU, each would wait."""

    ASKING = (
        torch.ops.aten._local_scalar_dense.default,  # item(), bool(tensor)
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.ASKING
        return func(*args, **(kwargs or {}))


def synchronisations(loop, task: Task, args: argparse.Namespace) -> int:
    """Count how often the steps of a loop wait for the device."""
    if args.device != "cuda":
        with Questions() as questions:
            loop(task, args.steps, args.every, [])
        return questions.count
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loop(task, args.steps, args.every, [])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


def milliseconds(loop, task: Task, args: argparse.Namespace, report: list[str]) -> float:
    """Time a step of a loop, in milliseconds."""
    wait = torch.cuda.synchronize if args.device == "cuda" else int
    wait()
    start = time.perf_counter()
    loop(task, args.steps, args.every, report)
    wait()
    return (time.perf_counter() - start) * 1000 / args.steps


def main() -> None:
    """Print what each loop reports, and a table of what each costs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two reports")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="timings, of which the median counts")
    parser.add_argument("--spoil", type=int, default=-1, help="a step whose data has a NaN")
    args = parser.parse_args()
    loops = {"plain": plain, "quiet": quiet}

    if args.spoil >= 0:
        for name, loop in loops.items():
            try:
                loop(Task(args, args.spoil), args.steps, args.every, [])
            except NotFinite as e:
                print(f"{name}: {e}")
        return

    for loop in loops.values():  # the first calls compile
        loop(Task(args), min(args.steps, 2 * args.every), args.every, [])
    counts = {name: synchronisations(loop, Task(args), args) for name, loop in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.rounds):
        for name, loop in loops.items():
            report: list[str] = []
            times[name].append(milliseconds(loop, Task(args), args, report))
            if len(times[name]) == args.rounds:
                print(f"{name}:", *report, sep="\n  ")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    print(f"\n{args.steps} steps of {args.layers} layers of {args.width} on {where}")
    print(f"{'loop':8} {'synchronisations a step':>24} {'ms a step':>10}")
    for name in loops:
        ms = statistics.median(times[name])
        print(f"{name:8} {counts[name] / args.steps:24.2f} {ms:10.3f}")


if __name__ == "__main__":
    main()
