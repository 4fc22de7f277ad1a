"""`jitkern.pointwise`: one formula, one kernel; Torch's dtypes, shapes and strides; gradients."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import H100, constant_sizes, needs_nvrtc, served, symbolic_sizes
from test_table import variant_for

import jitkern
from jitkern import compose, jit, pointwise
from jitkern.errors import DeclarationError, LaunchError
from jitkern.runtime import binding
from jitkern.target import Target

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


@pointwise
def geglu(gate, up):
    """The gated linear unit with GELU."""
    return F.gelu(gate) * up


@pointwise
def square(x):
    return x * x


@pointwise
def bias(x, b):
    return x + b


@pointwise
def mixed(x, y, alpha: float = 2.0, n: int = 3, flip: bool = False):
    return torch.where(flip, x * alpha + n, y - alpha), x < y


@pointwise
def promoting(x, y):
    return x + y, x < y


double_square = square >> square
biased_square = square >> bias


def randn(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=torch.float64).to(dtype)


@pytest.mark.long
@on_each_device
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_rounds_once(device, dtype):
    gate, up = randn(33, 70, device=device, dtype=dtype), randn(33, 70, device=device, dtype=dtype)
    exact = F.gelu(gate.double()) * up.double()
    got = geglu(gate, up)
    assert got.dtype == dtype
    bound = {
        torch.bfloat16: 2**-8,
        torch.float16: 2**-11 * 1.05,
        torch.float32: 2**-21,
        torch.float64: 1e-14,
    }[dtype]
    assert (
        (got.double() - exact).abs() <= bound * exact.abs() + 1e-6 * (bound > 1e-10) + 1e-15
    ).all()


SHAPES = [
    lambda t: (t(6, 8), t(6, 8)),
    lambda t: (t(6, 8), t(8)),
    lambda t: (t(6, 8), t(6, 1)),
    lambda t: (t(6, 1), t(1, 8)),
    lambda t: (t(6, 8), t()),
    lambda t: (t(), t()),
    lambda t: (t(0, 8), t(1, 8)),
    lambda t: (t(8, 6).T, t(8, 6).T),
    lambda t: (t(8, 6).T, t(6, 8)),
    lambda t: (t(6, 8), t(8, 6).T),
    lambda t: (t(2, 8, 3, 5).to(memory_format=torch.channels_last),) * 2,
    lambda t: (t(2, 8, 3, 5).to(memory_format=torch.channels_last), t(8, 1, 1)),
    lambda t: (t(4, 3, 5).permute(2, 0, 1), t(4, 3, 5).permute(2, 0, 1)),
    lambda t: (t(4, 3, 5).permute(2, 0, 1), t(5, 1, 3)),
    lambda t: (t(12, 16)[::2, ::2], t(6, 8)),
    lambda t: (t(100)[1:], t(99)),
    lambda t: (t(1).expand(6, 8), t(6, 8)),
    lambda t: (t(2, 3, 2, 3, 2, 2, 2).permute(6, 4, 2, 0, 5, 3, 1), t(2, 2, 3)[:, None, :, None, :, None]),
    lambda t: (t(3, 1, 4), t(2, 1, 5, 1)),
]  # fmt: skip


@pytest.mark.long
@on_each_device
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_shapes_and_strides_are_those_of_torch(device, case):
    x, b = SHAPES[case](lambda *shape: randn(*shape, device=device))
    got, expected = bias(x, b), x + b
    assert torch.equal(got, expected)
    assert got.shape == expected.shape
    dims = [i for i, size in enumerate(got.shape) if size > 1]
    assert [got.stride(i) for i in dims] == [expected.stride(i) for i in dims]


@pytest.mark.long
def test_no_size_becomes_a_constant_that_is_none_in_torch():
    """Nor is a walk over the elements, of which the results do not depend, a reason for guards."""
    for case in (SHAPES[0], SHAPES[2], SHAPES[8]):
        args = case(randn)
        own, torchs = (symbolic_sizes(f, args) for f in (bias.op.overload, torch.add))
        assert constant_sizes(own) <= constant_sizes(torchs)
        assert len(own.guards) <= len(torchs.guards)


@pytest.mark.long
def test_exports_with_dynamic_dimensions():
    class Module(torch.nn.Module):
        def forward(self, x, y, z):
            return promoting(x, y), biased_square(x, z)

    rows = torch.export.Dim("rows", max=1 << 20)
    program = torch.export.export(
        Module(), (randn(4, 6), randn(4, 6), randn(6)), dynamic_shapes=({0: rows}, {0: rows}, None)
    )
    args = randn(9, 6), randn(9, 6), randn(6)
    torch.testing.assert_close(program.module()(*args), Module()(*args))


def test_shapes_that_do_not_broadcast_are_refused():
    with pytest.raises(RuntimeError, match=r"bias.*\[6, 8\], \[7\] do not broadcast"):
        bias(randn(6, 8), randn(7))


@pytest.mark.long
@on_each_device
def test_numbers_are_arguments_of_one_kernel(device):
    x, y = randn(100, device=device), randn(100, device=device)
    for alpha, n, flip in ((2.0, 3, False), (0.1, 5, True), (math.inf, -1, True)):
        got = mixed(x, y, alpha, n=n, flip=flip)
        torch.testing.assert_close(got[0], x * alpha + n if flip else y - alpha, equal_nan=True)
    before = jitkern.stats()["compiles"]
    mixed(x, y, 7.0, 9, True)
    mixed(x, y)
    assert jitkern.stats()["compiles"] == before


@pytest.mark.long
@on_each_device
def test_a_number_in_place_of_a_tensor(device):
    x = randn(100, device=device, dtype=torch.bfloat16)
    assert torch.equal(bias(x, 2.0), x + 2.0)
    assert torch.equal(bias(x, b=0.1), (x.float() + 0.1).to(x.dtype))  # rounded once
    assert torch.equal(bias(torch.arange(5, device=device), 2), torch.arange(5, device=device) + 2)
    assert bias(torch.arange(5), 2.5).dtype == torch.float32
    with pytest.raises(TypeError, match="numbers alone"):
        bias(1, 2)


@pointwise
def of_numbers(x, alpha: float, n: int):
    return x * (alpha * 2), x + 1 / alpha, x * (alpha + n), x + n * 2


@pytest.mark.long
@on_each_device
def test_numbers_computed_from_numbers_are_numbers(device):
    """They decide no dtype, even of tensors without dimensions, and are exact in float64."""
    compiled = torch.compile(of_numbers, backend="aot_eager", fullgraph=True)
    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        for x in (torch.tensor(3), torch.tensor([3, 4])):
            x = x.to(device, dtype)  # noqa: PLW2901
            expected = of_numbers.function(x, 0.1, 3)
            for results in (of_numbers(x, 0.1, 3), compiled(x, 0.1, 3)):
                for got, want in zip(results, expected):
                    torch.testing.assert_close(got, want)
                    assert dtype != torch.float64 or (got - want).abs().max() < 1e-14


@pointwise
def of_defaults(x, alpha: float = 1.0, n: int = 2):
    return x * (alpha + n)


@pytest.mark.long
def test_numbers_by_name_compile_under_dynamic_shapes():
    def step(x, alpha):
        return of_defaults(x, n=3, alpha=alpha)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for size, alpha in ((2, 0.5), (3, 1.5)):
        x = torch.ones(size)
        torch.testing.assert_close(compiled(x, alpha), x * (alpha + 3))


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_number_in_place_of_a_tensor_compiles_to_one_graph(dynamic):
    """Also one that no call before had there, whose function is made while Dynamo looks."""
    fresh = pointwise(lambda x, y, z: x * y + z)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, n: fresh(x, n, x.shape[0] / 2), fullgraph=True, dynamic=dynamic,
        backend="aot_eager",
    )  # fmt: skip
    for size, n in ((3, 2), (4, 5), (5, 0.5)):
        x = randn(size)
        torch.testing.assert_close(compiled(x, n), x * n + size / 2)


@pytest.mark.long
@on_each_device
def test_the_gradient_takes_numbers(device):
    d_out, y = randn(5, device=device), randn(5, device=device)
    assert geglu.grad(wrt="up")(d_out, 1.0).dtype == torch.float32
    torch.testing.assert_close(
        geglu.grad(wrt="gate")(d_out, 1.0, y), geglu.grad(wrt="gate")(d_out, torch.ones_like(y), y)
    )


@on_each_device
def test_composition_is_one_kernel(device):
    x, b = randn(100, device=device), randn(100, device=device)
    torch.testing.assert_close(double_square(x), x**4)
    torch.testing.assert_close(biased_square(x, b), x * x + b)
    torch.testing.assert_close(compose(square, bias, square)(x, b), (x * x + b) ** 2)
    twice = bias >> bias
    assert [p.name for p in twice.parameters] == ["x", "b", "b_1"]
    assert compose(square, square).identity == double_square.identity
    with pytest.raises(TypeError, match="mixed gives 2 values, and square takes"):
        mixed >> square
    with pytest.raises(TypeError, match="takes pointwise functions"):
        compose(square, torch.exp)


@pytest.mark.long
@on_each_device
def test_gradients(device):
    x = randn(5, 7, device=device, dtype=torch.float64).requires_grad_()
    b = randn(7, device=device, dtype=torch.float64).requires_grad_()
    for function in (geglu, biased_square):
        assert torch.autograd.gradcheck(function, (x, b))
        assert torch.autograd.gradgradcheck(function, (x, b))
        assert torch.autograd.gradcheck(function, (x.detach(), b))
    torch.library.opcheck(geglu.op.overload, (x, b))
    y = geglu(x.detach(), b)
    (only,) = torch.autograd.grad(y.sum(), [b])
    torch.testing.assert_close(only, F.gelu(x).sum(0))


FLAT = {
    "zero everywhere": lambda x, y: torch.round(x) * torch.sign(y) + torch.div(
        x, y, rounding_mode="floor"),
    "zero beside others": lambda x, y: (x + torch.floor(x)) * torch.exp(torch.ceil(y)),
    "the constant 0": lambda x, y: x**0 + torch.clamp(y, 5.0, 6.0) + torch.trunc(x) * 0,
    "none: a condition": lambda x, y: torch.where(x > y, 1.0, 2.0) + (x < 0).float(),
    "none: integers": lambda x, y: x.to(torch.int32) * 1.5,
    "an input that is not used": lambda x, y: torch.round(x),
    "outputs of each kind": lambda x, y: ((x > y) * 1.0, torch.round(y), x * y),
    "outputs of two shapes": lambda x, y: (torch.floor(x) * y, torch.sign(x), x > 0),
    "one output of several": lambda x, y: (x > y, x * y, torch.isnan(y) * 0.5),
}  # fmt: skip


def pulled_back(function, *values):
    """Outputs require a gradient where eager ones do, and the gradients are equal."""
    leaves = [value.clone().requires_grad_() for value in values]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    known = [(i + 2) * out.sum() for i, out in enumerate(outs) if out.requires_grad]
    grads = torch.autograd.grad(sum(known), leaves, allow_unused=True) if known else ()
    return [out.requires_grad for out in outs], [g if g is None else g.tolist() for g in grads]


@pytest.mark.long
@on_each_device
@pytest.mark.parametrize("name", FLAT)
def test_a_derivative_that_is_zero_or_none_is_so_in_torch(device, name):
    x = torch.tensor([0.3, -1.7, 2.5], device=device)
    y = torch.tensor([[0.5], [-2.0]], device=device)
    function = pointwise(FLAT[name])
    assert pulled_back(function, x, y) == pulled_back(FLAT[name], x, y)


@pytest.mark.long
def test_a_derivative_of_zero_is_differentiated_again():
    x, y = (randn(5, dtype=torch.float64).requires_grad_() for _ in range(2))
    flat = pointwise(lambda x, y: torch.floor(x) * y + torch.abs(y))
    assert torch.autograd.gradcheck(flat, (x, y))
    assert torch.autograd.gradgradcheck(flat, (x, y))
    with pytest.raises(ValueError, match="no derivative but zero by x"):
        flat.grad(wrt="x")
    composed = flat >> pointwise(lambda x: torch.sign(x) + 1)
    assert torch.autograd.grad(composed(x, y).sum(), x)[0].tolist() == [0.0] * 5


def bias_(bias, grad, out, needs, k, größe):  # noqa: PLC2401  any name
    return bias * grad + out * k, needs * größe


@pytest.mark.long
def test_any_name_will_do():
    """Also those that a backward gives to gradients and results, and that of the function."""
    inputs = [randn(4, dtype=torch.float64).requires_grad_() for _ in range(6)]
    for name in ("bias", "größe"):
        bias_.__name__ = name
        function = pointwise(bias_)
        assert torch.autograd.gradcheck(function, inputs)
        keywords = dict(zip(("bias", "grad", "out", "needs", "k", "größe"), inputs))
        torch.testing.assert_close(function(**keywords), bias_(**keywords))
    out = pointwise(lambda out, grad: out * grad)
    assert torch.autograd.gradcheck(out >> out, inputs[:3])


ODD = [
    "int", "NULL", "linux", "unix", "INFINITY", "threadIdx", "min", "self", "NoneType", "M_PI", "x", "x_s", "V",
    "P0", "read", "out0", "in0_x", "_", "__x", "größe",
]  # fmt: skip


@pytest.mark.parametrize("name", ["linux", "größe"])
def test_names_of_keywords_and_macros_will_do(name):
    scope = {"__name__": __name__}
    exec(f"def {name}({', '.join(ODD)}):\n    return {' + '.join(ODD)}", scope)
    function = pointwise(scope[name])
    inputs = {word: torch.full((3,), float(i), requires_grad=True) for i, word in enumerate(ODD)}
    assert torch.equal(function(**inputs), scope[name](**inputs))
    if torch.cuda.is_available():
        inputs = {word: value.cuda() for word, value in inputs.items()}
        assert torch.equal(function(**inputs), scope[name](**inputs))


@pytest.mark.long
@needs_nvrtc
def test_names_of_keywords_and_macros_compile_for_a_gpu():
    scope = {"__name__": __name__}
    exec(f"def unix({', '.join(ODD)}):\n    return {' + '.join(ODD)}", scope)
    function, args = pointwise(scope["unix"]), [torch.empty(8, device="meta") for _ in ODD]
    assert jit.ensure(variant_for(function, *args), Target.parse(H100))


@pytest.mark.long
def test_numbers_of_numpy_are_those_of_python():
    two, three = np.float32(2), np.int64(3)

    @pointwise
    def of_numpy(x, alpha: float = np.float64(0.5), n=three, flip: bool = np.bool_(False)):
        return torch.where(flip, x, two * x + alpha * n - np.uint8(1))

    x = torch.arange(3.0)
    assert of_numpy(x).tolist() == [0.5, 2.5, 4.5]
    assert of_numpy(x, np.float16(2), n=np.int32(1)).tolist() == [1, 3, 5]
    assert of_numpy(x, 0, 0, np.bool_(True)).tolist() == x.tolist()
    for other in (np.float32(0.5), np.int8(3), np.bool_(True)):
        for tensor in (x, torch.arange(3)):
            got, want = promoting(tensor, other)[0], tensor + other
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    with pytest.raises(TypeError, match="got complex"):
        pointwise(lambda x: x * np.complex64(1))


@pytest.mark.long
def test_defaults_that_a_schema_has_not():
    @pointwise
    def limited(x, high: float = math.inf, low: float = -math.inf, by: float = 2):
        return torch.clamp(x, low, high) * by

    x = torch.tensor([1.0, -2.0, 3.0])
    assert limited(x).tolist() == [2, -4, 6]
    assert limited(x, 2.0).tolist() == [2, -4, 4]
    assert limited(x, by=1, low=0.0).tolist() == [1, 0, 3]
    assert pointwise(lambda x, a=math.nan: x + a)(x).isnan().all()
    with pytest.raises(TypeError, match="misses the argument `x`"):
        limited()
    compiled = torch.compile(limited, fullgraph=True, backend="aot_eager")
    assert compiled(x).tolist() == [2, -4, 6]


def test_a_default_of_another_kind_than_its_annotation():
    def whole(x, n: int = 2.0, flip: bool = 1):
        return torch.where(flip, x * n, x)

    assert [p.default for p in pointwise(whole).parameters[1:]] == [2, True]
    for kind, default in ((int, 2.5), (bool, 2), (int, math.inf), (int, math.nan)):
        whole.__defaults__, whole.__annotations__["n"] = (default, True), kind
        with pytest.raises(
            DeclarationError, match=f"annotated {kind.__name__} and has the default"
        ):
            pointwise(whole)


def test_none_for_a_tensor_is_refused_without_word_of_a_schema():
    with pytest.raises(LaunchError, match="argument `y`, and got None; pass a tensor$"):
        pointwise(lambda x, y: x + y)(torch.ones(2), None)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_of_one_is_refused(kind):
    """A call would return a tensor, and the function as it is written does not."""
    with pytest.raises(DeclarationError, match=f"no {kind.__name__} of one: return the value"):
        pointwise(lambda x: kind([x * 2]))


def test_a_function_that_returns_nothing_is_refused():
    for function in (lambda x: None, lambda x: (), lambda x: (x, None)):
        with pytest.raises(DeclarationError, match="returns values that depend .* got None"):
            pointwise(function)


REFUSED = [
    ("where", lambda x: torch.where(x > 0, x, 300), "overflow"),
    ("clamp_min", lambda x: torch.clamp(x, min=300), "overflow|outside the representable range"),
    (
        "clamp_max",
        lambda x: torch.clamp(x, max=-(2**40)),
        "overflow|outside the representable range",
    ),
    ("clamp", lambda x: torch.clamp(x, 300, 400), "overflow|outside the representable range"),
    ("alpha", lambda x: torch.add(x, x, alpha=300), "overflow"),
    ("zero", lambda x: x // 0, "ZeroDivision"),
    ("zeros", lambda x: x // (x - x), "ZeroDivision"),
    ("rest of zeros", lambda x: x % (x - 1), "ZeroDivision"),
    ("fmod", lambda x: torch.fmod(x, x - x), "ZeroDivision"),
    ("power -1", lambda x: x**-1, "negative integer powers"),
    ("power -2", lambda x: x**-2, "negative integer powers"),
    ("power -3", lambda x: x**-3, "negative integer powers"),
]


@pytest.mark.parametrize(("name", "formula", "error"), REFUSED, ids=lambda v: str(v)[:12])
def test_integers_that_torch_refuses(name, formula, error):
    x = torch.tensor([1, -1], dtype=torch.int8)
    function = pointwise(formula)
    for call in (formula, function):
        with pytest.raises(RuntimeError, match=error):
            call(x)
    if "zero" not in error.lower():
        return
    assert function(x[:0]).numel() == 0


@pytest.mark.long
def test_integers_that_torch_takes():
    """Numbers that fit, arguments among them; and zeros that no element is divided by."""
    x = torch.tensor([1, -1], dtype=torch.int8)

    @pointwise
    def of(x, y, n: int):
        return torch.clamp(x, max=n), x // n, x % y, torch.where(x > 0, x, -128)

    for result, want in zip(of(x, x * 3, 5), (x.clamp(max=5), x // 5, x % (3 * x), x), strict=True):
        assert result.dtype == x.dtype
        assert torch.equal(result, want if want is not x else torch.where(x > 0, x, -128))
    limited = pointwise(lambda x, n=3: torch.clamp(x, max=n) // n)
    assert torch.equal(served(limited.op, x, 5), x.clamp(max=5) // 5)
    with pytest.raises(RuntimeError, match="overflow"):
        limited(x, 300)
    with pytest.raises(RuntimeError, match="overflow"):
        of(x, x, 300)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        of(x, x, 0)
    assert of(x.float(), x, 0)[1].isinf().all()
    with pytest.raises(RuntimeError, match="overflow"):
        pointwise(lambda x: torch.clamp(x, min=1e30))(x.half())
    assert pointwise(lambda x: torch.clamp(x, max=math.inf))(x.half()).tolist() == [1, -1]
    got = pointwise(lambda x: x**-1)(torch.tensor([2.0], dtype=torch.bfloat16))
    assert got.dtype == torch.bfloat16 and got.item() == 0.5


def test_no_output_is_left_unwritten():
    """An output with elements, beside one without."""
    function = pointwise(lambda x, y: (x * y, x + 1))
    assert [r.numel() for r in function(torch.ones(0, 1), torch.ones(0, 3))] == [0, 0]
    with pytest.raises(RuntimeError, match="a tensor without elements"):
        function(torch.ones(1), torch.ones(2, 0))


@pytest.mark.long
@on_each_device
def test_an_output_that_nothing_needs_has_no_gradient(device):
    """Zero times its derivative may be NaN."""
    function = pointwise(lambda x, y: (torch.log(x), x * 2, x * y))
    x, y = torch.zeros(3, device=device, requires_grad=True), torch.ones(3, device=device)
    function(x, y)[1].sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    same = pointwise(lambda x: (torch.log(x), x * 2))
    assert torch.autograd.grad(same(x)[1].sum(), x)[0].tolist() == [2, 2, 2]


def test_the_derivative_of_what_becomes_an_integer_is_none():
    function = pointwise(
        lambda x, y: x * (x * 7).to(torch.int32) + (x.long() > y.half()) * y.bool()
    )
    assert function.grad().formulas() == ["d_out * to((x * 7), i32)"]


@pointwise
def apart(x, b):
    return x * b, b * b


@pytest.mark.long
@on_each_device
def test_outputs_have_the_shapes_of_what_they_depend_on(device):
    x = randn(5, 7, device=device, dtype=torch.float64).requires_grad_()
    b = randn(7, device=device, dtype=torch.float64).requires_grad_()
    wide, narrow = apart(x, b)
    assert (wide.shape, narrow.shape) == ((5, 7), (7,))
    torch.testing.assert_close((wide, narrow), (x * b, b * b))
    assert torch.autograd.gradcheck(apart, (x, b))
    assert torch.autograd.gradgradcheck(apart, (x, b))


@pytest.mark.long
@on_each_device
def test_more_dimensions_than_a_kernel_walks_over(device):
    x = randn(*[3] * 7, device=device)[(slice(2),) * 7]  # no two dimensions are one
    b = randn(2, 1, 2, 1, 2, 1, 2, device=device)
    torch.testing.assert_close(geglu(x, b), F.gelu(x) * b)
    with pytest.raises(RuntimeError, match="outputs of several shapes, and tensors that lie apart"):
        apart(x, b)


@pytest.mark.long
@on_each_device
def test_elu_keeps_nan_and_the_sign_of_zero(device):
    x = torch.tensor([math.nan, -math.inf, -1.0, -0.0, 2.0], device=device, requires_grad=True)
    out, expected = pointwise(lambda x: F.elu(x, 0.5))(x), F.elu(x, 0.5)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert out[3].signbit()
    (got,) = torch.autograd.grad(out.sum(), x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(got[1:], wanted[1:])
    assert got[0].isnan()  # PyTorch's is NaN or 1, by the number of elements


@pytest.mark.long
def test_the_reference_has_numbers_as_precise_as_the_kernel():
    function = pointwise(lambda x: (x.maximum(0.1), x.hypot(0.3), x.atan2(0.7)))
    x = torch.full((3,), 0.05, dtype=torch.float64)
    for got, wanted in zip(function.op.run_reference(x), function(x)):
        torch.testing.assert_close(got, wanted, rtol=1e-15, atol=0)
    whole = pointwise(lambda x: torch.clamp(x, -1, 3))
    assert whole.in_torch(torch.tensor(5, dtype=torch.int8)).dtype == torch.int8


@pytest.mark.long
@on_each_device
def test_transforms(device):
    x, b = randn(5, 7, device=device), randn(7, device=device)
    torch.testing.assert_close(torch.vmap(geglu, in_dims=(0, None))(x, b), F.gelu(x) * b)
    grad = torch.func.grad(lambda t: geglu(t, b).sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda t: (F.gelu(t) * b).sum())(x))
    _, tangent = torch.func.jvp(square, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, 2 * x)


@on_each_device
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_compiles_to_one_graph(device, dynamic):
    fresh = square >> bias >> square  # its op is declared while Dynamo looks
    x, b = randn(5, 7, device=device).requires_grad_(), randn(7, device=device)
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda x, b: fresh(x + 1, b) * 0.5, fullgraph=True, dynamic=dynamic, backend=backend
    )
    got, expected = compiled(x, b), ((x + 1) ** 2 + b) ** 2 * 0.5
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), x)
    )


def test_python_cannot_choose_by_a_value():
    with pytest.raises(TypeError, match=r"`x > 0`: .*write torch.where\(condition, a, b\)"):
        pointwise(lambda x: x if x > 0 else -x)
    assert pointwise(lambda x: 2 * x).name == "formula"
    with pytest.raises(TypeError, match="write torch.exp"):
        pointwise(lambda x: 1 + math.exp(x))
    with pytest.raises(TypeError, match="no function `digamma`; it knows abs, "):
        pointwise(lambda x: 1 + torch.digamma(x))
    with pytest.raises(TypeError, match="no method `siginoid`; did you mean sigmoid"):
        pointwise(lambda x: x.siginoid())
    with pytest.raises(TypeError, match=r"no method `matmul`; it knows abs, "):
        pointwise(lambda x: x.matmul(x))
    for reduced in (lambda x: x - x.max(), lambda x: torch.sum(x, 0), lambda x: F.softmax(x, -1)):
        with pytest.raises(TypeError, match="one element at a time, .*reduce in a kernel of its "):
            pointwise(reduced)
    for product in (lambda x: x @ x, lambda x: 2 @ x):
        with pytest.raises(TypeError, match="`x`: .* there are no products of matrices$"):
            pointwise(product)
    for noisy in (
        lambda x: x + torch.rand_like(x), lambda x: x * torch.bernoulli(x),
        lambda x: -F.dropout(x), lambda x: x.normal_(),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="is deterministic: pass the noise as an argument$"):
            pointwise(noisy)
    with pytest.raises(TypeError, match="pass the tensor as an argument"):
        pointwise(lambda x: x + torch.ones(3))
    with pytest.raises(TypeError, match=r"write relu\(\)"):
        pointwise(lambda x: x.relu_())
    with pytest.raises(TypeError, match="integers of 64 bits, and got one of 71 bits"):
        pointwise(lambda x: x * 2**70)
    with pytest.raises(DeclarationError, match="depend on its tensors"):
        pointwise(lambda x: 2.0)
    for dtype in ("floot", torch.complex64):
        with pytest.raises(DeclarationError, match=rf"dtypes=\[.*{dtype}.*that kernels know, as "):
            pointwise(dtypes=[dtype])


def test_text_can_be_read():
    text = geglu.source("cuda", dtypes="bf16,bf16")
    assert text.startswith("// T_out0 = bf16, T_in0_gate = bf16, T_in1_up = bf16, A = f32\n")
    assert (
        "// out0 = ((0.5 * in0_gate) * (1 + erf((in0_gate * 0.7071067811865476)))) * in1_up" in text
    )
    assert "geglu_flat" in geglu.source("cpu")
    assert repr(square) == "<pointwise square(x) = x * x>"
    assert geglu.__doc__ == "The gated linear unit with GELU."


@pytest.mark.parametrize("dtypes", ["bf17,f32", [torch.float32, torch.complex64]])
def test_text_for_what_there_is_not_is_refused(dtypes):
    with pytest.raises(DeclarationError, match="'rocm'.*: it is 'cuda' or 'cpu'"):
        geglu.source("rocm")
    with pytest.raises(DeclarationError, match=r"`(bf17|torch.complex64)`; dtypes are f16, bf16"):
        geglu.source("cuda", dtypes=dtypes)


def test_a_signature_has_the_parameters_of_the_author():
    def f(x, limit: float = math.inf, *, n: int = 2, y):
        return torch.clamp(x, max=limit) * n + y

    parameters = inspect.signature(pointwise(f)).parameters
    assert [*parameters] == ["x", "limit", "n", "y"], "a call may give all of them by position"
    assert parameters["n"].annotation is int and parameters["x"].annotation is torch.Tensor
    found = inspect.signature(pointwise(lambda x, limit=math.inf: torch.clamp(x, max=limit)))
    assert found.parameters["limit"].default == math.inf
    assert [*inspect.signature(bias >> square).parameters] == ["x", "b"]


def test_bytes_count_each_operand_once():
    x, b = torch.ones(6, 8), torch.ones(8)
    assert bias.bytes(x, b) == 4 * (48 + 8 + 48)
    assert bias.bytes(x, b.expand(6, 8)) == 4 * (48 + 8 + 48)
    assert bias.bytes(x, x) == 4 * (48 + 48)


@pytest.mark.long
@pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")
@pytest.mark.parametrize("case", [0, 1, 2, 3, 7, 8, 11, 12, 15, 18])
def test_the_launch_function_is_traced(case):
    """The second call of a kind runs as C, and answers as Python."""
    x, b = SHAPES[case](randn)
    first, again = bias(x, b), served(bias.op, x, b)
    assert torch.equal(first, again)
    assert first.stride() == again.stride()


def whole(x, y):
    return (
        x + 1 > x, abs(x) + 1 > 0, x * 2 // 2, -x > 0, x - y, x * x, x**3, x**7, (x + x) + y,
        y + 1 > y, abs(y) + 1 > 0, y * 2 // 2, -y > 0, y * x, torch.addcmul(y, y, y, value=3),
        (x * 2 + 1) // (abs(y) + 1), torch.add(x, x, alpha=2), (y + x) - x > y, x.to(torch.int16) * x,
    )  # fmt: skip


def ends(device="cpu"):
    """The largest and the smallest integers of 32 and of 64 bits."""
    least, most = (torch.tensor([f(d) for d in (torch.int32, torch.int64)]) for f in (
        lambda d: torch.iinfo(d).min, lambda d: torch.iinfo(d).max))  # fmt: skip
    x, y = (torch.stack([most[i], least[i], most[i] - 1, least[i] + 1]) for i in range(2))
    return x.to(device, torch.int32), y.to(device)


@pytest.mark.long
@on_each_device
def test_integers_wrap_around(device):
    x, y = ends(device)
    for i, (got, want) in enumerate(zip(pointwise(whole)(x, y), whole(x, y))):
        assert got.dtype == want.dtype and torch.equal(got, want), i


def as_integers(x):
    return (
        x.byte(),
        x.char() * 0.5,
        x.short() - 0.7,
        x.int().float(),
        x.long() - x,
        (x.short() - 0.7).byte(),
    )


@pytest.mark.long
@on_each_device
def test_numbers_that_no_integer_holds_become_those_of_torch(device):
    """Compilers for the CPU take (float)(int)x for x without its fraction, unless told of the others."""
    x = torch.tensor(
        [-1.5, 300.7, -300.2, 7840.0, 1e6, 3e9, -3e9, 1e30, math.inf, math.nan] * 5, device=device
    )
    for got, want in zip(pointwise(as_integers)(x), as_integers(x)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def of_bools(a, n):
    return a + n, a * (n + 1), a == (n == 0), a & a, torch.where(a, n, 7), a.float(), ~a, -a.int()


@pytest.mark.long
@on_each_device
def test_any_byte_but_zero_is_true(device):
    """Memory of another library, or of uint8, need not have the bytes 0 and 1."""
    a = torch.tensor([2, 0, 1, 255] * 9, dtype=torch.uint8, device=device).view(torch.bool)
    n = torch.zeros(36, dtype=torch.int32, device=device)
    function = pointwise(of_bools)
    for b in (a, a[1:2]):
        for got, want in zip(function(b, n), of_bools(b, n)):
            assert torch.equal(got, want)
            assert want.dtype != torch.bool or got.view(torch.uint8).max() <= 1


@pytest.fixture
def default():
    """Set the default dtype, for this test."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def of_integers(x):
    return x / 3, x * 0.1, torch.sqrt(x), torch.where(x > 1, 0.1, 0.2), torch.exp(x) + 0.1, x > 0.5


