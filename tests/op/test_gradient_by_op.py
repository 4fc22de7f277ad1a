"""An op as the gradient of another: what it gets, what it returns, and that Python is not needed."""

import pytest
import torch

from jitkern.errors import DeclarationError
from jitkern.op.compile_cache_key import digest
from jitkern.op.gradient import Gradient

pytestmark = pytest.mark.usefixtures("recorded_by")
KERNELS = """
extern "C" void axpb(T* out, const T* x, double a, double b, long n) { for (long i = 0; i < n; i++) out[i] = a * x[i] + b; }
"""
FORWARD = "(Tensor x, Tensor? w=None, int n=2, float f=0.5, bool b=True, str s='a', int? oi=None) -> Tensor"


def computed(k, x, a, b=0.0):
    out = torch.empty_like(x)
    k.axpb[{"T": x.dtype}](out, x.contiguous(), a, b, x.numel())
    return out


def leaf(*values, **options):
    return torch.tensor(values, requires_grad=True, **options)


@pytest.fixture
def no_python(recorded_by, monkeypatch):
    """Fails the test if Python runs a backward that C++ has recorded."""
    if recorded_by == "c++":
        monkeypatch.setattr(Gradient, "of_values", lambda *_: pytest.fail("by Python"))


@pytest.fixture
def pair(declare):
    """An op, and its gradient, which returns what it was given as numbers."""
    forward = declare(FORWARD, lambda k, x, w, n, f, b, s, oi: computed(k, x, float(n), f))

    def launch(k, s, grad, x, w, out, n, f, b, oi, needs_x, needs_w, more, twice):
        code = 1000.0 * (oi or 7) + 100.0 * n + 10.0 * f + (1.0 if b else 0.0) + twice
        code = code + (0.25 if s == "ä\0" else 0.0)
        return (
            computed(k, grad, code) if needs_x else None,
            computed(k, out, 1.0) if needs_w and w is not None else None,
        )

    backward = declare(
        "(str s, Tensor grad, Tensor x, Tensor? w, Tensor out, int n, float f, bool b, int? oi, "
        "bool needs_x, bool needs_w, Tensor? more=None, float twice=0.125) "
        "-> (Tensor? dx, Tensor? dw)",
        launch,
    )
    forward.backward(backward)
    return forward, backward


@pytest.mark.long
@pytest.mark.usefixtures("no_python")
def test_an_op_gets_its_arguments_by_name(pair, recorded_by):
    forward, _ = pair
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    y = forward(x, None, 3, 0.25, False, "ä\0", 9)
    assert (type(y.grad_fn).__name__ == "CppFunction") == (recorded_by == "c++")
    y.sum().backward()
    assert x.grad.tolist() == [9302.875] * 2
    x.grad = None
    forward(x, w).sum().backward()
    assert x.grad.tolist() == [7206.125] * 2
    assert w.grad.tolist() == [2.5, 4.5], "the output of the call"


@pytest.mark.long
@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_what_is_needed_is_computed(pair, needed):
    forward, backward = pair
    x, w = (torch.ones(2, requires_grad=one) for one in needed)
    seen = []

    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is backward.overload:
                seen.append([one is not None for one in result])
            return result

    out = forward(x, w)
    with Sees():
        out.sum().backward()
    assert seen == [[*needed]]
    assert [x.grad is not None, w.grad is not None] == [*needed]


@pytest.mark.long
@pytest.mark.usefixtures("no_python")
def test_tensors_behind_the_results_have_no_gradient(declare):
    forward = declare("(Tensor x, Tensor rows) -> Tensor", lambda k, x, rows: computed(k, x, 3.0))
    forward.backward(declare("(Tensor grad) -> Tensor", lambda k, grad: computed(k, grad, 3.0)))
    x, rows = leaf(1.0, 2.0), torch.tensor([1, 2])
    forward(x, rows).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    y, other = leaf(1.0, 2.0), leaf(1.0, 2.0)
    forward(y, other).sum().backward()
    assert y.grad.tolist() == [3.0, 3.0] and other.grad is None


