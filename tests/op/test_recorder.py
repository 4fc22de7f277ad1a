"""Calls that C++ records for Autograd: that it does, what it keeps, and what it leaves to Python."""

import gc
import weakref

import pytest
import torch
from helpers import run_threads

from jitkern import testing
from jitkern.config import background
from jitkern.errors import CompilerNotFound, DeclarationError
from jitkern.op import recorder, recording
from jitkern.runtime import binding

pytestmark = [
    pytest.mark.long,  # the node takes 20 s to build
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
    pytest.mark.parametrize("recorded_by", ["c++"], indirect=True),
    pytest.mark.usefixtures("recorded_by"),
]
KERNELS = """
extern "C" void scale(T* out, const T* x, double by, long n) { for (long i = 0; i < n; i++) out[i] = by * x[i]; }
"""


def scaled(k, x, by):
    x = x.contiguous()
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, by, x.numel())
    return out


def leaf(*values, **options):
    return torch.tensor(values, requires_grad=True, **options)


@pytest.fixture
def scale(declare):
    """`by * x`, whose gradient keeps the number alone."""
    op = declare("(Tensor x, float by=3.0) -> Tensor", scaled, lambda x, by: by * x)

    @op.backward
    def _(grad, by):
        return op(grad, by)

    return op


@pytest.fixture
def in_c(monkeypatch):
    """Fails the test if Python records a call."""

    def count(_):
        raise AssertionError("Python recorded a call")

    monkeypatch.setattr(recorder, "count", count)


@pytest.mark.usefixtures("in_c")
def test_a_call_is_recorded_in_c_and_differentiated_twice(scale):
    x = leaf(1.0, 2.0)
    y = scale(scale(x), by=0.5)
    assert type(y.grad_fn).__name__ == "CppFunction"
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(g, torch.full((2,), 1.5))
    assert torch.autograd.gradcheck(scale, leaf(1.0, 2.0, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(scale, leaf(1.0, 2.0, dtype=torch.float64))
    (y**2).sum().backward(retain_graph=True)
    (y**2).sum().backward()
    assert torch.equal(x.grad, 2 * 2 * 1.5**2 * x.detach())
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.usefixtures("in_c")
def test_every_kind_of_argument_comes_back_as_it_was(declare):
    values = "int i, float f, bool b, str s, int? oi, float? of, bool? ob, str? os"
    kept = []
    op = declare(
        f"(Tensor? w, Tensor x, {values}) -> (Tensor one, Tensor two)",
        lambda k, w, x, *rest: (scaled(k, x, 2.0), scaled(k, x, 3.0)),
    )

    @op.backward
    def _(grad_one, grad_two, w, x, one, i, f, b, s, oi, of, ob, os, needs):
        kept.append((w, x, one, i, f, b, s, oi, of, ob, os, needs))
        return w, 2 * grad_one + 3 * grad_two

    x, w = leaf(1.0, 2.0), torch.ones(2)
    some = (-3, 0.1, True, "näme\0", 2**40, -0.0, False, "")
    for weight, rest in ((None, some), (w, (0, 1e300, False, "", *[None] * 4))):
        a, b = op(weight, x, *rest)
        (g,) = torch.autograd.grad(b.sum(), x)  # nothing depends on `a`: its gradient is zeros
        assert torch.equal(g, torch.full((2,), 3.0))
        got_w, got_x, got_a, *numbers, needs = kept.pop()
        assert got_w is weight and got_x is x and torch.equal(got_a, a)
        assert [*map(repr, numbers)] == [*map(repr, rest)]
        assert needs == (False, True)
    w.requires_grad_()
    (g,) = torch.autograd.grad(sum(op(w, x, *some)).sum(), w)
    assert torch.equal(g, w) and kept.pop()[-1] == (True, False)


@pytest.mark.usefixtures("in_c")
def test_what_a_backward_keeps_is_checked_hooked_and_freed(declare):
    op = declare("(Tensor x) -> Tensor", lambda k, x: scaled(k, x, 3.0))
    op.backward(lambda grad, x, out: grad * out / x)
    x = leaf(1.0, 2.0)
    middle = x * 1
    y = op(middle)
    middle += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor * 2

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor / 2):
        y = op(x)
    assert len(packed) == 2
    y.register_hook(lambda grad: 10 * grad)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 30.0))