def test_integers_become_numbers_of_the_default_dtype(default):
    function, x = pointwise(of_integers), torch.arange(1, 5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float32):
        default(dtype)
        for _ in range(2):
            for got, want in zip(served(function.op, x), of_integers(x)):
                torch.testing.assert_close(got, want)  # and dtypes
        torch.testing.assert_close(function.in_torch(x), of_integers(x), rtol=0, atol=0)


@pytest.mark.parametrize("bounds", [(), (0.0, 1e9), (-1e8, 1e8), (-2, 100)], ids=str)
def test_hardtanh_of_integers_is_that_of_torch(bounds):
    function = pointwise(lambda x: F.hardtanh(x, *bounds))
    x = torch.tensor([0, 1, -1, 5, -7, 16777217, -16777219, 2**40 + 1])
    for dtype in (torch.int64, torch.int32):
        want = F.hardtanh(x.to(dtype), *bounds)
        got = function(x.to(dtype))
        assert got.dtype == want.dtype and torch.equal(got, want)


REFUSED = {
    "silu": F.silu, "gelu": F.gelu, "softplus": F.softplus, "logsigmoid": F.logsigmoid, "mish": F.mish,
    "elu": F.elu, "leaky_relu": F.leaky_relu, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "pow": lambda x: x**-1, "hypot": lambda x: torch.hypot(x, x), "lerp": lambda x: torch.lerp(x, x, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_with_its_words(name):
    function, x = REFUSED[name], torch.arange(3)
    with pytest.raises(RuntimeError) as theirs:
        function(x)
    with pytest.raises(RuntimeError) as ours:
        pointwise(lambda values: function(values))(x)  # noqa: PLW0108  the name
    told = str(ours.value)
    assert told.startswith(f"{__file__}:") and told.endswith(f": {theirs.value}")
    assert f"formula: PyTorch refuses {name}(values" in told and "int64" in told


def test_the_operands_of_a_refusal_have_their_dtypes():
    with pytest.raises(RuntimeError, match=r"refuses sub\(x: bool, x & y: bool\): Subtraction"):
        pointwise(lambda x, y: x - (x & y))(torch.tensor([True]), torch.tensor(True))
    with pytest.raises(RuntimeError, match=r"refuses sub\(x: bool without dimensions, True\): "):
        pointwise(lambda x: x - True)(torch.tensor(True))  # noqa: FBT003


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, -1, -2, True], ids=str)
def test_powers_of_unsigned_integers_are_as_in_eager(exponent):
    function, x = pointwise(lambda x: x**exponent), torch.arange(4).to(torch.uint32)
    of_a_number = pointwise(lambda x, n: x**n)
    try:
        want = x**exponent
    except RuntimeError as e:
        for call in (lambda: function(x), lambda: of_a_number(x, exponent)):
            with pytest.raises(RuntimeError, match=f"PyTorch refuses pow.*{re.escape(str(e))}"):
                call()
    else:
        for found in (function(x), of_a_number(x, exponent)):
            assert torch.equal(found, want) and found.dtype == want.dtype


