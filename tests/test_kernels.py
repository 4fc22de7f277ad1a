"""Every shipped op that returns a tensor, on every device, from every source, on every sample.

Results of ops that change an argument: tests/training/test_ops.py.
"""

import operator

import pytest
import torch
from helpers import symbolic_sizes

import jitkern.ops
from jitkern import config
from jitkern.calls.signature import tensors_in
from jitkern.devtools.check import leaves
from jitkern.op.all_ops import all_ops
from jitkern.op.op import Op

pytestmark = pytest.mark.common_cache

EVERY = [op for name, op in sorted(all_ops().items()) if name.startswith("jitkern::")]
SHIPPED = [op for op in EVERY if op.signature.outputs and not op.signature.changed]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The error against float64 in units of the dtype's epsilon, scaled by the magnitude of the result.
ROUNDINGS = 4
# Whose errors add up over long sums.
OF_LONG_SUMS = ("jitkern::block_sparse_attention_backward",)

# One of each kind, which each commit checks with Torch's own tools; the others are long.
OF_EACH_KIND = ("muladd", "cross_entropy", "topk", "sample")


def by_kind(ops):
    def marks(op):
        return () if op.name[9:] in OF_EACH_KIND else pytest.mark.long

    return pytest.mark.parametrize(
        "op", [pytest.param(op, id=op.name, marks=marks(op)) for op in ops]
    )


# Attention over blocks leaves it to its reference.
CHECKING = [op for op in SHIPPED if "block_sparse" not in op.name]


FEW = 3  # kinds of calls on which each commit compares an op with its reference


def cases():
    for op in SHIPPED:
        for device in ("cpu", "cuda"):
            for source in op.sources[device]:
                marks = [pytest.mark.gpu] if device == "cuda" else []
                if source.kind == "extension":
                    marks.append(pytest.mark.long)
                name = f"{op.name[9:]}-{device}-{source.kind}"
                if device == "cpu":
                    yield pytest.param(op, device, source, FEW, id=f"{name}-few", marks=marks)
                    marks.append(pytest.mark.long)
                yield pytest.param(op, device, source, None, id=name, marks=marks)


def few(samples):
    """One call of each kind: of each dtype, and of float32 each rank and each set of the rest."""
    found = {}
    for args in samples:
        first, *rest = args
        plain = [a for a in rest if not isinstance(a, torch.Tensor)]
        kind = first.dtype, *((first.dim(), str(plain)) if first.dtype == torch.float32 else ())
        found.setdefault(kind, args)
    return list(found.values())


def exact(op: Op, args):
    """The results of the reference in float64."""
    wide = (
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    )
    return tensors_in([op.run_reference(*wide)])


@pytest.mark.parametrize(("op", "device", "source", "most"), list(cases()))
def test_equals_the_reference(op, device, source, most):
    torch.manual_seed(0)  # a number between two integers is rounded to either one
    samples = op.sample_inputs(device)
    with config.using(prefer=source.kind, fallback="raise"):  # no other steps in for it
        for args in few(samples)[:most] if most else samples:
            results = tensors_in([op(*args)]), tensors_in([op.run_reference(*args)])
            for got, own, want in zip(*results, exact(op, args), strict=True):
                same = (own.shape, own.dtype, own.device, own.contiguous().stride())
                assert (got.shape, got.dtype, got.device, got.stride()) == same
                if not got.is_floating_point():
                    assert got.equal(own)
                    continue
                error = (got.double() - want.double()).abs() / (want.double().abs() + 1)
                error = torch.where(
                    got.double() == want.double(), 0, error
                )  # infinities that agree
                wide = got.dtype in (torch.float32, torch.float64)
                alike = got.dtype == torch.float64  # the reference errs as well
                roundings = ROUNDINGS * (4 if wide and op.name in OF_LONG_SUMS else 1 + alike)
                assert not got.numel() or error.max() <= roundings * torch.finfo(got.dtype).eps