@pytest.mark.usefixtures("in_c")
def test_an_error_of_a_backward_is_raised_as_it_is(declare):
    op = declare("(Tensor x) -> Tensor", lambda k, x: scaled(k, x, 3.0))
    wrong = [KeyError("mine"), torch.ones(3), "text", (None, None)]

    @op.backward
    def _(grad):
        if isinstance(wrong[0], Exception):
            raise wrong[0]
        return wrong[0]

    for kind, says in (
        (KeyError, "mine"), (DeclarationError, "gradient of shape \\[3\\]"),
        (DeclarationError, "a str in place of a gradient"), (DeclarationError, "2 gradients"),
    ):  # fmt: skip
        y = op(leaf(1.0, 2.0))
        with pytest.raises(kind, match=says):
            y.sum().backward()
        wrong.pop(0)
    both = declare("(Tensor x, Tensor y) -> Tensor", lambda k, x, y: scaled(k, x, 3.0))
    both.backward(lambda grad: (grad, "text"))
    z = both(leaf(1.0), torch.ones(1))
    with pytest.raises(DeclarationError, match="a str in place of a gradient"):
        z.backward(retain_graph=True)
    with pytest.raises(DeclarationError, match="a str in place of a gradient"):
        z.grad_fn(torch.ones(1))


@pytest.mark.usefixtures("in_c")
def test_an_error_of_the_call_itself_is_raised_as_it_is(declare):
    def launch(k, x, n):
        torch._check(n > 0, lambda: f"n must be positive, got {n}")
        return scaled(k, x, [1.0][n - 1])

    op = declare("(Tensor x, int n) -> Tensor", launch)
    op.backward(lambda grad: grad)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="n must be positive, got 0"):
            op(leaf(1.0), 0)
        with pytest.raises(IndexError):
            op(leaf(1.0), 2)
        assert op(leaf(1.0), 1).requires_grad
    assert not recording.recording()


@pytest.mark.usefixtures("in_c")
def test_a_call_that_cannot_be_recorded_leaves_no_tensor_behind(declare):
    op = declare("(Tensor x) -> Tensor", lambda k, x: scaled(k, x, 3.0))
    op.backward(lambda grad, x, out: grad * out / x)
    op(leaf(1.0))
    left, packed = [], []

    def refuse_the_output(tensor):
        packed.append(len(packed))
        if len(packed) == 2:
            raise ValueError("refused")
        return tensor

    def call_with_a_hook(x):
        with torch.autograd.graph.saved_tensors_hooks(refuse_the_output, lambda tensor: tensor):
            op(x)

    def call_with_a_view_of_unknown_history(base):
        view, *_ = base.unbind(0)
        left.append(weakref.ref(view))
        base.mul_(2)
        op(view)

    for call, error in (
        (call_with_a_hook, ValueError),
        (call_with_a_view_of_unknown_history, RuntimeError),
    ):
        x = leaf(1.0, 2.0) * 1
        left.append(weakref.ref(x))
        with pytest.raises(error):
            call(x)
        del x
    gc.collect()
    assert packed == [0, 1] and [tensor() for tensor in left] == [None] * 3


@pytest.mark.usefixtures("in_c")
def test_threads_record_and_differentiate_side_by_side(scale):
    x, failed = leaf(1.0, 2.0), []
    shared = scale(x)

    def train():
        for _ in range(200):
            (g,) = torch.autograd.grad(scale(x).sum(), x)
            (h,) = torch.autograd.grad(shared.sum(), x, retain_graph=True)
            if not (torch.equal(g, h) and g.tolist() == [3.0, 3.0]):
                failed.append((g, h))

    run_threads(*[train] * 4)
    assert not failed


def test_python_records_what_c_does_not_know(declare):
    listed = declare("(Tensor x, int[] sizes) -> Tensor", lambda k, x, sizes: scaled(k, x, 3.0))
    listed.backward(lambda grad, sizes: sizes[0] * grad)
    partial = declare(
        "(Tensor x) -> (Tensor a, Tensor b)", lambda k, x: (scaled(k, x, 2.0), scaled(k, x, 3.0))
    )
    partial.backward(lambda grad_a: 2 * grad_a)
    x = leaf(1.0)
    for result in (listed(x, [7]), partial(x)[0]):
        assert type(result.grad_fn).__name__ != "CppFunction"
        result.sum().backward()
    assert x.grad.item() == 9


