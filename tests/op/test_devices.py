"""Tensors on different devices in one call: refused as ATen refuses them, however the call is made."""

import pytest
import torch
from helpers import one_in_four, served
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import jitkern.ops  # noqa: F401  declares the shipped ops
from jitkern import pointwise
from jitkern.errors import LaunchError
from jitkern.op.all_ops import all_ops

X, META = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3, device="meta")
KERNELS = """
extern "C" void add(T* out, const T* x, const T* y, long n) { for (long i = 0; i < n; i++) out[i] = x[i] + (y ? y[i] : 0); }
"""
PLACES = [("meta", "cpu"), ("cpu", "meta"), ("cuda", "cpu"), ("cpu", "cuda")]
if torch.cuda.device_count() != 1:  # where there are GPUs, fakes are of these alone
    PLACES.append(("cuda:1", "cuda:0"))


def tensors_of(op):
    """The number of arguments of an op that are, or may be, tensors; of a list more than one."""
    types = [str(argument.type) for argument in op.signature.arguments]
    return sum(("Tensor" in type_) + (type_ == "List[Tensor]") for type_ in types)


SHIPPED = [
    op for name, op in sorted(all_ops().items())
    if name.startswith("jitkern::") and tensors_of(op) > 1
]  # fmt: skip


def add(k, x, y):
    out = torch.empty_like(x)
    if k.fake:
        return out
    k.add[{"T": x.dtype}](out, x, y, x.numel())
    return out


def fake(mode, tensor, device):
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@pytest.mark.parametrize("op", one_in_four(SHIPPED, lambda op: op.name))
def test_each_tensor_of_a_shipped_op_must_be_on_its_device(op):
    """Meta tensors, fake tensors of other devices, and fake tensors beside real ones."""
    args = max(op.sample_inputs("cpu"), key=lambda args: len(_pytree.tree_leaves(args)))
    args = [value[:2] if isinstance(value, list) else value for value in args]
    args += (a.default_value for a in op.signature.arguments[len(args) :])
    for i, argument in enumerate(op.signature.arguments):
        if args[i] is None and "Tensor" in str(argument.type):
            args[i] = torch.ones(1)
    flat, outline = _pytree.tree_flatten(args)
    flat = [torch.atleast_1d(v) if isinstance(v, torch.Tensor) else v for v in flat]
    tensors = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    mode = FakeTensorMode()
    of_fakes = {
        device: [fake(mode, v, device) if isinstance(v, torch.Tensor) else v for v in flat]
        for device in {"cpu", "cuda:0", "meta"}.union(*PLACES) - {"cuda"}
    }
    of_fakes["cuda"] = of_fakes["cuda:0"]
    for i in tensors:
        mixed = [
            *((of_fakes[one], of_fakes[rest]) for one, rest in PLACES),
            ([t.to("meta") for t in flat[i : i + 1]], flat),
            (of_fakes["cpu"], flat),
        ]
        for one, rest in mixed:
            call = [*rest[:i], one[i] if len(one) > 1 else one[0], *rest[i + 1 :]]
            with pytest.raises((LaunchError, AssertionError), match="one device|Please convert"):
                op(*_pytree.tree_unflatten(call, outline))


def test_a_meta_tensor_is_refused_by_calls_of_every_kind(declare):
    op = declare("(Tensor x, Tensor y) -> Tensor", add, lambda x, y: x + y)
    op.backward(lambda grad: (grad, grad))
    assert torch.equal(served(op, X, X), X + X)  # C is asked first from now on
    leaf = X.clone().requires_grad_()
    ways = {
        "op": op, "overload": op.overload, "reference": op.run_reference,
        "vmap": torch.vmap(op), "by name": lambda x, y: op(y=y, x=x),
        "forward mode": lambda x, y: torch.func.jvp(op, (x, y), (x, y)),
    }  # fmt: skip
    for way, call in ways.items():
        for args in ((X, META), (META, X), (leaf, META), (META, leaf)):
            with pytest.raises(
                RuntimeError, match=rf"{op.name}: .*one device.*`[xy]` on meta"
            ) as e:
                call(*args)
            assert isinstance(e.value, LaunchError) or way in ("overload", "vmap")
    with pytest.raises(RuntimeError, match="one device"):
        torch.compile(op, backend="eager")(X, META)
    assert op(META, META).is_meta


