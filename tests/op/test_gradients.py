"""Gradients: ops with and without a backward, in-place ops, forward mode, torch.func, torch.compile."""

import pytest
import torch
from helpers import served
from torch.autograd import forward_ad

from jitkern.errors import DeclarationError

pytestmark = pytest.mark.usefixtures("recorded_by")
X = torch.tensor([2.0, 3.0])
KERNELS = """
extern "C" void triple(T* out, const T* x, long n) { for (long i = 0; i < n; i++) out[i] = 3 * x[i]; }
extern "C" void square(T* out, const T* x, const T* y, long n) { for (long i = 0; i < n; i++) out[i] = x[i] * x[i] * y[i]; }
extern "C" void square_backward(T* gx, T* gy, const T* g, const T* x, const T* y, long n) {
  for (long i = 0; i < n; i++) { gx[i] = 2 * g[i] * x[i] * y[i]; gy[i] = g[i] * x[i] * x[i]; }
}
"""


@pytest.fixture
def triple(declare):
    """`3 * x` with no backward."""

    def launch(k, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        k.triple[{"T": x.dtype}](out, x, x.numel())
        return out

    return declare("(Tensor x) -> Tensor", launch, lambda x: 3 * x)


@pytest.fixture
def triple_(declare):
    """`x *= 3` in place."""

    def reference(x):
        x *= 3

    return declare(
        "(Tensor(a!) x) -> ()", lambda k, x: k.triple[{"T": x.dtype}](x, x, x.numel()), reference
    )


@pytest.fixture
def square(declare):
    """`x * x * y`, whose backward is an op that fills its arguments; `reference` of that op."""

    def make(reference):
        def fill(k, gx, gy, g, x, y):
            k.square_backward[{"T": x.dtype}](gx, gy, g.contiguous(), x, y, x.numel())

        def launch(k, x, y):
            out = torch.empty_like(x)
            k.square[{"T": x.dtype}](out, x, y, x.numel())
            return out

        filled = declare(
            "(Tensor(a!) gx, Tensor(b!) gy, Tensor g, Tensor x, Tensor y) -> ()", fill, reference
        )
        op = declare("(Tensor x, Tensor y) -> Tensor", launch, lambda x, y: x * x * y)

        @op.backward
        def _(grad, x, y):
            gx, gy = torch.empty_like(x), torch.empty_like(y)
            filled(gx, gy, grad, x, y)
            return gx, gy

        return op

    return make


def fill_reference(gx, gy, g, x, y):
    gx.copy_(2 * g * x * y)
    gy.copy_(g * x * x)


def leaf(x=X):
    return x.clone().requires_grad_()


def refuses(op):
    name = op.name.split("::")[1]
    return pytest.raises(
        DeclarationError, match=rf"{op.name}: a backward pass reached .*add @{name}\.backward"
    )


# ------------------------------------------------------------------ a backward made of ops


@pytest.mark.long
def test_a_filling_backward_is_differentiated_by_its_reference(square):
    op, x, y = square(fill_reference), leaf(), leaf(X + 1)
    (g,) = torch.autograd.grad((op(x, y) + x**2).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert torch.equal(h, 2 * y.detach() + 2)
    x, y = leaf(X.double()), leaf(X.double() + 1)
    assert torch.autograd.gradcheck(op, (x, y))
    assert torch.autograd.gradgradcheck(op, (x, y))


@pytest.mark.long
def test_torch_func_differentiates_a_filling_backward(square):
    op, y = square(fill_reference), X + 1

    def slope(x):
        return torch.func.grad(lambda x: op(x, y).sum())(x).sum()

    assert torch.equal(torch.func.grad(slope)(X), 2 * y)
    assert torch.equal(torch.func.jvp(slope, (X,), (torch.ones(2),))[1], (2 * y).sum())


@pytest.mark.long
def test_a_backward_without_reference_has_no_second_gradient(square):
    op, x, y = square(None), leaf(), leaf(X + 1)
    (g,) = torch.autograd.grad(op(x, y).sum(), x, create_graph=True)
    assert torch.equal(g, 2 * x * y)
    with pytest.raises(DeclarationError, match="a backward pass reached a call of this op"):
        torch.autograd.grad(g.sum(), x)


# ------------------------------------------------------------------ no backward


@pytest.mark.long
def test_an_op_without_a_backward_refuses_in_the_backward_pass(triple):
    x = leaf()
    for result in (triple(x), triple.overload(x), triple(x) + x):
        assert result.requires_grad
        with refuses(triple):
            result.sum().backward()
    assert torch.equal(triple(x), 3 * X)
    assert x.grad is None


def test_a_clone_in_a_launch_function_is_no_gradient(declare):
    def launch(k, x):
        out = x.clone()
        k.triple[{"T": x.dtype}](out, out, out.numel())
        return out

    op = declare("(Tensor x) -> Tensor", launch)
    with refuses(op):
        op(leaf()).sum().backward()


@pytest.mark.long
def test_an_unused_result_without_backward_hinders_no_gradient(triple):
    x = leaf()
    triple(x)
    (x * triple(x).detach()).sum().backward()
    assert torch.equal(x.grad, 3 * X)


@pytest.mark.long
def test_with_a_gradient_the_kernel_computes_too(triple):
    triple.reference(lambda x: pytest.fail("the reference ran"))
    assert torch.equal(triple(leaf()), 3 * X)


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_an_op_has_no_graph(triple, mode):
    with mode():
        assert not triple(leaf()).requires_grad


@pytest.mark.long
def test_a_call_that_needs_no_gradient_asks_no_python(triple, triple_):
    for op in (triple, triple_):
        served(op, X.clone())
        with torch.no_grad():
            served(op, leaf())


@pytest.mark.long
def test_a_backward_declared_after_a_call_is_used_from_then_on(triple):
    x = leaf()
    triple(x)
    triple.backward(lambda grad: 3 * grad)
    triple(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 3))


def test_only_floating_results_have_a_graph(declare):
    op = declare(
        "(Tensor x, Tensor index) -> (Tensor, Tensor)",
        lambda k, x, index: (x.clone(), index.clone()),
    )
    values, index = op(leaf(), torch.tensor([1, 0]))
    assert values.requires_grad
    assert not index.requires_grad


def test_lists_of_tensors_are_refused_too(declare):
    op = declare("(Tensor[] xs, *, Tensor? y) -> Tensor[]", lambda k, xs, y: [x + 1 for x in xs])
    first, second = op([X, leaf()], y=None)
    assert torch.equal(first, X + 1)
    for result in (first, second):
        with refuses(op):
            result.sum().backward(retain_graph=True)
    assert op([X, X], y=leaf())[0].requires_grad
    assert not op([X, X], y=None)[0].requires_grad


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(1.0)),
        torch.func.jacrev,
        lambda f: torch.func.grad(torch.func.grad(f)),
        torch.func.hessian,
    ],
    ids=["grad", "vjp", "jacrev", "grad of grad", "hessian"],
)
def test_torch_func_refuses_an_op_without_a_backward(triple, transform):
    with refuses(triple):
        transform(lambda x: (triple(x) * x).sum())(X)