def test_softsign_of_integers_wraps_as_in_eager():
    x = torch.tensor([-128, -127, 0, 127], dtype=torch.int8)
    ours = pointwise(lambda x: F.softsign(x) * 1)
    torch.testing.assert_close(ours(x), F.softsign(x))


def test_numbers_that_are_computed_are_refused_as_in_eager():
    @pointwise
    def clamped(x, n: int):
        return torch.clamp(x, -n, 100)

    x = torch.tensor([1.0, -300.0], dtype=torch.float16)
    assert clamped(x, 5).tolist() == [1.0, -5.0]
    assert jitkern.stats()["compiles"], "by a kernel"
    with pytest.raises(RuntimeError, match="without overflow"):
        clamped(x, 2**40)


def test_numbers_that_pytorch_converts_are_refused_as_in_eager():
    @pointwise
    def added(x, y, alpha: float):
        return torch.add(x, y, alpha=alpha) * alpha

    x = torch.tensor([1.0, 2.0], dtype=torch.float16)
    assert added(x, x, 0.5).tolist() == [0.75, 1.5]
    for dtype, alpha in ((torch.float16, 1e5), (torch.float32, 1e39)):
        with pytest.raises(RuntimeError, match="without overflow"):
            added(x.to(dtype), x.to(dtype), alpha)
    assert (
        added(x.double(), x.double(), 1e5).tolist()
        == added.in_torch(x.double(), x.double(), 1e5).tolist()
    )


