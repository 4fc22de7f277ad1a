"""Each row of the table of scalar operations: values, special values, derivatives, dtypes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from formulas import FLOATS, SPECIAL, named, on_each_device, wrong
from helpers import H100

from jitkern import jit
from jitkern.composition.derivative import gradients
from jitkern.composition.expression import CALL, INPUT, node, ordered
from jitkern.composition.reference import evaluated
from jitkern.composition.symbol import Element, apply
from jitkern.composition.table import TABLE
from jitkern.launch.call import variant_of
from jitkern.launch.kernels import Kernels
from jitkern.target import Target

OF_INTEGERS = [row for row in TABLE.values() if row.name.startswith("bitwise")]
ROWS = [row for row in TABLE.values() if row not in OF_INTEGERS]
# The sign of zero among equal operands: that of eager differs between vectors and their remainders.
EITHER_ZERO = {
    "maximum",
    "minimum",
    "clamp_min",
    "clamp_max",
    "clamp",
    "relu",
    "where",
    "pow",
}


def operands(row, x, y):
    """Return as many operands as a row takes, of two."""
    if row.name == "add_scaled":
        return x, y, 2
    return (x > 0, x, y) if row.rule == "where" else (x, y, y, 0.5)[: row.arity]


def of_rows(name, rows):
    """Return one pointwise function that has an output for each row."""

    def function(x, y):
        return tuple(apply(row.name, *operands(row, x, y)) for row in rows)

    return named(name, function)


GROUPS = [of_rows(f"rows{i}", ROWS[i::4]) for i in range(4)]
ORDER = [row for i in range(4) for row in ROWS[i::4]]
INTEGERS = [row for row in TABLE.values() if row.rule != "float" and row.name != "signbit"]
INTEGERS.sort(key=lambda row: row.name in ("floor_divide", "remainder", "fmod"))
# The CPU leaves divisions by tensors to Torch, so that they are in a function of their own.
OF_INT = [
    of_rows("integers", INTEGERS[:15]),
    of_rows("more_integers", INTEGERS[15:-3]),
    of_rows("divisions", INTEGERS[-3:]),
]


def expected(row, x, y):
    return row.function(*operands(row, x, y))


def pairs(device, dtype):
    values = torch.tensor(
        list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64, device=device
    )
    return values[:, 0].to(dtype), values[:, 1].to(dtype)


@pytest.mark.long
@on_each_device
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.long) for d in FLOATS[2:]),
    ],
    ids=str,
)
def test_values(device, dtype):
    """Of special values, by twos; against float64 of Torch on the CPU."""
    x, y = pairs(device, dtype)
    found = [result for group in GROUPS for result in group(x, y)]
    wide = x.cpu().double(), y.cpu().double()
    for row, result in zip(ORDER, found):
        exact, got = expected(row, *wide), result.cpu()
        assert got.dtype == (torch.bool if row.rule == "bool" else dtype), row.name
        bad = wrong(got, exact)
        assert not bad.any(), (
            row.name,
            x.cpu()[bad][:5],
            y.cpu()[bad][:5],
            got[bad][:5],
            exact[bad][:5],
        )
        if row.rule != "bool" and row.name not in EITHER_ZERO:
            zero = (exact == 0) & (got == 0)
            assert (got[zero].signbit() == exact[zero].signbit()).all(), row.name


@pytest.mark.long
@on_each_device
def test_values_of_integers(device):
    """Exactly those of Torch, overflows included."""
    for dtype in (torch.int8, torch.int64, torch.uint8):
        x, y = (
            torch.tensor(v, device=device).to(dtype)
            for v in zip(
                *itertools.product([0, 1, -1, 2, -3, 7, -100, 127], [1, -1, -2, 3, -7, 100, 5])
            )
        )
        found = [result for group in OF_INT for result in group(x, y)]
        for row, got in zip(INTEGERS, found):
            keep = y >= 0 if row.name == "pow" else y != 0
            want = expected(row, x[keep], y[keep])
            assert got.dtype == want.dtype, row.name
            assert torch.equal(got[keep], want), (row.name, dtype)


KINKS = [0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan]


def tuples(count):
    """Return `count` tensors, which hold all tuples of values where derivatives have kinks."""
    return [*torch.tensor([*itertools.product(KINKS, repeat=count)], dtype=torch.float64).T]


def computed(output):
    """The expression as kernels compute it, without the functions that PyTorch has as one."""
    new = {}
    for one in ordered([output]):
        args = [new[arg] for arg in one.args]
        new[one] = args[0] if one.op == CALL else node(one.op, *args, value=one.value)
    return new[output]


def assert_as_eager(function, eager, args):
    """Check the value and the gradient of a formula against those of PyTorch, in float64."""
    inputs = [node(INPUT, value=(i, "tensor")) for i in range(len(args) + 1)]
    *operands, seed = inputs
    result = computed(function(*map(Element, operands)).node)
    parts = gradients([result], [seed], range(len(args)))
    leaves = [arg.clone().requires_grad_() for arg in args]
    wanted = eager(*leaves)
    g = torch.full_like(wanted, 2.0)
    values = [*args, g]
    (got,) = evaluated([result], values, torch.float64)
    torch.testing.assert_close(got, wanted.detach(), equal_nan=True)
    wanted_parts = torch.autograd.grad(wanted, leaves, g, allow_unused=True)
    for name, part, want in zip("xyz", parts, wanted_parts):
        assert (part is None) == (want is None), name
        if part is not None:
            (found,) = evaluated([part], values, torch.float64)
            found = torch.as_tensor(found, dtype=torch.float64).expand_as(want)
            torch.testing.assert_close(
                found, want, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("row", [row for row in ROWS if row.gradient], ids=lambda row: row.name)
def test_a_row_is_that_of_eager_at_ties_and_at_special_values(row):
    def all_of(args):
        return (args[0] > 0, *args) if row.rule == "where" else (*args, 0.5)[: row.arity]

    assert_as_eager(
        lambda *args: apply(row.name, *all_of(args)),
        lambda *args: row.function(*all_of(args)),
        tuples(min(row.arity, 3) - (row.rule == "where") - (row.name == "add_scaled")),
    )


OF_ONE = {
    "clamp": lambda x: torch.clamp(x, -1.0, 1.0), "clamp by integers": lambda x: x.clamp(0, 2),
    "clamp by bounds in disorder": lambda x: torch.clamp(x, 1.0, -1.0),
    "clamp from below": lambda x: torch.clamp(x, min=0.0), "clamp_min": lambda x: x.clamp_min(1),
    "clamp from above": lambda x: torch.clamp(x, max=0.0), "clamp_max": lambda x: x.clamp_max(1),
    "relu": F.relu, "leaky_relu": F.leaky_relu,
    "softplus": F.softplus, "logsigmoid": F.logsigmoid, "silu": F.silu, "mish": F.mish, "gelu": F.gelu,
    "softsign": F.softsign, "nan_to_num": lambda x: torch.nan_to_num(x, 0.0, 1.0, -1.0),
    "square": lambda x: x**2, "cube": lambda x: x**3, "root": lambda x: x**0.5, "one": lambda x: x**0,
    "inverse": lambda x: x**-1, "inverse of a square": lambda x: x**-2, "power": lambda x: x**1.5,
    "power of two": lambda x: 2**x, "power of zero": lambda x: 0**x,
}  # fmt: skip
# PyTorch's own gradient at NaN depends on the number of elements.
OF_ONE_THAT_IS_NO_NAN = {
    "relu6": F.relu6, "hardtanh": F.hardtanh, "hardtanh by others": lambda x: F.hardtanh(x, 0.0, 2.0),
    "elu": F.elu, "hardsigmoid": lambda x: F.hardsigmoid(3 * x), "hardswish": lambda x: F.hardswish(3 * x),
}  # fmt: skip
OF_TWO = {
    "clamp from below": lambda x, low: torch.clamp(x, min=low),
    "clamp from above": lambda x, high: torch.clamp(x, max=high),
    "clamp by what was computed": lambda x, y: torch.clamp(x, y * 1, y + 1),
    "floor of a quotient": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}


@pytest.mark.parametrize(
    ("function", "args"),
    [
        *((function, tuples(1)) for function in OF_ONE.values()),
        *((function, [tuples(1)[0][:-1]]) for function in OF_ONE_THAT_IS_NO_NAN.values()),
        *((function, tuples(2)) for function in OF_TWO.values()),
    ],
    ids=[*OF_ONE, *OF_ONE_THAT_IS_NO_NAN, *OF_TWO],
)
def test_a_function_is_that_of_eager_at_special_values(function, args):
    """Bounds that are numbers among them: PyTorch shares a tie with a tensor alone."""
    assert_as_eager(function, function, args)


@pytest.mark.parametrize("name", [*OF_ONE, *OF_ONE_THAT_IS_NO_NAN])
def test_in_torch_is_the_function_itself(name):
    function = {**OF_ONE, **OF_ONE_THAT_IS_NO_NAN}[name]
    ours = named("itself", lambda x: function(x))  # noqa: PLW0108  it gets a name
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(-3, 3, 50).to(dtype)
        got, want = ours.in_torch(x), function(x)
        assert got.dtype == want.dtype and torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.long
def test_compiled_functions_are_those_that_are_called():
    every = [*OF_ONE.values(), *OF_ONE_THAT_IS_NO_NAN.values()]
    function = named("each", lambda x: tuple(f(x) for f in every))
    compiled = torch.compile(lambda x: function(x), fullgraph=True, backend="aot_eager")  # noqa: PLW0108
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(-3, 3, 50).to(dtype)
        torch.testing.assert_close(compiled(x), function(x), equal_nan=True)


@pytest.mark.long
def test_a_remainder_has_the_quotient_as_its_derivative():
    """1 % 0.1 leaves almost 0.1, of nine times 0.1, although 1 / 0.1 is 10."""
    x = torch.tensor([1.0, 5.3, -7.0], dtype=torch.float64)
    y = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(named("rest", lambda x, y: x % y)(x, y).sum(), y)
    assert torch.equal(got, torch.autograd.grad((x % y).sum(), y)[0])


@pytest.mark.long
def test_the_derivative_of_an_angle_at_the_origin_is_zero():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2)
    named("angle", lambda x, y: torch.atan2(x, y) * 2)(x, y).sum().backward()
    assert x.grad.tolist() == [0, 0]


def test_a_zeroth_power_has_no_derivative_of_any_order():
    """A division by zero makes the derivative that reaches the power infinite."""

    def function(x, y, n: int):
        return torch.pow(x, n) / y + x * x * x

    ours, x = named("zeroth", function), torch.tensor([-1.25, 0.0, 2.0], requires_grad=True)
    for found in (ours, function):
        (first,) = torch.autograd.grad(found(x, torch.zeros(3), 0).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(first, 3 * x * x) and torch.equal(second, 6 * x)


def test_rows_without_a_derivative_have_none():
    without = {row.name for row in TABLE.values() if not row.gradient}
    of_conditions = {row.name for row in TABLE.values() if row.rule == "bool"}
    assert without == of_conditions | {row.name for row in OF_INTEGERS}


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.float16]
)
def test_every_row_compiles_for_a_gpu(dtype):
    target = Target.parse(H100)
    x = torch.empty(4096, dtype=dtype, device="meta")
    for group in GROUPS:
        assert jit.ensure(variant_for(group, x, x), target)


def variant_for(function, *args):
    """Return the variant that a call launches on a GPU."""
    source, found = function.op.sources["cuda"][0], []
    kernels = Kernels(lambda call: found.append(variant_of(function.op.name, source, call)[0]))
    function.op.launch_function(source, "cuda")(kernels, *args)
    return found[0]


OF_CLASSES = [
    ((torch.float32, 1), (torch.bfloat16, 1)), ((torch.bfloat16, 1), (torch.float64, 0)),
    ((torch.float16, 0), (torch.bfloat16, 0)), ((torch.float64, 1), (torch.int32, 1)),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("classes", OF_CLASSES, ids=str)
def test_gradients_have_the_dtypes_of_those_of_torch(classes):
    """The function of the gradients is called itself: autograd converts a gradient of another dtype."""
    rows = [row for row in ROWS if row.gradient and row.name != "addcdiv"]  # refused for integers
    function = of_rows("differentiated", rows)
    x, y = (torch.full((3,) * dims, 0.5).to(dtype) for dtype, dims in classes)
    leaves = [t.requires_grad_() for t in (x, y) if t.is_floating_point()]
    eager = [expected(row, x, y) for row in rows]
    wanted = torch.autograd.grad(sum(o.sum() for o in eager if o.requires_grad), leaves)
    assert [o.requires_grad for o in function(x, y)] == [o.requires_grad for o in eager]
    gradient = function.grad(wrt=["x", "y"][: len(leaves)])
    known = {f"d_{name}": torch.ones_like(o) for name, o in zip(function.result_names, eager)}
    known |= {"x": x.detach(), "y": y.detach()}
    found = gradient(*(known[parameter.name] for parameter in gradient.parameters))
    found = found if isinstance(found, tuple) else (found,)
    assert [g.dtype for g in found] == [g.dtype for g in wanted]
