"""Random expressions, dtypes, shapes, strides and special values, against float64 of Torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from formulas import FLOATS, SPECIAL, named, on_each_device, wrong

from jitkern.composition.expression import CONST, INPUT, inputs_of, ordered
from jitkern.composition.symbol import apply
from jitkern.composition.table import TABLE

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SEVERAL = ("add_scaled", "addcmul", "addcdiv")  # steps, of which `with_errors` knows the result
ROWS = [
    row
    for row in TABLE.values()
    if row.rule in ("same", "float", "where")
    and not row.name.startswith("bitwise")
    and row.name not in SEVERAL
]
CONDITIONS = [TABLE[name] for name in ("lt", "ge", "ne", "isfinite", "logical_and", "logical_not")]
STEPS = 8  # operations of an expression
OUTPUTS = 5  # expressions of a kernel, which share their parts


def settings(examples):
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],  # to shrink one would compile hundreds
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )


@st.composite
def formulas(draw):
    """A function of x, y and z, and of a number, with several outputs."""
    steps = []
    for _ in range(STEPS + OUTPUTS):
        row = draw(st.sampled_from(ROWS))
        condition = draw(st.sampled_from(CONDITIONS))
        operands = [draw(st.integers(0, 3 + len(steps))) for _ in range(5)]
        number = draw(st.sampled_from([None, None, None, 0.5, -1.5, 2]))
        steps.append((row, condition, operands, number))

    def function(x, y, z, a: float):
        values = [x, y, z, a]
        for row, condition, operands, number in steps:
            args = [values[i] for i in operands[: row.arity]]
            if row.rule == "where":
                args[0] = apply(
                    condition.name, *(values[i] for i in operands[3 : 3 + condition.arity])
                )
            if number is not None and row.arity > 1:
                args[-1] = number
            if args[0] is a:  # few functions of Torch take a number first
                args[0] = x
            values.append(apply(row.name, *args))
        # A value that depends on the number alone is refused as a result: it is added to a tensor.
        return tuple(x + v if set(inputs_of(v.node)) <= {3} else v for v in values[-OUTPUTS:])

    return function


@st.composite
def layouts(draw):
    """Shapes that broadcast, and how each tensor lies: its order, gaps and offset."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=4))
    found = []
    for _ in range(3):
        missing = draw(st.sampled_from([0, 0, 0, 1])) * draw(st.integers(0, len(shape) - 1))
        own = [1 if draw(st.integers(0, 5)) == 0 else size for size in shape[missing:]]
        order = draw(st.one_of(st.just(list(range(len(own)))), st.permutations(range(len(own)))))
        found.append(
            (own, order, draw(st.sampled_from([1, 1, 1, 2])), draw(st.sampled_from([0, 0, 1])))
        )
    return found


def laid_out(numbers, layout, dtype, device):
    """Return a tensor of the layout, which takes its numbers from a generator of random ones."""
    shape, order, step, offset = layout
    whole = [shape[d] * step for d in order]
    flat = torch.randn(offset + math.prod(whole), generator=numbers, dtype=torch.float64)
    few = torch.randint(0, 4, flat.shape, generator=numbers) == 0
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    flat = torch.where(
        few, special[torch.randint(0, len(SPECIAL), flat.shape, generator=numbers)], flat
    )
    whole_tensor = flat.to(dtype).to(device)[offset:].view(whole)
    return whole_tensor.permute([order.index(d) for d in range(len(shape))])[
        tuple(slice(None, None, step) for _ in shape)
    ]


def with_errors(outputs, values, eps, least):
    """Return each output in float64, and how far a computation that rounds by eps may be from it.

    Infinite: any result will do. The error of operands counts by what it does to the result; least:
    the smallest normal number, below which numbers lose their relative precision.
    """
    exact, error = {}, {}
    for one in ordered(outputs):
        if one.op in (INPUT, CONST):
            value = values[one.value[0]] if one.op == INPUT else one.value
            exact[one] = torch.as_tensor(value, dtype=torch.float64)
            error[one] = exact[one].abs() * (0 if isinstance(value, torch.Tensor) else eps)
            continue
        row, args, wrongs = (
            TABLE[one.op],
            [exact[a] for a in one.args],
            [error[a] for a in one.args],
        )
        out = exact[one] = row.function(*args)
        found = torch.zeros_like(out, dtype=torch.float64)
        for signs in itertools.product((1, -1), repeat=len(args)):
            ends = [
                (v if v.dtype == torch.bool else v + s * e) for v, s, e in zip(args, signs, wrongs)
            ]
            found = torch.maximum(found, distance(row.function(*ends), out))
        for value, wrong_by in zip(args, wrongs):
            if value.dtype == torch.bool:
                found = torch.where(wrong_by > 0, math.inf, found)
        if row.name in OF_PERIODS:  # the ends say nothing of what lies a period apart
            period = args[1].abs() if row.arity == 2 else math.pi
            found = torch.where(wrongs[0] > period / 8, math.inf, found)
        if out.dtype != torch.bool:
            units = 8 + (2 * args[0].abs().clamp(max=200) if row.name in OF_EXP else 0)
            found = found + out.abs().nan_to_num(0, 0, 0) * units * eps + least
            found = torch.where(out.isfinite() & (out.abs() > 1 / (8 * least)), math.inf, found)
        exact[one], error[one] = out, found
    return [(exact[output], error[output]) for output in outputs]


