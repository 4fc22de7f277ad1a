"""Random formulas of integers, bools, numbers and layouts, whose results are those of eager PyTorch.

They are equal to the bit: integers and bools are exact, and so is what is made of two of these by
one division or product. Every function is a cell that runs again: it replaces one of its name.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import textwrap
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from formulas import on_each_device

import jitkern
from jitkern import pointwise

WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMBERS = ["0", "1", "2", "3", "7", "100", "0.1", "0.3", "0.5", "-1.5", "2.0"]
CASTS = ["int", "long", "short", "char", "byte", "bool"]
SHAPE = (5, 13)
PER_FUNCTION = 20
PARTS, FUNCTIONS = 50, 20  # of the long test: 20,000 formulas
NAMES = "xyzanf"
scope = {"torch": torch, "F": F, "pointwise": pointwise, "__name__": "fuzzed"}


def cell(name, texts):
    """Return the text of a function of these formulas."""
    parameters = "x, y, z, a: float, n: int, f: bool"
    return f"@pointwise\ndef {name}({parameters}):\n    return {', '.join(texts)}\n"


def defined(name, texts):
    """Run the cell of a function, which replaces one of its name, and return what calls it."""
    exec(cell(name, texts), scope)
    return called(name)


def called(name):
    """Return a function that calls the one of a cell, and returns a tuple, also of one result."""
    function = scope[name]

    def call(*args):
        results = function(*args)
        return results if isinstance(results, tuple) else (results,)

    return call


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
            found = eval(text, {"torch": torch}, dict(zip(NAMES, args)))
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
    args += [draw.choice([0.7, 0.1, 2.5]), draw.choice([3, 5, 100]), draw.random() < 0.5]
    writer, wanted = Writer(draw), {}
    while len(wanted) < PER_FUNCTION:
        text = writer.formula()
        found = evaluated(text, args)
        if found is not None:
            wanted[text] = found
    results = defined("formulas", wanted)(*args)
    wrong = []
    for (text, want), got in zip(wanted.items(), results):
        if got.dtype != want.dtype or got.shape != want.shape:
            wrong.append(f"{text}: {got.dtype} {got.shape}, not {want.dtype} {want.shape}")
            continue
        bad = ~((got == want) | ((got != got) & (want != want)))
        if bad.any():
            wrong.append(f"{text}: {got[bad][:3].tolist()}, not {want[bad][:3].tolist()}")
    assert not wrong, f"seed {seed}, {about(args)}\n" + "\n".join(wrong)
    return len(wanted)


def about(args):
    """Return the dtypes, shapes and strides of arguments, for a message."""
    return [
        f"{a.dtype}{[*a.shape]}{a.stride()}" if isinstance(a, torch.Tensor) else a for a in args
    ]


# ------------------------------------------------------------------ floating-point numbers too

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]  # for which PyTorch refuses most
DEFAULTS = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
OF_ONE = [
    "F.silu", "F.gelu", "F.softplus", "F.logsigmoid", "F.mish", "F.elu", "F.leaky_relu", "F.hardtanh", "F.relu6", "F.hardsigmoid",
    "F.hardswish", "F.softsign", "F.relu", "torch.sigmoid", "torch.tanh", "torch.abs", "torch.neg", "torch.square", "torch.sin",
    "torch.erf", "torch.atan", "torch.exp2", "torch.isnan", "torch.isfinite", "torch.logical_not", "torch.bitwise_not",
    "torch.relu", "torch.exp", "torch.expm1", "torch.log", "torch.log2", "torch.log10", "torch.sqrt", "torch.reciprocal", "torch.cos",
    "torch.asin", "torch.acos", "torch.sinh", "torch.cosh", "torch.erfc", "torch.sgn", "torch.isinf",
]  # fmt: skip
OF_A_LEAF = ["torch.floor({})", "torch.signbit({})", "torch.tan({})", "torch.round({})", "torch.sign({})", "({}).int()", "({}).bool()", "({}).long()", "({}).char()",
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
    "torch.where(x > 0, {}, 300)", "torch.where(x > 0, {}, 0.5)", "torch.where(x > 0, a, {})", "({} > n)", "({} <= 0.5)", "({} ** n)", "({} * f)", "({} | f)", "({} // n)", "({} % a)", "(a / {})",
    "torch.add(x, {}, alpha=a)", "torch.add(x, {}, alpha=n)", "torch.addcmul(x, {}, z, value=n)", "torch.lerp(x, {}, a)",
    "F.leaky_relu({}, a)", "F.hardtanh({}, -1, n)", "torch.clamp({}, -n, a)"]  # fmt: skip
CLOSE = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 2**-12, torch.float64: 2**-12}
REFUSED = (RuntimeError, ZeroDivisionError)
MIXED_FORMULAS = int(os.environ.get("JITKERN_FUZZ_FORMULAS", "200"))
FIRST_SEED = int(os.environ.get("JITKERN_FUZZ_SEED", "0"))
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


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def asked(text, args, default):
    """Return what eager PyTorch computes, its refusal, or None where it takes no such arguments."""
    try:
        with default_dtype(default), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = eval(text, {"torch": torch, "F": F}, dict(zip(NAMES, args)))
    except REFUSED as e:
        return e
    except (
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
    ):  # of numbers alone, or for tensors
        return None
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
    leaves = [
        a.detach().clone().requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    with default_dtype(default):
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
    return [None if g is None else g.detach() for g in found]


def check_gradients(texts, args, default, kept, *, twice):
    source = f"lambda x, y, z, a, n, f: ({', '.join(texts)},)"
    eager = eval(source, {"torch": torch, "F": F})
    ours = defined("mixed", texts)
    wrong = []
    try:
        want = gradients_of(eager, in_float64(args), torch.float64, twice=twice)
        moved = gradients_of(eager, in_float64(args, 2**-18), torch.float64, twice=twice)
    except RuntimeError:  # no derivative, or none of these dtypes
        return []
    got = gradients_of(ours, args, default, twice=twice)
    kept.append((cell("mixed", texts), args, default, [twice], got))
    counted["with gradients"] += len(texts)
    counted["with double gradients"] += len(texts) * twice
    own = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for number, (g, w, m) in enumerate(zip(got, want, moved)):
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


def check_mixed(seed, device, kept, number=PER_FUNCTION):
    """Compare functions of formulas with eager PyTorch; return how many formulas there were.

    kept: gets the functions that were called, see `run_again`.
    """
    draw = random.Random(seed)
    default = draw.choice(DEFAULTS)
    dtypes = WHOLE + FLOATS * 2 + UNSIGNED * (draw.random() < 0.1)
    args = [mixed_tensor(draw, draw.choice(dtypes), device) for _ in range(3)]
    if draw.random() < 0.1:
        args = [a[(0,) * a.dim()].clone() for a in args]  # without dimensions, all of them
    if draw.random() < 0.2:
        args[1] = draw.choice([2, 3, 0.5, True])
    args.append(draw.choice([0.5, -1.25, 2.5, 0.0, 1e4, math.inf]))
    args.append(draw.choice([3, 5, 100, 300, 0, -1, -7, 2**31, 2**40]))
    args.append(draw.random() < 0.5)
    writer, wanted, wrong, count = Mixed(draw), {}, [], 0
    for _ in range(50 * number):
        if len(wanted) == number:
            break
        text = writer.formula()
        large = args[4] > 5 and ("** n" in text or "pow(" in text)  # overflows float32
        large |= args[4] > 300 and bool(re.search(r"[%/]|mod|sin|cos|tan", text))
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
    if wanted:
        source = cell("mixed", wanted)
        with default_dtype(default):
            results = defined("mixed", wanted)(*args)
        kept.append((source, args, default, [], [r.detach() for r in results]))
        pairs = zip(wanted.items(), results)
        wrong += filter(None, [not_as(want, got, text, args) for (text, want), got in pairs])
        if draw.random() < 0.3 and math.isfinite(args[3]):
            # At NaN derivatives are of any value, also those of PyTorch.
            known = [t for t, w in wanted.items() if w.is_floating_point() and not w.isnan().any()]
            floats = known[:8] or ["x"]
            twice = torch.float16 not in [a.dtype for a in args[:3] if isinstance(a, torch.Tensor)]
            found = check_gradients(floats, args, default, kept, twice=twice)
            wrong += [f"{floats}: {w}" for w in found]
        run_again(kept[-2:])  # after others of the name
    assert not wrong, f"seed {seed}, default {default}, {about(args)}\n" + "\n".join(wrong)
    return count


def run_again(kept):
    """Run functions again, of which nothing is compiled; their results are equal to the bit.

    kept: for each function its cell, its arguments, the default dtype, for its gradients whether
    they are differentiated twice, and its results.
    """
    before = jitkern.stats()["compiles"]
    for source, args, default, gradients, results in kept:
        exec(source, scope)
        if gradients:
            again = gradients_of(called("mixed"), args, default, twice=gradients[0])
        else:
            with default_dtype(default):
                again = called("mixed")(*args)
        for want, got in zip(results, again):
            if want is None or got is None:
                assert want is got, source
                continue
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            bits = [t.flatten().view(torch.uint8) for t in (got, want)]
            assert torch.equal(*bits), f"{source}{about(args)}: {got}, not {want}"
    assert jitkern.stats()["compiles"] == before


def accepts(text, args, default):
    """Return the result of a formula that eager refuses, if ours does not."""
    function = defined("refused", [text])
    try:
        with default_dtype(default):
            return function(*args)[0]
    except REFUSED:
        return None


@on_each_device
def test_random_formulas_of_all_dtypes(device, run_python, tmp_path):
    """JITKERN_FUZZ_FORMULAS says how many, at least; JITKERN_FUZZ_SEED, from which seed on."""
    seed, formulas, kept = FIRST_SEED, 0, []
    while formulas < MIXED_FORMULAS:
        formulas += check_mixed(seed, device, kept)
        seed += 1
    print(formulas, "formulas", dict(counted))
    torch.save(kept, tmp_path / "kept")
    script = f"""
        import sys
        sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}
        import torch, test_against_eager
        test_against_eager.run_again(torch.load({str(tmp_path / "kept")!r}, weights_only=False))
    """
    done = run_python(textwrap.dedent(script), JITKERN_COMPILE="never")
    assert done.returncode == 0, done.stderr


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