@pytest.mark.long
def test_torch_func_leaves_alone_what_it_does_not_differentiate(triple):
    constant = X + 1
    slope = torch.func.grad(lambda x: (x * triple(constant)).sum())(X)
    assert torch.equal(slope, 3 * constant)
    assert torch.equal(torch.func.vmap(triple)(X), 3 * X)


@pytest.mark.long
def test_the_error_names_the_op_called_in_a_checkpoint(triple):
    from torch.utils.checkpoint import checkpoint

    result = checkpoint(lambda x: triple(x).sin(), leaf(), use_reentrant=False)
    with refuses(triple):
        result.sum().backward()


# ------------------------------------------------------------------ forward mode


def test_forward_mode_without_a_backward_uses_the_reference(triple):
    tangent = torch.tensor([1.0, -1.0])
    assert torch.equal(torch.func.jvp(triple, (X,), (tangent,))[1], 3 * tangent)
    assert torch.equal(torch.func.jacfwd(triple)(X), 3 * torch.eye(2))
    with forward_ad.dual_level():
        result = triple(forward_ad.make_dual(X, tangent))
        assert torch.equal(forward_ad.unpack_dual(result).tangent, 3 * tangent)


def test_forward_mode_of_an_inplace_op_goes_by_its_reference(triple_):
    def f(x):
        x = x.clone()
        triple_(x)
        return x

    assert torch.equal(torch.func.jacfwd(f)(X), 3 * torch.eye(2))


def test_forward_mode_with_no_reference_is_an_error(declare):
    op = declare("(Tensor x) -> Tensor", lambda k, x: x.clone())
    with pytest.raises(DeclarationError, match=r"forward-mode .* has none; add @\w+\.reference"):
        torch.func.jvp(op, (X,), (X,))
    assert torch.equal(op(X), X)


# ------------------------------------------------------------------ gradients that do not fit


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.ones(3), r"a gradient of shape \[3\], and `w` has the shape \[2\]"),
        (torch.ones(()), r"a gradient of shape \[\], and `w` has the shape \[2\]"),
        (torch.ones(2, device="meta"), "a gradient on meta, and `w` is on cpu"),
        (torch.ones(2) * 1j, "a gradient of torch.complex64, and `w` is of torch.float32"),
        (1.0, "a float in place of a gradient: return a tensor or None"),
    ],
    ids=["shape", "scalar", "device", "complex", "number"],
)
def test_a_gradient_that_does_not_fit_names_op_and_argument(declare, wrong, says):
    op = declare("(Tensor x, Tensor w) -> Tensor", lambda k, x, w: x * w)
    op.backward(lambda grad: (grad, wrong))
    place = rf"{op.name}: .*test_gradients\.py:\d+: its backward returned, for `w`, "
    with pytest.raises(DeclarationError, match=place + says):
        op(leaf(), leaf()).sum().backward()
    with pytest.raises(DeclarationError, match=place + says):
        torch.func.grad(lambda w: op(X, w).sum())(X)