@pytest.mark.parametrize(
    ("signature", "args"),
    [
        ("(Tensor x, Tensor? y=None) -> Tensor", (X, META)),
        ("(Tensor x, *, Tensor y) -> Tensor", (X,)),
        ("(Tensor[] x, Tensor y) -> Tensor", ([X, META], X)),
        ("(Tensor[] x, Tensor y) -> Tensor", ([X], META)),
        ("(Tensor(a!) x, Tensor y) -> ()", (META, X)),
        ("(Tensor(a!) x, Tensor y) -> ()", (torch.ones(()), META)),
        ("(Tensor(a!)[] x, Tensor y) -> ()", ([X, META[0]], X)),
    ],
    ids=str,
)
@pytest.mark.parametrize("own_fake", [False, True])
def test_a_meta_tensor_is_refused_wherever_it_is_passed(declare, signature, args, own_fake):
    op = declare(signature, lambda k, x, y: torch.empty(2, 3))
    if own_fake:
        op.fake(lambda x, y: torch.empty(2, 3))
    named = {"y": META} if len(args) == 1 else {}
    with pytest.raises(LaunchError, match="one device"):
        op(*args, **named)


def test_a_number_on_the_cpu_may_stand_beside_other_tensors(declare):
    op = declare("(Tensor x, Tensor y) -> Tensor", lambda k, x, y: torch.empty_like(x))
    number = torch.tensor(2.0)
    assert op(META, number).is_meta
    with pytest.raises(LaunchError, match="its fake returned a tensor that is not"):
        op(number, META)


@pointwise
def twice_and(x, y):
    return x * 2 + y


@pytest.mark.parametrize("shapes", [((), (3,)), ((3,), ()), ((), ()), ((3,), (3,)), ((0,), ())])
def test_a_pointwise_function_takes_the_devices_that_torch_takes(shapes):
    mode = FakeTensorMode()
    for devices in (*PLACES, ("meta", "meta"), ("cuda", "cuda")):
        for real in (True, False):
            if real and "cuda" in str(devices):
                continue
            x, y = (torch.empty(shape, device="cpu") for shape in shapes)
            x, y = (
                t.to(device) if real else fake(mode, t, device)
                for t, device in zip((x, y), devices)
            )
            found = []
            for function in (lambda x, y: x * 2 + y, twice_and):
                try:
                    found.append(function(x, y).device)
                except RuntimeError:
                    found.append("refused")
            assert found[0] == found[1], (devices, real)


def test_an_op_with_its_own_fake_decides_about_devices(declare):
    op = declare("(Tensor x, Tensor sizes) -> Tensor", add)
    mode = FakeTensorMode()
    args = fake(mode, X, "cuda"), fake(mode, X, "cpu")
    with pytest.raises(LaunchError, match=r"`x` on cuda:0 and `sizes` on cpu"):
        op(*args)
    op.fake(lambda x, sizes: torch.empty_like(x))
    assert op(*args).device == torch.device("cuda:0")


def test_the_fake_of_a_list_is_that_of_its_device(declare):
    op = declare("(Tensor[] xs) -> Tensor", lambda k, xs: torch.empty_like(xs[0]))
    seen = []
    op.launch("cuda")(lambda k, xs: seen.append(k.fake) or torch.empty_like(xs[0]))
    assert op([META, META]).is_meta
    assert not seen
    op([fake(FakeTensorMode(), X, "cuda")])
    assert seen == [True]
