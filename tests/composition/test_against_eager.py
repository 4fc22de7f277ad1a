"""Random formulas of integers, bools, numbers and layouts, whose results are those of eager PyTorch.

They are equal to the bit: integers and bools are exact, and so is what is made of two of these by
one division or product. Every function is a cell that runs again: it replaces one of its name.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from formulas import on_each_device

from jitkern import pointwise

WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMBERS = ["0", "1", "2", "3", "7", "100", "0.1", "0.3", "0.5", "-1.5", "2.0"]
CASTS = ["int", "long", "short", "char", "byte", "bool"]
SHAPE = (5, 13)
PER_FUNCTION = 20
PARTS, FUNCTIONS = 50, 20  # of the long test: 20,000 formulas
CELL = "@pointwise\ndef formulas(x, y, z, a: float, n: int):\n    return ({},)\n"
scope = {"torch": torch, "pointwise": pointwise, "__name__": "fuzzed"}


class Writer:
    """Random expressions as Python writes them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def leaf(self):
        names = ["x", "y", "z", "x", "y", "z", "n"]
        whole = [number for number in NUMBERS if "." not in number]
        number = self.draw.choice(whole)
        return self.draw.choice([*names, number])

    def value(self, depth):
        if depth == 0:
            return self.leaf()
        one, other = self.value(depth - 1), self.value(self.draw.randrange(depth))
        kinds = ["+", "-", "*", "+", "-", "*", "where", "cast", "clamp", "abs", "power", "bits"]
        kind = self.draw.choice([*kinds, "whole", "cond"])
        if kind in "+-*":
            return f"({one} {kind} {other})"
        return {
            "where": lambda: f"torch.where({self.condition(depth - 1)}, {one}, {other})",
            "cast": lambda: f"({one}).{self.draw.choice(CASTS)}()",
            "clamp": lambda: f"torch.clamp({one}, 1, {self.draw.choice(['3', '7', '100'])})",
            "abs": lambda: self.draw.choice([f"abs({one})", f"(-{one})"]),
            "power": lambda: f"({one}) ** {self.draw.choice('2357')}",
            "bits": lambda: self.draw.choice([f"({one} & {other})", f"({one} ^ {other})", f"({one} | {other})", f"(~{one})"]),
            "whole": lambda: f"(({one}).{self.draw.choice(CASTS[:-1])}() {self.draw.choice(['//', '%'])} {self.draw.choice('237')})",
            "cond": lambda: self.condition(depth - 1),
        }[kind]()  # fmt: skip

    def condition(self, depth):
        sign = self.draw.choice(["<", "<=", ">", ">=", "==", "!="])
        whole = self.draw.choice([self.leaf(), self.value(depth)])
        one, other = self.draw.choice("xz"), whole
        return self.draw.choice([f"({one} {sign} {other})", f"({other} {sign} {one})"])

    def formula(self):
        text = self.value(self.draw.randint(1, 3))
        if self.draw.random() < 0.3:
            return self.draw.choice(
                [
                    f"({text}).int() / {self.draw.choice('xz')}",
                    f"{text} * a",
                    f"{text} > a",
                    f"a - {text}",
                ]
            )
        return text


def filled(draw, dtype, shape, device):
    """Random numbers of a dtype, the largest ones among them."""
    numbers = torch.Generator().manual_seed(draw.randrange(2**31))
    if dtype == torch.bool:
        return (torch.randint(0, 2, shape, generator=numbers) > 0).to(device)
    ends = torch.iinfo(dtype)
    values = torch.randint(-9 if ends.min else 0, 100, shape, generator=numbers).to(dtype)
    few = torch.rand(shape, generator=numbers) < 0.2
    of_few = torch.tensor([ends.min, ends.max, ends.max - 1, 3, 0], dtype=dtype)
    return torch.where(few, of_few[torch.randint(5, shape, generator=numbers)], values).to(device)


def tensor(draw, dtype, device):
    """A tensor that broadcasts to SHAPE: contiguous, transposed, with gaps, expanded, a scalar."""
    kind = draw.choice(["flat"] * 4 + ["turned", "apart", "row", "column", "expanded", "scalar"])
    if kind == "turned":
        return filled(draw, dtype, SHAPE[::-1], device).T
    if kind == "apart":
        return filled(draw, dtype, (10, 26), device)[::2, 1::2]
    if kind == "expanded":
        return filled(draw, dtype, (5, 1), device).expand(SHAPE)
    shape = {"row": SHAPE[1:], "column": (5, 1), "scalar": ()}.get(kind, SHAPE)
    return filled(draw, dtype, shape, device)


def evaluated(text, args):
    """Return what eager PyTorch computes, or None if it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = eval(text, {"torch": torch}, dict(zip("xyzan", args)))
    except (RuntimeError, TypeError, OverflowError, AttributeError, ZeroDivisionError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) else None


def check(seed, device):
    """Compare a function of several formulas with eager PyTorch; return how many there were."""
    draw = random.Random(seed)
    dtypes = [draw.choice(WHOLE) for _ in range(3)]
    args = [tensor(draw, dtype, device) for dtype in dtypes]
    if draw.random() < 0.2:
        args[1] = draw.choice([2, 3])
    args += [draw.choice([0.7, 0.1, 2.5]), draw.choice([3, 5, 100])]
    writer, wanted = Writer(draw), {}
    while len(wanted) < PER_FUNCTION:
        text = writer.formula()
        found = evaluated(text, args)
        if found is not None:
            wanted[text] = found
    exec(CELL.format(", ".join(wanted)), scope)
    results = scope["formulas"](*args)
    about = [
        f"{a.dtype}{[*a.shape]}{a.stride()}" if isinstance(a, torch.Tensor) else a for a in args
    ]
    wrong = []
    for (text, want), got in zip(wanted.items(), results):
        if got.dtype != want.dtype or got.shape != want.shape:
            wrong.append(f"{text}: {got.dtype} {got.shape}, not {want.dtype} {want.shape}")
            continue
        bad = ~((got == want) | ((got != got) & (want != want)))
        if bad.any():
            wrong.append(f"{text}: {got[bad][:3].tolist()}, not {want[bad][:3].tolist()}")
    assert not wrong, f"seed {seed}, {about}\n" + "\n".join(wrong)
    return len(wanted)


@on_each_device
@pytest.mark.parametrize("seed", [0, 1])
def test_random_formulas(device, seed):
    assert check(seed, device) == PER_FUNCTION


@pytest.mark.long
@on_each_device
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_formulas(device, part):
    for seed in range(part * FUNCTIONS, (part + 1) * FUNCTIONS):
        check(seed, device)
