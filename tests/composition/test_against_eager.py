"""Random formulas of integers, bools, numbers and layouts, whose results are those of eager PyTorch.

They are equal to the bit: integers and bools are exact, and so is what is made of two of these by
one division or product. Every function is a cell that runs again: it replaces one of its name.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from formulas import on_each_device

from jitkern import pointwise

WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMBERS = ["0", "1", "2", "3", "7", "100", "0.1", "0.3", "0.5", "-1.5", "2.0"]
CASTS = ["int", "long", "short", "char", "byte", "bool"]
SHAPE = (5, 13)
PER_FUNCTION = 20
PARTS, FUNCTIONS = 50, 20  # of the long test: 20,000 formulas
CELL = "@pointwise\ndef formulas(x, y, z, a: float, n: int):\n    return ({},)\n"
scope = {"torch": torch, "F": F, "pointwise": pointwise, "__name__": "fuzzed"}


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


# ------------------------------------------------------------------ floating-point numbers too

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DEFAULTS = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
OF_ONE = [
    "F.silu",
    "F.gelu",
    "F.softplus",
    "F.logsigmoid",
    "F.mish",
    "F.elu",
    "F.leaky_relu",
    "F.hardtanh",
    "F.relu6",
    "F.hardsigmoid",
    "F.hardswish",
    "F.softsign",
    "F.relu",
    "torch.sigmoid",
    "torch.tanh",
    "torch.abs",
    "torch.neg",
    "torch.square",
    "torch.sin",
    "torch.erf",
    "torch.atan",
    "torch.exp2",
    "torch.isnan",
    "torch.isfinite",
    "torch.signbit",
    "torch.logical_not",
    "torch.bitwise_not",
    "torch.relu",
]
OF_A_LEAF = ["torch.floor({})", "torch.round({})", "torch.sign({})", "({}).int()", "({}).bool()", "({}).long()", "({}).char()",
    "({} % 3)", "({} // 2)", "torch.fmod({}, 2.5)", "({} ** 0.5)", "({} ** -1)", "({} ** -2)", "({} ** 2.0)", "({} ** 3)", "(2 ** {})",
    "(3 - {})", "(2.0 - {})", "(1 / {})", "(7 % {})", "torch.log1p({})", "torch.rsqrt({})"]  # fmt: skip
OF_TWO = ["({} + {})", "({} - {})", "({} * {})", "({} / {})", "torch.maximum({}, {})", "torch.minimum({}, {})", "torch.atan2({}, {})",
    "torch.hypot({}, {})", "torch.clamp({}, min={})", "torch.lerp({}, {}, 0.25)", "torch.add({}, {}, alpha=2)", "torch.add({}, {}, alpha=0.5)",
    "torch.sub({}, {}, alpha=3)", "torch.rsub({}, {})", "torch.addcmul({}, {}, z, value=2)", "torch.addcmul({}, {}, z, value=0.5)",
    "torch.addcdiv({}, {}, z)", "torch.logical_and({}, {})", "torch.logical_xor({}, {})", "({} & {})", "({} ^ {})", "({} // {})",
    "F.leaky_relu({}, 0.5) + {}", "torch.pow({}, {})"]  # fmt: skip
WITH_NUMBERS = ["torch.clamp({}, -1, 1)", "torch.clamp({}, -0.5, 300)", "torch.clamp({}, max=n)", "torch.clamp({}, min=a)",
    "F.hardtanh({}, -2, 2)", "F.hardtanh({}, 0.0, 1e3)", "F.softplus({}, 2.0)", "F.elu({}, 0.5)", "F.gelu({}, approximate='tanh')",
    "torch.nan_to_num({}, 0.0, 1.0, -1.0)", "({} * a)", "({} + n)", "(a - {})", "(n * {})", "({}).float()", "({}).double()",
    "torch.where(x > 0, {}, 300)", "torch.where(x > 0, {}, 0.5)", "torch.where(x > 0, a, {})", "({} > n)", "({} <= 0.5)", "({} ** n)"]  # fmt: skip
CLOSE = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 2**-12, torch.float64: 2**-12}
REFUSED = (RuntimeError, ZeroDivisionError)
MIXED_FORMULAS = int(os.environ.get("JITKERN_FUZZ_FORMULAS", "200"))
counted = Counter()


class Mixed(Writer):
    """Expressions of all dtypes, whose functions PyTorch refuses for some of them."""

    def value(self, depth):
        draw = self.draw
        if depth == 0:
            return draw.choice("xyzxyzn")
        kind = draw.choice(["one", "leaf", "two", "two", "number", "where"])
        if kind == "one":
            return f"{draw.choice(OF_ONE)}({self.value(depth - 1)})"
        if kind == "leaf":
            return draw.choice(OF_A_LEAF).format(draw.choice("xyz"))
        if kind == "number":
            return draw.choice(WITH_NUMBERS).format(self.value(depth - 1))
        if kind == "where":
            condition = f"{draw.choice('xyz')} {draw.choice(['<', '>=', '=='])} {draw.choice(['x', 'z', 'n', '1.5'])}"
            return f"torch.where({condition}, {self.value(depth - 1)}, {self.value(depth - 1)})"
        return draw.choice(OF_TWO).format(self.value(depth - 1), self.value(draw.randrange(depth)))

    def formula(self):
        return self.value(self.draw.choice([1, 1, 2, 2, 3]))


def asked(text, args, default):
    """Return what eager PyTorch computes, its refusal, or None where it takes no such arguments."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = eval(text, {"torch": torch, "F": F}, dict(zip("xyzan", args)))
    except REFUSED as e:
        return e
    except (
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
    ):  # of numbers alone, or for tensors
        return None
    finally:
        torch.set_default_dtype(before)
    return found if isinstance(found, torch.Tensor) else None