@pytest.mark.parametrize(
    ("most", "device"),
    [
        pytest.param(1, "cpu", id="one-cpu"),
        pytest.param(None, "cpu", marks=pytest.mark.long, id="all-cpu"),
        pytest.param(None, "cuda", marks=pytest.mark.gpu, id="all-cuda"),
    ],
)
@by_kind(SHIPPED)
def test_opcheck(op, most, device):
    for args in few(op.sample_inputs(device))[:most]:
        torch.library.opcheck(op.overload, args)
        if op.gradient:
            torch.library.opcheck(op.overload, leaves(op, args))


@pytest.mark.parametrize(
    ("dynamic", "most", "device"),
    [
        pytest.param(False, 1, "cpu", id="one-cpu"),
        pytest.param(False, None, "cpu", marks=pytest.mark.long, id="static-cpu"),
        pytest.param(True, None, "cpu", marks=pytest.mark.long, id="dynamic-cpu"),
        pytest.param(False, None, "cuda", marks=pytest.mark.gpu, id="static-cuda"),
        pytest.param(True, None, "cuda", marks=pytest.mark.gpu, id="dynamic-cuda"),
    ],
)
@by_kind(SHIPPED)
def test_compile_makes_one_graph(op, dynamic, most, device):
    torch._dynamo.reset()
    compiled = torch.compile(
        op, fullgraph=True, dynamic=dynamic, backend="inductor" if device == "cuda" else "aot_eager"
    )
    torch._dynamo.utils.counters.clear()
    samples = [args for args in op.sample_inputs(device) if args[0].dtype == torch.float32][:most]
    samples = samples if dynamic else samples[: torch._dynamo.config.recompile_limit]
    for args in samples:
        torch.testing.assert_close(compiled(*args), op(*args), equal_nan=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Torch makes a graph for each rank and each size of 0 or 1; other sizes share one.
    kinds = {
        tuple(
            (tuple(min(size, 2) for size in a.shape), a.is_contiguous())
            if isinstance(a, torch.Tensor)
            else str(a)
            for a in args
        )
        for args in samples
    }
    assert 0 < graphs <= (len(kinds) if dynamic else len(samples))


def guards_of_fake(op, args, device):
    """The conditions on sizes under which torch.compile may use what the fake returned."""
    return {str(guard.expr) for guard in symbolic_sizes(op.overload, args, device).guards}


@pytest.mark.long
@pytest.mark.parametrize("op", [op for op in SHIPPED if op.sources["cpu"]], ids=lambda op: op.name)
def test_sizes_that_choose_a_gpu_kernel_compile_nothing_again(op):
    for args in few(op.sample_inputs("cpu")):
        # Meta tensors go through the first launch function, that for GPUs.
        assert guards_of_fake(op, args, "meta") <= guards_of_fake(op, args, "cpu")


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [op for op in SHIPPED if op.gradient], ids=lambda op: op.name)
def test_gradient(op, device):
    args = next(
        args
        for args in op.sample_inputs(device)
        if args[0].dtype == torch.float64 and 0 < args[0].numel() < 200
    )
    assert torch.autograd.gradcheck(op, leaves(op, args))
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (op, compiled, op.run_reference):
        inputs = leaves(op, [a.clone() if isinstance(a, torch.Tensor) else a for a in args])
        sum(out.square().sum() for out in tensors_in([function(*inputs)])).backward()
        grads.append([leaf.grad for leaf in tensors_in(inputs) if leaf.requires_grad])
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])


@by_kind([op for op in SHIPPED if op.gradient])
def test_no_graph_is_recorded_without_need(op):
    args = op.sample_inputs("cpu")[0]
    assert all(out.grad_fn is None for out in tensors_in([op(*args)]))
    with torch.no_grad():
        assert all(out.grad_fn is None for out in tensors_in([op(*leaves(op, args))]))