def test_a_gradient_that_nobody_needs_may_be_anything(declare):
    op = declare("(Tensor x, Tensor w) -> Tensor", lambda k, x, w: x * w)
    op.backward(lambda grad: (grad, torch.ones(3, device="meta")))
    x = leaf()
    op(x, X).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


@pytest.mark.parametrize("given", [torch.ones(3, 2), torch.ones(2, dtype=torch.float64)])
def test_a_gradient_that_torch_sums_or_converts_is_left_to_it(declare, given):
    op = declare("(Tensor x) -> Tensor", lambda k, x: x.clone())
    op.backward(lambda grad: given)
    x = leaf()
    op(x).sum().backward()
    assert torch.equal(x.grad, given.reshape(-1, 2).sum(0).float())


# ------------------------------------------------------------------ in place


@pytest.mark.long
def test_an_inplace_op_refuses_a_leaf_before_it_changes_it(triple_):
    x = leaf()
    for changed, what in ((x, "a leaf"), (x[:1], "a view of a leaf")):
        with pytest.raises(RuntimeError, match=f"{triple_.name} changes {what} of the graph"):
            triple_(changed)
    assert torch.equal(x, X)
    with torch.no_grad():
        triple_(x)
    assert torch.equal(x, 3 * X)


@pytest.mark.long
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_a_gradient_through_an_inplace_change_is_refused(triple_, view):
    x = leaf()
    y = x * 1
    triple_(y[1:] if view else y)
    assert torch.equal(y.detach(), torch.tensor([2.0, 9.0]) if view else 3 * X)
    with pytest.raises(DeclarationError, match=r"changes its arguments .*torch\.no_grad\(\)"):
        y.sum().backward()


def test_what_an_inplace_op_fills_is_in_the_graph(declare):
    def launch(k, out, count, x):
        k.triple[{"T": x.dtype}](out, x, x.numel())
        count.add_(1)

    op = declare("(Tensor(a!) out, Tensor(b!) count, Tensor x) -> ()", launch)
    out, count, x = torch.empty(2), torch.zeros(2, dtype=torch.int64), leaf()
    op(out, count, x)
    assert out.requires_grad
    assert not count.requires_grad
    with pytest.raises(DeclarationError, match="a backward pass reached a call of this op"):
        (out + x).sum().backward()


@pytest.mark.long
def test_torch_func_refuses_a_gradient_through_an_inplace_op(triple_):
    def f(x):
        y = x * 1
        triple_(y)
        return y.sum()

    with pytest.raises(DeclarationError, match="a backward pass reached a call of this op"):
        torch.func.grad(f)(X)


# ------------------------------------------------------------------ torch.compile


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.long
def test_torch_compile_takes_an_op_without_a_backward(triple, triple_):
    def f(x):
        y = triple(x) + 1
        triple_(y)
        return y

    assert torch.equal(compiled(f)(X), 3 * (3 * X + 1))
    with torch.no_grad():
        assert torch.equal(compiled(f)(leaf()), 3 * (3 * X + 1))
    with torch.inference_mode():
        assert torch.equal(compiled(f)(X), 3 * (3 * X + 1))


@pytest.mark.long
def test_torch_compile_refuses_an_op_without_a_backward(triple, triple_):
    def f(x):
        y = x * 1
        triple_(y)
        return y

    for function, op in ((triple, triple), (f, triple_)):
        with pytest.raises(Exception, match=f"{op.name}: a backward pass reached a call"):
            compiled(function)(leaf()).sum().backward()


@pytest.mark.long
def test_opcheck_passes_for_ops_without_a_backward(triple, triple_):
    torch.library.opcheck(triple.overload, (X,))
    torch.library.opcheck(triple_.overload, (X.clone(),))


@pytest.mark.long
def test_symbolic_integers_stay_symbolic_at_the_autograd_key(declare):
    def launch(k, x, n):
        out = x.new_empty(n)
        k.triple[{"T": x.dtype}](out, x, out.numel())
        return out

    op = declare("(Tensor x, SymInt n) -> Tensor", launch, lambda x, n: 3 * x[:n])
    assert torch.equal(served(op, X, 2), 3 * X)
    f = torch.compile(
        lambda x: op(x, x.shape[0]), fullgraph=True, backend="aot_eager", dynamic=True
    )
    counts = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counts.clear()
    for n in (4, 5, 9):
        assert torch.equal(f(torch.ones(n)), torch.full((n,), 3.0))
    assert counts["stats"]["unique_graphs"] == 1
    with refuses(op):
        op(leaf(), 2).sum().backward()
    op.backward(lambda grad: 3 * grad)
    x = leaf()
    op(x, 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 3))