def test_what_is_computed_of_numbers_is_computed_as_in_python():
    @pointwise
    def powers(x, n: int):
        return x * n**-3 + n**n % 3

    assert powers(torch.ones(2), 2).tolist() == [1.125] * 2
    assert powers(torch.ones(2, dtype=torch.int32), 4).tolist() == [1 + 4**-3] * 2
    with pytest.raises(RuntimeError, match=r"refuses bitwise_and\("):
        pointwise(lambda x, n: (x * n**n) & 3)(torch.ones(2), 5)


def test_a_number_divided_by_zero_is_refused_as_in_eager():
    @pointwise
    def dropped(x, p: float):
        return x * (1 / (1 - p))

    x = torch.ones(3)
    assert dropped(x, 0.5).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="float division by zero"):
        dropped(x, 1.0)


def test_tensors_that_are_not_combined_are_not_promoted():
    function = pointwise(lambda x, y: (x & 3, y & 3))
    x, y = (torch.arange(4).to(dtype) for dtype in (torch.uint16, torch.uint64))
    assert [r.dtype for r in function(x, y)] == [torch.uint16, torch.uint64]


def test_autocast_and_modes_change_no_dtype():
    function, x = pointwise(lambda x, y: x * y + 0.5), torch.ones(3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16), torch.device("meta"), torch.inference_mode():
        assert function(x, x).dtype == torch.bfloat16