@pytest.mark.long
def test_a_gradient_for_a_tensor_that_is_none_is_left_out(declare):
    forward = declare("(Tensor? w, Tensor x) -> Tensor", lambda k, w, x: computed(k, x, 3.0))
    backward = declare(
        "(Tensor grad) -> (Tensor dw, Tensor dx)",
        lambda k, grad: (computed(k, grad, 1.0), computed(k, grad, 3.0)),
    )
    forward.backward(backward)
    x = leaf(1.0, 2.0)
    forward(None, x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.long
def test_a_gradient_op_has_its_own_gradient_or_reference(declare):
    def launch(k, grad, x):
        return computed(k, grad * x, 2.0)

    square = declare("(Tensor x) -> Tensor", lambda k, x: computed(k, x * x, 1.0), torch.square)
    of_square = declare("(Tensor grad, Tensor x) -> Tensor", launch, lambda grad, x: 2 * grad * x)
    square.backward(of_square)
    x = leaf(1.0, 3.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(square, x) and torch.autograd.gradgradcheck(square, x)
    torch.library.opcheck(square.overload, (x,))
    total = torch.func.grad(lambda x: square(x).sum())(x.detach())
    assert total.tolist() == [2.0, 6.0]
    compiled = torch.compile(square, fullgraph=True)
    (g,) = torch.autograd.grad(compiled(x).sum(), x)
    assert g.tolist() == [2.0, 6.0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("results", "launch", "says"),
    [
        ("Tensor", lambda k, grad: torch.cat([grad] * 2), r"a gradient of shape \[4\]"),
        ("Tensor[]", lambda k, grad: [computed(k, grad, 3.0)], "a list in place of a gradient"),
    ],
    ids=["shape", "list"],
)
def test_a_gradient_that_torch_refuses_names_the_argument(declare, results, launch, says):
    forward = declare("(Tensor x) -> Tensor", lambda k, x: computed(k, x, 3.0))
    forward.backward(declare(f"(Tensor grad) -> {results}", launch))
    with pytest.raises(DeclarationError, match=f"for `x`, {says}"):
        forward(leaf(1.0, 2.0)).sum().backward()


@pytest.mark.long
def test_an_error_of_the_gradient_is_raised_as_it_is(declare):
    def launch(k, grad, n):
        torch._check(n > 0, lambda: f"n must be positive, got {n}")
        if n == 7:
            raise KeyError("mine")
        return computed(k, grad, 1.0)

    forward = declare("(Tensor x, int n) -> Tensor", lambda k, x, n: computed(k, x, 3.0))
    forward.backward(declare("(Tensor grad, int n) -> Tensor", launch))
    with pytest.raises(RuntimeError, match="n must be positive, got -1"):
        forward(leaf(1.0), -1).backward()
    with pytest.raises(KeyError, match="mine"):
        forward(leaf(1.0), 7).backward()
    forward(leaf(1.0), 1).backward()


@pytest.mark.long
def test_types_that_differ_are_converted_by_python(declare):
    forward = declare(
        "(Tensor x, Tensor? w, int n) -> Tensor", lambda k, x, w, n: computed(k, x, 3.0)
    )
    forward.backward(
        declare("(Tensor grad, Tensor w, float n) -> Tensor", lambda k, g, w, n: computed(k, g, n))
    )
    x = leaf(1.0)
    forward(x, x.detach(), 4).backward()
    assert x.grad.item() == 4
    with pytest.raises(Exception, match="takes a tensor for its argument `w`, and got None"):
        forward(x, None, 4).backward()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("(Tensor grad, Tensor y) -> Tensor", "has the unknown parameters y; it may have: "),
        ("(Tensor grad) -> (Tensor a, Tensor b)", "returns 2 gradients for the tensors x"),
        ("(Tensor(a!) grad) -> ()", "returns 0 gradients for the tensors x"),
        ("(Tensor(a!) grad) -> Tensor", "changes its arguments, which other nodes"),
    ],
)
def test_an_op_that_cannot_be_the_gradient_is_refused(declare, schema, says):
    forward = declare("(Tensor x) -> Tensor", lambda k, x: computed(k, x, 3.0))
    with pytest.raises(DeclarationError, match=says):
        forward.backward(declare(schema, lambda k, *grads: grads))


def test_the_keys_of_compiled_graphs_name_the_gradient(declare):
    forward = declare("(Tensor x) -> Tensor", lambda k, x: computed(k, x, 3.0))
    digests = set()
    for _ in range(2):
        forward.declare_again(forward.declaration._replace(gradient=None))
        forward.backward(declare("(Tensor grad) -> Tensor", lambda k, x: computed(k, x, 3.0)))
        digests |= {digest({"forward": forward}), digest({"forward": forward})}
    assert len(digests) == 2