def in_float64(args, by=0.0):
    """Return the arguments with floating-point tensors in float64, moved by a relative error."""
    return [
        a.detach().double() * (1 + by * torch.sign(torch.randn(a.shape, device=a.device)))
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]


def mixed_tensor(draw, dtype, device):
    made = tensor(draw, torch.int8, device)
    if not dtype.is_floating_point:
        return torch.where(made.abs() > 9, 3, made).to(dtype)
    numbers = torch.Generator().manual_seed(draw.randrange(2**31))
    values = torch.randn(made.shape, generator=numbers, dtype=torch.float64).to(device, dtype)
    return torch.empty_like(made, dtype=dtype).copy_(values) if 0 not in made.stride() else values


def not_as(want, got, text, args):
    """Return what differs from eager: the dtype, the shape, or numbers by more than rounding."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{text}: {got.dtype} {[*got.shape]}, not {want.dtype} {[*want.shape]}"
    exact = asked(text, in_float64(args), torch.float64)
    if not isinstance(exact, torch.Tensor):
        return ""
    near = (got == want) | ((got != got) & (want != want))
    if got.is_floating_point():
        wide, moved = (
            got.double(),
            [asked(text, in_float64(args, 2**-18), torch.float64) for _ in range(4)],
        )
        spread = sum(
            ((m - exact).abs().nan_to_num(torch.inf) for m in moved if isinstance(m, torch.Tensor)),
            0.0,
        )
        close = CLOSE[got.dtype] * (exact.abs() + 1) + 4 * spread
        rounded = exact.to(got.dtype).double()
        near |= ((wide - exact).abs() <= close) | (wide == rounded) | (wide.isnan() & exact.isnan())
    elif got.dtype == torch.bool and any(
        t.is_floating_point() for t in args if isinstance(t, torch.Tensor)
    ):
        return ""  # of what was rounded in other places
    bad = ~near
    return f"{text}: {got[bad][:3].tolist()}, not {want[bad][:3].tolist()}" if bad.any() else ""


def gradients_of(function, args, default, *, twice):
    """Return the gradients of a weighted sum of outputs, and those of the sum of these."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        leaves = [
            a.detach().clone().requires_grad_()
            if isinstance(a, torch.Tensor) and a.is_floating_point()
            else a
            for a in args
        ]
        own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        outputs = [
            (i, o)
            for i, o in enumerate(function(*leaves))
            if o.is_floating_point() and o.requires_grad
        ]
        seeds = [torch.full_like(o, 0.5 + i % 3) for i, o in outputs]
        outputs = [o for _, o in outputs]
        if not outputs:
            return [None] * len(own)
        first = torch.autograd.grad(outputs, own, seeds, allow_unused=True, create_graph=twice)
        found = [*first]
        again = [g for g in first if twice and g is not None and g.requires_grad]
        if again:
            found += torch.autograd.grad([g.sum() for g in again], own, allow_unused=True)
        return found
    finally:
        torch.set_default_dtype(before)


