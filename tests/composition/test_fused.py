"""Pointwise functions around kernels that somebody wrote: one kernel forward, and a gradient."""

import json
from pathlib import Path

import jitkern_norms
import pytest
import torch
import torch.nn.functional as F
from helpers import H100, kernels, last_json, needs_nvrtc

import jitkern
from jitkern.composition.fused import Fused
from jitkern.declare import Cpp, kernel
from jitkern.errors import DeclarationError
from jitkern.op.all_ops import ops_named
from jitkern.runtime import specializer

HERE = Path(__file__).parent
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expected(x, factor, weight, eps, added):
    return F.silu(jitkern_norms.rms_norm.run_reference(x * factor, weight, eps) + added)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_one_kernel_computes_all_and_rounds_once(device):
    x, weight = torch.randn(6, 5, 32, device=device), torch.randn(32, device=device)
    for shape in ((32,), (5, 1), (6, 5, 32), ()):
        added = torch.randn(shape, device=device)
        for dtype, ulp in (
            (torch.float64, 2**-52),
            (torch.float32, 2**-20),
            (torch.bfloat16, 2**-8),
        ):
            x_, weight_, added_ = (t.to(dtype) for t in (x, weight, added))
            found = jitkern_norms.whole(x_, 2.0, weight_, 1e-6, added_)
            wanted = expected(x_.double(), 2.0, weight_.double(), 1e-6, added_.double())
            assert found.dtype == dtype
            bound = 1.05 * ulp * wanted.abs() + (1e-14 if dtype is torch.float64 else 1e-6)
            assert ((found.double() - wanted).abs() <= bound).all(), (shape, dtype)
    before = jitkern.stats()["compiles"]
    specializer.settle()
    assert torch.equal(
        jitkern_norms.whole(x, 2.0, weight, 1e-6, added),
        jitkern_norms.whole(x, 2.0, weight, 1e-6, added),
    )
    assert jitkern_norms.activated(x, weight).shape == x.shape
    assert jitkern.stats()["compiles"] > before  # another epilogue is another kernel


def test_compose_is_the_same_as_the_operator():
    assert jitkern_norms.again.op is jitkern_norms.whole.op
    assert isinstance(jitkern_norms.whole, Fused) and "scale >> jitkern_norms::rms_norm >>" in repr(
        jitkern_norms.whole
    )


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_the_parts(device):
    args = [
        torch.randn(shape, device=device, dtype=torch.float64) for shape in ((3, 8), (8,), (3, 1))
    ]

    def call(x, weight, added):
        return jitkern_norms.whole(x, 2.0, weight, 1e-3, added)

    args = [arg.requires_grad_() for arg in args]
    assert torch.autograd.gradcheck(call, args)
    assert torch.autograd.gradgradcheck(call, args)
    plain = [arg.detach().requires_grad_(i == 1) for i, arg in enumerate(args)]
    call(*plain).sum().backward()
    expected(
        plain[0], 2.0, wanted := plain[1].detach().requires_grad_(), 1e-3, plain[2]
    ).sum().backward()
    torch.testing.assert_close(plain[1].grad, wanted.grad)


@pytest.mark.long
def test_arguments_have_names_defaults_and_configurations():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    composed = jitkern_norms.by_name >> jitkern_norms.bias >> jitkern_norms.halved
    for given in (None, weight):
        wanted = (jitkern_norms.by_name.run_reference(x, weight=given, eps=1e-6) + weight) / 2
        torch.testing.assert_close(composed(x, weight=given, added=weight), wanted)
        torch.testing.assert_close(composed.op.run_reference(x, given, 1e-6, weight, 0.5), wanted)
    composed(x, added=weight).sum().backward()
    assert x.grad.shape == x.shape


def test_a_kernel_has_no_other_dtype_for_what_a_function_makes():
    x, weight = torch.randn(3, 8), torch.randn(8)
    for function in (
        jitkern.pointwise(lambda v: v > 0),
        jitkern.pointwise(lambda v: v.to(torch.float16)),
        jitkern.pointwise(lambda v: v.to(torch.int32) * 1.0),
    ):
        for composed in (jitkern_norms.rms_norm >> function, function >> jitkern_norms.rms_norm):
            with pytest.raises(RuntimeError, match="computes in the dtype of the value"):
                composed(x, weight)


@pytest.mark.long
def test_the_op_is_registered_as_any_other():
    x, weight = torch.randn(4, 8), torch.randn(8)
    torch.library.opcheck(jitkern_norms.activated.op.overload, (x, weight, 1e-6))
    compiled = torch.compile(lambda x, w: jitkern_norms.activated(x, w) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), 2 * jitkern_norms.activated(x, weight))
    assert jitkern_norms.activated.op in ops_named("jitkern_norms")


@pytest.mark.long
def test_another_process_compiles_nothing(run_python):
    text = (
        "import json, torch, jitkern, jitkern_norms\nfrom jitkern.runtime import specializer\n"
        "x, w = torch.randn(4, 8), torch.randn(8)\n"
        "jitkern_norms.whole(x, 2.0, w, 1e-6, w)\nspecializer.settle()\nprint(json.dumps(jitkern.stats()))"
    )
    runs = [run_python(text, PYTHONPATH=str(HERE), JITKERN_COMPILE=mode) for mode in ("", "never")]
    assert [json.loads(run.stdout)["compiles"] > 0 for run in runs] == [True, False], runs[1].stderr