def distance(one, other):
    """Return how far two results are from each other: NaN is NaN, and an infinity itself."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs().nan_to_num(math.inf, math.inf))


OF_EXP = ("exp", "sigmoid", "softplus", "tanh", "pow")  # whose errors grow with the operand
OF_PERIODS = ("fmod", "remainder", "sin", "cos", "tan")
checked = {"numbers": 0, "passed over": 0}


def check_forward(function, arguments):
    """Whether a function is right, for these arguments: each number that float64 knows well enough."""
    narrow = all(a.dtype != torch.float64 for a in arguments[:3])
    eps, least = (2**-24, 2.0**-126) if narrow else (2**-53, 2.0**-1022)
    wide = [a.cpu().double() if isinstance(a, torch.Tensor) else a for a in arguments]
    results = function(*arguments)
    again = function(*arguments)
    for got, same, (exact, error) in zip(
        results, again, with_errors(function.outputs, wide, eps, least)
    ):
        assert torch.equal(got.nan_to_num(7), same.nan_to_num(7)), "not the same from run to run"
        known = error.isfinite()
        bad = wrong(got.cpu(), exact, error.nan_to_num(0, 0, 0)) & known
        assert got.shape == exact.shape
        assert not bad.any(), (function, got.cpu()[bad][:4], exact[bad][:4], error[bad][:4])
        checked["numbers"] += int(known.sum())
        checked["passed over"] += int((~known).sum())


def check(data, device, gradients):
    function = named("random", data.draw(formulas()))
    layout, seed = data.draw(layouts()), data.draw(st.integers(0, 2**31))
    numbers = torch.Generator().manual_seed(seed)
    for dtypes in data.draw(
        st.lists(st.lists(st.sampled_from(FLOATS), min_size=3, max_size=3), min_size=1, max_size=2)
    ):
        tensors = [laid_out(numbers, one, dtype, device) for one, dtype in zip(layout, dtypes)]
        check_forward(function, (*tensors, data.draw(st.sampled_from([0.75, -2.0, 1e-3]))))
    if gradients:
        check_backward(function, numbers, layout, device)


def check_backward(function, numbers, layout, device):
    """The gradient in float64, against autograd, wherever both are finite."""
    tensors = [laid_out(numbers, one, torch.float64, device) for one in layout]
    found = []
    for call in (function, function.op.run_reference):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        outputs = call(*leaves, 0.75)
        seeds = [torch.full_like(o, 0.5 + i) for i, o in enumerate(outputs)]
        found.append(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True))
    for got, expected in zip(*found):
        if got is None:
            assert expected is None or not expected.nan_to_num(0).any()
            continue
        assert got.shape == expected.shape
        known = got.isfinite() & expected.isfinite() & (expected.abs() < 1e100)
        torch.testing.assert_close(got[known], expected[known], rtol=1e-6, atol=1e-6)


@pytest.mark.long
@on_each_device
@hypothesis.given(data=st.data())
@settings(3)
def test_random_expressions(device, data):
    check(data, device, gradients=False)


@pytest.mark.long
@on_each_device
@hypothesis.given(data=st.data())
@settings(2)
def test_gradients_of_random_expressions(device, data):
    check(data, device, gradients=True)


@pytest.mark.long
@on_each_device
@hypothesis.given(data=st.data())
@settings(60)
def test_many_random_expressions(device, data):
    check(data, device, gradients=True)


def test_few_numbers_were_passed_over():
    """Else the tests above would say little."""
    if checked["numbers"]:
        assert checked["passed over"] < checked["numbers"]