def test_functions_of_modules_may_be_in_place():
    function = pointwise(lambda x: torch.nn.functional.leaky_relu(x, 0.5, True))  # noqa: FBT003
    x = torch.tensor([-1.0, 2.0])
    assert function(x).tolist() == [-0.5, 2.0] and function.in_torch(x).tolist() == [-0.5, 2.0]
    assert x.tolist() == [-1.0, 2.0]
    assert pointwise(lambda x: F.silu(input=x, inplace=True))(x).tolist() == F.silu(x).tolist()


def test_a_process_with_records_asks_torch_nothing(run_python):
    code = """
        import torch
        from jitkern import pointwise
        from jitkern.runtime import specializer
        gated = pointwise(lambda x, y: torch.nn.functional.silu(x) * y)
        x = torch.ones(64)
        if {warm}:
            torch.ones = torch.ones_like = torch.result_type = None  # of which it would ask
        for _ in range(2):
            gated(x, x)
        specializer.settle()
    """
    for warm in (False, True):
        done = run_python(textwrap.dedent(code.format(warm=warm)))
        assert done.returncode == 0, done.stderr


def test_is_pickled_and_copied_as_itself():
    assert pickle.loads(pickle.dumps(double_square)) is double_square
    assert copy.deepcopy(square) is square
    with pytest.raises(DeclarationError, match="assign the function to a name"):
        pickle.dumps(square >> square >> square)


def test_a_gradient_by_no_argument_is_told_which_there_are():
    with pytest.raises(ValueError, match="no tensor argument `z`; it has: gate, up$"):
        geglu.grad(wrt="z")


@pytest.mark.long
def test_the_gradient_is_a_function_too():
    derived = geglu.grad(wrt="gate")
    assert [p.name for p in derived.parameters] == ["d_out", "gate", "up"]
    x = randn(9)
    torch.testing.assert_close(square.grad()(torch.ones(9), x), 2 * x)
