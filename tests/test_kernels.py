"""Every shipped op that returns a tensor, on every device, from every source, on every sample.

Ops that change an argument and return nothing: tests/training/test_ops.py.
"""

from __future__ import annotations

import pytest
import torch

import jitkern.ops
from jitkern import config
from jitkern.op.op import Op, all_ops

SHIPPED = [
    op
    for name, op in sorted(all_ops().items())
    if name.startswith("jitkern::") and op.signature.outputs
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The error against float64 in units of the dtype's epsilon, scaled by the magnitude of the result.
ROUNDINGS = 4


def cases():
    for op in SHIPPED:
        for device in ("cpu", "cuda"):
            for source in op.sources[device]:
                marks = [pytest.mark.gpu] if device == "cuda" else []
                if source.kind == "extension":
                    marks.append(pytest.mark.slow)
                yield pytest.param(
                    op, device, source, id=f"{op.name[9:]}-{device}-{source.kind}", marks=marks
                )


def exact(op: Op, args):
    """The reference in float64."""
    return op.run_reference(
        *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    )


@pytest.mark.parametrize(("op", "device", "source"), list(cases()))
def test_equals_the_reference(op, device, source):
    with config.using(prefer=source.kind, fallback="raise"):  # no other steps in for it
        for args in op.sample_inputs(device):
            got, want = op(*args), exact(op, args)
            assert (got.shape, got.dtype, got.device) == (want.shape, args[0].dtype, args[0].device)
            assert got.stride() == op.run_reference(*args).contiguous().stride()
            error = (got.double() - want).abs() / (want.abs() + 1)
            assert not got.numel() or error.max() <= ROUNDINGS * torch.finfo(got.dtype).eps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", SHIPPED, ids=lambda op: op.name)
def test_opcheck(op, device):
    for args in op.sample_inputs(device):
        torch.library.opcheck(op.overload, args)
        if op.gradient:
            torch.library.opcheck(op.overload, tuple(a.detach().requires_grad_() for a in args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", SHIPPED, ids=lambda op: op.name)
def test_compile_makes_one_graph(op, device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        op, fullgraph=True, dynamic=dynamic, backend="inductor" if device == "cuda" else "aot_eager"
    )
    torch._dynamo.utils.counters.clear()
    samples = [args for args in op.sample_inputs(device) if args[0].dtype == torch.float32]
    for args in samples:
        torch.testing.assert_close(compiled(*args), op(*args), equal_nan=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Torch makes a graph for each rank and each size of 0 or 1; other sizes share one.
    kinds = {
        tuple((tuple(min(size, 2) for size in a.shape), a.is_contiguous()) for a in args)
        for args in samples
    }
    assert graphs == (len(kinds) if dynamic else len(samples))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [op for op in SHIPPED if op.gradient], ids=lambda op: op.name)
def test_gradient(op, device):
    args = next(
        args
        for args in op.sample_inputs(device)
        if args[0].dtype == torch.float64 and 0 < args[0].numel() < 200
    )
    assert torch.autograd.gradcheck(op, tuple(a.detach().requires_grad_() for a in args))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (op, compiled, op.run_reference):
        leaves = [a.detach().clone().requires_grad_() for a in args]
        function(*leaves).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])


@pytest.mark.parametrize("op", [op for op in SHIPPED if op.gradient], ids=lambda op: op.name)
def test_no_graph_is_recorded_without_need(op):
    args = op.sample_inputs("cpu")[0]
    assert op(*args).grad_fn is None
    with torch.no_grad():
        assert op(*(a.detach().requires_grad_() for a in args)).grad_fn is None


@pytest.mark.parametrize("op", SHIPPED, ids=lambda op: op.name)
def test_samples_cover_dtypes_strides_and_nothing(op):
    samples = op.sample_inputs("meta")
    assert {args[0].dtype for args in samples} >= {torch.float32, torch.float16, torch.bfloat16}
    if op.name != "jitkern::softmax_backward":
        assert any(args[0].numel() == 0 for args in samples)
        assert any(not args[0].is_contiguous() for args in samples)


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_of_masked_infinite_and_nan_rows(device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [
            [1, -inf, 2, -inf],
            [-inf, -inf, -inf, -inf],
            [inf, 0, 1, 2],
            [nan, 0, 1, 2],
            [3e38, -3e38, 0, 1],
        ],
        device=device,
    )
    for kind in ("nvrtc", "triton") if device == "cuda" else ("cc",):
        with config.using(prefer=kind):
            torch.testing.assert_close(jitkern.ops.softmax(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_input_is_the_ops_own_message(device):
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=r"vec_add: shapes differ, \(3,\) and \(4,\)"):
        jitkern.ops.vec_add(x, torch.ones(4, device=device))
    with pytest.raises(RuntimeError, match="dtypes differ, torch.float32 and torch.float64"):
        torch.ops.jitkern.vec_add(x, x.double())
    with pytest.raises(RuntimeError, match="must be floating point, got torch.int64"):
        jitkern.ops.softmax(torch.ones(3, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="at least one dimension"):
        jitkern.ops.softmax(x[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", SHIPPED, ids=lambda op: op.name)
def test_export_keeps_the_op(op, device):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return op(*args)

    args = next(args for args in op.sample_inputs(device) if args[0].dim() == 2)
    program = torch.export.export(Module(), args)
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [op.overload]
    torch.testing.assert_close(program.module()(*args), op(*args))