@pytest.mark.parametrize("op", SHIPPED, ids=lambda op: op.name)
def test_samples_cover_dtypes_strides_and_nothing(op):
    samples = op.sample_inputs("meta")
    assert {args[0].dtype for args in samples} >= {torch.float32, torch.float16, torch.bfloat16}
    if not op.name.endswith("_backward"):
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


@pytest.mark.parametrize("op", CHECKING, ids=lambda op: op.name)
def test_a_shape_is_refused_where_the_reference_refuses_it(op):
    """On meta tensors: what a launch function checks, no kernel sees."""
    args = next(args for args in op.sample_inputs("cpu") if 0 < args[0].numel() < 5000)
    for i, value in enumerate(args):
        if not isinstance(value, torch.Tensor) or value.dim() < 1:
            continue
        shape = value.shape
        for other in ((value.numel(),), (1, *shape), (*shape, 1), shape[::-1]):
            call = [*args[:i], value.reshape(other), *args[i + 1 :]]
            try:
                got = op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in call])
            except RuntimeError:
                continue
            wanted = op.run_reference(*call)
            assert [t.shape for t in tensors_in([got])] == [t.shape for t in tensors_in([wanted])]


@pytest.mark.parametrize(
    "shapes", [((5, 7), (5, 7), (7, 5)), ((35,), (5, 7), (5, 7)), ((5, 7), (1, 5, 7), (5, 7))]
)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), *DEVICES[1:], "meta"]
)
def test_muladd_takes_tensors_of_one_shape(device, shapes):
    args = [torch.ones(shape, device=device) for shape in shapes]
    for kind in ("nvrtc", "extension"):
        with (
            config.using(prefer=kind),
            pytest.raises(RuntimeError, match=r"muladd: shapes differ, \(.*, .*\) and \("),
        ):
            jitkern.ops.muladd(*args)


def dynamic(value):
    """All dimensions of a tensor, or of those of a list, but those that Torch makes constants."""
    if isinstance(value, (list, tuple)):
        return [dynamic(item) for item in value]
    if isinstance(value, torch.Tensor):
        return {i: torch.export.Dim.DYNAMIC for i, n in enumerate(value.shape) if n > 1}
    return None


def on_meta(value):
    """A call on the meta device, which goes through the first launch function, that for GPUs."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_meta, value))
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.long
@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("op", EVERY, ids=lambda op: op.name)
def test_export_keeps_the_op_and_makes_no_size_a_constant(op, device):
    check_export(op, device)


def test_export_keeps_sizes_that_a_launch_function_compares():
    """While it traces, torch.export has functions of its own in place of these."""
    (op,) = (op for op in EVERY if op.name == "jitkern::w4a16_linear")
    check_export(op, "meta")


def check_export(op, device):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return op(*args)

    samples = op.sample_inputs("cpu" if device == "meta" else device)
    args = next((a for a in samples if tensors_in(a)[0].dim() >= 2), samples[-1])
    args = on_meta(args) if device == "meta" else args
    shapes = [dynamic(arg) for arg in args]
    if op.name == "jitkern::loss_meter_":
        shapes[1] = None  # the reference unpacks the six numbers
    program = torch.export.export(Module(), args, dynamic_shapes=(tuple(shapes),))
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert [call for call in calls if call != operator.getitem] == [op.overload]
    if op in SHIPPED and device != "meta":
        torch.testing.assert_close(program.module()(*args), op(*args))


@pytest.mark.parametrize("largest", [1 << 24, None])
def test_limits_of_kernels_do_not_limit_exported_dimensions(largest):
    """A check of a launch function raises when a call comes that it refuses, not before."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return jitkern.ops.topk(x, 2), jitkern.ops.sample(x, zero, zero)

    zero = torch.zeros(1, dtype=torch.int64)
    columns = torch.export.Dim("columns", min=2, max=largest)
    program = torch.export.export(Module(), (torch.randn(2, 9),), dynamic_shapes=({1: columns},))
    program.module()(torch.randn(2, 5))