def check_gradients(texts, args, default, *, twice):
    source = f"lambda x, y, z, a, n: ({', '.join(texts)},)"
    eager = eval(source, {"torch": torch, "F": F})
    ours = scope["mixed"]
    wrong = []
    try:
        want = gradients_of(eager, in_float64(args), torch.float64, twice=twice)
        moved = gradients_of(eager, in_float64(args, 2**-18), torch.float64, twice=twice)
    except RuntimeError:  # no derivative, or none of these dtypes
        return []
    got = gradients_of(ours, args, default, twice=twice)
    own = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for number, (g, w, m) in enumerate(zip(got, want, moved)):
        g, w, m = (None if one is None else one.detach() for one in (g, w, m))  # noqa: PLW2901
        if g is None or w is None:
            if (w is not None and bool(w.any())) or (g is not None and bool(g.any())):
                wrong.append(f"gradient {number}: {g}, not {w}")
            continue
        if g.dtype != own[number % len(own)] or g.shape != w.shape:
            wrong.append(f"gradient {number}: {g.dtype}{[*g.shape]}, not {own} {[*w.shape]}")
            continue
        known = w.isfinite() & m.isfinite() & (w.abs() < 1e4)
        scale = float(w[known].abs().max()) if known.any() else 0.0
        close = 8 * CLOSE[g.dtype] * (w.abs() + scale + 1) + 8 * (m - w).abs()
        bad = known & ~((g.double() - w).abs() <= close)
        if bad.any():
            wrong.append(f"gradient {number}: {g[bad][:3].tolist()}, not {w[bad][:3].tolist()}")
    return wrong


def check_mixed(seed, device, number=PER_FUNCTION):
    """Compare functions of formulas with eager PyTorch; return how many formulas there were."""
    draw = random.Random(seed)
    default = draw.choice(DEFAULTS)
    args = [mixed_tensor(draw, draw.choice(WHOLE + FLOATS * 2), device) for _ in range(3)]
    if draw.random() < 0.2:
        args[1] = draw.choice([2, 3, 0.5, True])
    args += [draw.choice([0.5, -1.25, 2.5]), draw.choice([3, 5, 100, 300])]
    writer, wanted, wrong, count = Mixed(draw), {}, [], 0
    while len(wanted) < number:
        text = writer.formula()
        large = args[-1] > 5 and ("** n" in text or "pow(" in text)  # overflows float32
        large |= bool(re.search(r"\((y|n), (y|n)\b", text))  # numbers alone are Python's
        if large or not {*re.findall(r"\b[xz]\b", text)} or text in wanted:
            continue
        found = asked(text, args, default)
        if found is None:
            continue
        count += 1
        if isinstance(found, Exception):
            counted["refused"] += 1
            if (accepted := accepts(text, args, default)) is not None:
                wrong.append(f"{text}: {accepted.dtype}, where PyTorch raises {found}")
            if count > 5 * number:
                break
            continue
        wanted[text] = found
    about = [
        f"{a.dtype}{[*a.shape]}{a.stride()}" if isinstance(a, torch.Tensor) else a for a in args
    ]
    if wanted:
        exec(CELL.format(", ".join(wanted)).replace("formulas", "mixed"), scope)
        torch.set_default_dtype(default)
        try:
            results = scope["mixed"](*args)
        finally:
            torch.set_default_dtype(torch.float32)
        pairs = zip(wanted.items(), results)
        wrong += filter(None, [not_as(want, got, text, args) for (text, want), got in pairs])
        if draw.random() < 0.3:
            floats = [t for t, w in wanted.items() if w.is_floating_point()][:8]
            exec(CELL.format(", ".join(floats or ["x"])).replace("formulas", "mixed"), scope)
            twice = torch.float16 not in [a.dtype for a in args[:3] if isinstance(a, torch.Tensor)]
            wrong += [
                f"{floats}: {w}"
                for w in check_gradients(floats or ["x"], args, default, twice=twice)
            ]
            counted["with gradients"] += len(floats)
    assert not wrong, f"seed {seed}, default {default}, {about}\n" + "\n".join(wrong)
    return count


def accepts(text, args, default):
    """Return the result of a formula that eager refuses, if ours does not."""
    exec(CELL.format(text).replace("formulas", "refused"), scope)
    torch.set_default_dtype(default)
    try:
        return scope["refused"](*args)[0]
    except REFUSED:
        return None
    finally:
        torch.set_default_dtype(torch.float32)


@on_each_device
def test_random_formulas_of_all_dtypes(device):
    """JITKERN_FUZZ_FORMULAS says how many, at least; JITKERN_FUZZ_SEED, from which seed on."""
    seed, formulas = int(os.environ.get("JITKERN_FUZZ_SEED", "0")), 0
    while formulas < MIXED_FORMULAS:
        formulas += check_mixed(seed, device)
        seed += 1
    print(formulas, "formulas", dict(counted))


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


def test_a_constant_outside_of_a_dtype_is_as_in_eager():
    """By its version, PyTorch wraps the constant or holds it within the limits of the dtype."""

    def held(x):
        return torch.clamp(x, -1, 1)

    x = torch.tensor([0, 1, 200], dtype=torch.uint8)
    assert torch.equal(pointwise(held)(x), held(x))