CELL = """
times = kernel("jitkern_cells::times(Tensor x) -> Tensor", cpu=Cpp(text='''
#include "prologue.h"
#include "epilogue.h"
template <typename T> void times(T* out, const T* x, long n PROLOGUE_PARAMETERS EPILOGUE_PARAMETERS) {
  for (long i = 0; i < n; i++) out[i] = T(EPILOGUE(PROLOGUE(x[i], 0, i) * FACTOR, 0, i));
}
'''))
@times.launch("cpu")
def _(k, x, prologue=lambda like: (), epilogue=lambda like: ()):
    out = torch.empty_like(x)
    k.times[{"T": x.dtype}](out, x, x.numel(), *prologue(x), *epilogue(out))
    return out
@times.backward
def _(grad): return grad * FACTOR
"""
COMPOSED = """
plus = pointwise(lambda v: v + ADDED)
fused = plus >> times >> plus
"""


def notebook():
    """Return the names of a notebook, and a function that runs a cell."""
    scope = {"torch": torch, "kernel": kernel, "Cpp": Cpp, "pointwise": jitkern.pointwise}
    scope["__name__"] = "__main__"
    # The code of a cell that runs again is another object, of that name.
    return scope, lambda text: exec(compile(text, "<cell>", "exec"), scope)


def test_a_composition_is_declared_again_with_its_op():
    scope, run = notebook()
    run(CELL.replace("times", "tripled").replace("FACTOR", "2"))
    run(COMPOSED.replace("times", "tripled").replace("ADDED", "1"))
    op, made_of = scope["fused"].op, scope["fused"].op.execution
    assert scope["fused"].op.execution is made_of, "once"
    run(CELL.replace("times", "tripled").replace("FACTOR", "3"))
    assert scope["fused"].op is op
    (path,) = op.sources["cpu"][0].paths
    assert "* 3, 0, i)" in Path(path).read_text()
    assert op.gradient and op.execution == (scope["tripled"].declaration, scope["tripled"].gradient)


@pytest.mark.long
def test_a_composition_follows_an_op_that_is_declared_again():
    """By a cell that runs again, alone or before that of the composition, or by a reload."""
    scope, run = notebook()

    def shown():
        x = torch.ones(1, requires_grad=True)
        out = scope["fused"](x)
        return out.item(), torch.autograd.grad(out, x)[0].item()

    run(CELL.replace("FACTOR", "2"))
    run(COMPOSED.replace("ADDED", "1"))
    assert shown() == (5, 2)
    held = scope["fused"]
    run(CELL.replace("FACTOR", "5"))
    assert shown() == (11, 5)
    compiled = torch.compile(lambda x: scope["fused"](x) * 2, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 22
    run(CELL.replace("FACTOR", "2"))
    assert compiled(torch.ones(1)).item() == 10
    run(CELL.replace("FACTOR", "3"))
    run(COMPOSED.replace("ADDED", "1"))
    assert shown() == (7, 3)
    assert held.op is scope["fused"].op


@pytest.mark.long
@needs_nvrtc
def test_kernels_are_prewarmed_for_a_gpu_that_is_not_here(cli, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    code, out, err = cli("prewarm", "jitkern_norms", "--target", H100, "--json")
    assert code == 0, err
    built = {row["op"] for row in kernels(last_json(out))}
    assert {
        jitkern_norms.rms_norm.name,
        jitkern_norms.activated.op.name,
        jitkern_norms.whole.op.name,
    } <= built


def test_what_cannot_be_composed_says_why(tmp_path):
    (tmp_path / "k.cpp").write_text('extern "C" void f(float* out) { *out = 1; }\n')
    op = kernel("jitkern_norms::plain(Tensor x) -> Tensor", cpu=Cpp(str(tmp_path / "k.cpp")))
    op.launch("cpu")(lambda k, x: x.clone())
    with pytest.raises(DeclarationError, match=r"uses EPILOGUE: include `epilogue.h`"):
        (op >> jitkern_norms.silu).op
    (tmp_path / "k.cpp").write_text(
        '#include "epilogue.h"\nvoid f(float* out) { *out = EPILOGUE(1.f, 0, 0); }\n'
    )
    with pytest.raises(DeclarationError, match="no parameter `epilogue`"):
        (op >> jitkern_norms.silu).op
    two = kernel(
        "jitkern_norms::two(Tensor x) -> (Tensor, Tensor)", cpu=Cpp(str(tmp_path / "k.cpp"))
    )
    with pytest.raises(TypeError, match="returns one tensor"):
        two >> jitkern_norms.silu
    with pytest.raises(TypeError, match="unsupported operand"):
        jitkern_norms.rms_norm >> 1
    with pytest.raises(TypeError, match="one of them must be a pointwise function"):
        jitkern.compose(jitkern_norms.rms_norm, op)
    with pytest.raises(TypeError, match="misses the argument `factor`"):
        jitkern_norms.whole(torch.ones(2, 2))
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="columns do not broadcast"):
        jitkern_norms.whole(x, 1.0, x[0], 1e-6, torch.ones(3))
    with pytest.raises(RuntimeError, match="convert it"):
        jitkern_norms.whole(x, 1.0, x[0], 1e-6, torch.ones(4, dtype=torch.float64))