def test_a_mode_and_a_transform_still_see_the_call(scale):
    slope = torch.func.grad(lambda x: scale(x).sum())(torch.ones(2))
    assert torch.equal(slope, torch.full((2,), 3.0))
    x = leaf(1.0, 2.0)
    out = torch.utils.checkpoint.checkpoint(lambda x: scale(x) ** 2, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, 18 * x.detach())


@pytest.mark.usefixtures("in_c")
def test_an_op_that_is_declared_again_has_its_new_gradient(scale):
    x = leaf(1.0)
    y = scale(x)
    scale.declare_again(scale.declaration._replace(gradient=None))
    with pytest.raises(DeclarationError, match="which has no gradient"):
        scale(x).backward()
    scale.backward(lambda grad: 7 * grad)
    scale(x).backward()
    assert x.grad.item() == 7
    y.backward()
    assert x.grad.item() == 10, "a call keeps the gradient that it was recorded with"


def test_compiled_autograd_takes_a_graph_with_its_own_numbers(declare):
    from torch._dynamo import compiled_autograd

    op = declare(
        "(Tensor x, int? a, float? b, int c=0) -> Tensor", lambda k, x, *_: scaled(k, x, 1)
    )
    op.backward(lambda grad, a, b, c: grad * float(repr((a, b, c)).__hash__() % 1000))
    calls = [(None, None), (0, None), (0, 0.0), (0, -0.0), (2, 0.0, 1), (1, 0.0, 2), (2, 0.0)]
    for numbers in calls:
        x = leaf(1.0, 2.0)
        y = op(x, *numbers).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward()
        wanted = float(repr((*numbers, 0)[:3]).__hash__() % 1000)
        assert x.grad.tolist() == [wanted, wanted], numbers


@pytest.mark.usefixtures("in_c")
def test_a_node_is_called_inside_another_and_inside_itself(declare):
    pair = declare("(Tensor x, Tensor y) -> Tensor", lambda k, x, y: scaled(k, x, 1.0))
    pair.backward(lambda grad: (2 * grad, 5 * grad))
    inner = pair(leaf(1.0), leaf(1.0)).grad_fn

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return sum(inner(grad))

    x = leaf(1.0)
    Outer.apply(x).backward()
    assert x.grad.item() == 7
    again = declare("(Tensor x) -> Tensor", lambda k, x: scaled(k, x, 1.0))
    deeper = [True]

    @again.backward
    def _(grad):
        if deeper and deeper.pop():
            return 10 * torch.autograd.grad(y, x, grad, retain_graph=True)[0]
        return 3 * grad

    x = leaf(1.0)
    y = again(x)
    (g,) = torch.autograd.grad(y, x, retain_graph=True)
    assert g.item() == 30


CHILD = """
import torch, jitkern.ops
from jitkern import testing
from jitkern.op import recording
from jitkern.config import background
x = torch.ones(2, 3, requires_grad=True)
for calls in range(3):
    jitkern.ops.softmax(x).sum().backward()
    background.settle()
print(testing.recorded_calls(), recording.cpp is not None)
"""


def test_a_process_finds_the_node_at_its_first_recorded_call(run_python, recorder_cache, tmp_path):
    found = run_python(CHILD, JITKERN_SYSTEM_CACHE=str(recorder_cache))
    assert found.stdout.split() == ["1", "True"]
    found = run_python(CHILD, JITKERN_CACHE_DIR=str(tmp_path / "none"))
    assert found.stdout.split() == ["2", "False"]  # the first one was before there was a runtime


def test_a_process_that_trains_builds_the_node(scale, monkeypatch, recorder_cache):
    monkeypatch.setattr(recording, "cpp", None)
    testing.count_recorded_calls_from(1)
    began = []

    def loaded(*_, may_compile):
        began.append(may_compile)
        raise CompilerNotFound("there is none")

    monkeypatch.setattr(recorder.jit, "loaded", loaded)
    for _ in range(recorder.ENOUGH + 1):
        recorder.count(scale.autograd.slot, scale.gradient)
        background.settle()
    assert began == [False, True]
