"""Calls of ops: without a tensor, with None, errors and their causes, results that share memory, pickles."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from helpers import served

from jitkern import config
from jitkern.config import background
from jitkern.errors import CompileError, DeclarationError, LaunchError, NotCached

X = torch.arange(6.0).reshape(2, 3)
KERNELS = """
extern "C" void fill(T* out, long n, double value) { for (long i = 0; i < n; i++) out[i] = value; }
extern "C" void add(T* out, const T* x, const T* y, long n) { for (long i = 0; i < n; i++) out[i] = x[i] + (y ? y[i] : 0); }
"""


def filled(k, n, device="cpu"):
    out = torch.empty(n, dtype=torch.float64, device=device)
    k.fill[{"T": out.dtype}](out, n, 7.0)
    return out


def add(k, x, y):
    out = torch.empty_like(x)
    k.add[{"T": x.dtype}](out, x, y, x.numel())
    return out


# ------------------------------------------------------------------ calls without a tensor


def wrong(*_, **__):
    return torch.zeros(2, dtype=torch.float64)


WITHOUT_TENSORS = {
    "integer": ("(int n) -> Tensor", filled, (2,)),
    "optional tensor": ("(Tensor? x, int n) -> Tensor", lambda k, x, n: filled(k, n), (None, 2)),
    "list": ("(Tensor[] xs) -> Tensor", lambda k, xs: filled(k, 2 + len(xs)), ([],)),
    "device": ("(int n, *, Device? device=None) -> Tensor", filled, (2,)),
}


@pytest.mark.parametrize("reference", [None, wrong], ids=["no reference", "reference"])
@pytest.mark.parametrize("case", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS.keys())
def test_a_call_without_a_tensor_reaches_the_kernel_of_the_cpu(declare, case, reference):
    signature, launch, args = case
    op = declare(signature, launch, reference)
    for call in (op, op.overload):
        assert call(*args).tolist() == [7, 7]
    with torch.inference_mode():
        assert op(*args).is_inference()


@pytest.mark.long
def test_a_call_without_a_tensor_is_served_by_a_stub(declare):
    op = declare("(int n) -> Tensor", filled)
    assert served(op, 3).tolist() == [7, 7, 7]


def test_a_call_without_tensors_goes_to_the_device_it_names(declare):
    op = declare("(int n, *, Device? device=None) -> Tensor", filled)
    assert op(2, device=torch.device("cpu")).tolist() == [7, 7]
    assert op(2, device="meta").device.type == "meta"


def test_a_call_without_tensors_may_go_to_the_default_device(declare):
    op = declare("(int n) -> Tensor", lambda k, n: torch.empty(n, device="meta"), wrong, cpu=False)
    assert op(2).tolist() == [0, 0]
    torch.set_default_device("meta")
    try:
        assert op(2).device.type == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.long
def test_a_call_without_a_tensor_falls_back_to_its_reference(declare):
    op = declare("(int n) -> Tensor", filled, torch.ones)
    with config.using(cxx="no-such-compiler"):
        assert op(2).tolist() == [1, 1]


@pytest.mark.long
def test_a_call_without_a_tensor_is_one_node_of_a_compiled_graph(declare):
    op = declare("(int n) -> Tensor", filled)
    f = torch.compile(lambda x: op(2) + x, fullgraph=True, backend="aot_eager")
    assert f(torch.ones(2, dtype=torch.float64)).tolist() == [8, 8]
    torch.library.opcheck(op.overload, (3,))


# ------------------------------------------------------------------ arguments that Torch converts


CONVERTED = [
    (X, True), (X, 2), (X, torch.tensor(2.5)), (X, np.float32(2.5)), (X, 2.0, "cpu"), (X,),
    (X, None), (X, "2"), (X, 2j), (X, 2.0, 3), (X, 2.0, None, 1), (2.0, X),
]  # fmt: skip


@pytest.mark.parametrize("args", CONVERTED, ids=lambda args: ", ".join(map(repr, args[1:])) or "-")
def test_torch_converts_and_refuses_arguments_without_c_too(declare, args):
    def launch(k, x, value, device):
        assert type(value) is float
        out = torch.empty_like(x)
        k.fill[{"T": x.dtype}](out, x.numel(), value)
        return out

    op = declare("(Tensor x, float value, Device? device=None) -> Tensor", launch)
    results = []
    for call in (op, op.overload):
        try:
            results.append(call(*args).tolist())
        except RuntimeError as e:
            results.append(str(e))
    assert results[0] == results[1]


# ------------------------------------------------------------------ arguments by name


@pytest.mark.parametrize(
    ("args", "named"),
    [((1,), {"c": 7}), ((), {"c": 7, "a": 1}), ((1,), {"b": 7, "d": 5}), ((1, 2, 3), {"d": 4})],
    ids=str,
)
def test_a_reference_takes_arguments_by_name_as_the_op_does(declare, args, named):
    def number(*digits, end):
        return torch.tensor([sum(10**place * n for place, n in enumerate(digits)) + end / 10])

    op = declare(
        "(int a, int b=2, int c=3, *, int d=4) -> Tensor",
        lambda k, one, two, three, d: number(one, two, three, end=d),
        lambda one, two, three, d: number(one, two, three, end=d),
    )
    assert torch.equal(op.run_reference(*args, **named), op(*args, **named))
    complete = op.signature.in_order(*op.signature.complete(args, named))
    assert torch.equal(number(*complete[:3], end=complete[3]), op(*args, **named))
    with pytest.raises(TypeError, match="unknown"):
        op.run_reference(*args, **named, unknown=1)


# ------------------------------------------------------------------ None for a tensor


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_none_for_a_tensor_is_an_error_that_names_the_argument(declare, mode):
    op = declare("(Tensor x, Tensor y) -> Tensor", add, lambda x, y: x + y)
    with mode():
        for _ in range(2):
            for args, name in (((X, None), "y"), ((None, X), "x"), ((None, None), "x")):
                with pytest.raises(
                    LaunchError, match=rf"{op.name} .* `{name}`, and got None.*Tensor\?"
                ):
                    op(*args)
                with pytest.raises(RuntimeError, match=f"`{name}`, and got None"):
                    op.overload(*args)
            assert torch.equal(served(op, X, X), X + X)
    with pytest.raises(LaunchError, match="`y`, and got None"):
        op(X.requires_grad_(), None)
    X.requires_grad_(False)


@pytest.mark.long
def test_none_for_an_optional_tensor_is_passed_on(declare):
    op = declare("(Tensor x, Tensor? y) -> Tensor", add)
    assert torch.equal(served(op, X, None), X)


# ------------------------------------------------------------------ results that share memory

SHARING = {
    "argument": ("(Tensor x) -> Tensor", lambda k, x: x.contiguous(), (X,), "`x`"),
    "view": ("(Tensor x) -> Tensor", lambda k, x: x[:1], (X,), "`x`"),
    "one of a list": (
        "(int n, Tensor[] xs) -> (Tensor, Tensor)",
        lambda k, n, xs: (xs[0] + 1, xs[1]),
        (1, [X, X.clone()]),
        "`xs`",
    ),
    "keyword": ("(Tensor x, *, Tensor y) -> Tensor", lambda k, x, y: y, (X,), "`y`"),
    "each other": ("(Tensor x) -> (Tensor, Tensor)", lambda k, x: (x + 1,) * 2, (X,), "another"),
    "in a list": ("(Tensor x) -> Tensor[]", lambda k, x: [x + 1, x], (X,), "`x`"),
    "each other in a list": ("(Tensor x) -> Tensor[]", lambda k, x: [x + 1] * 2, (X,), "another"),
}


@pytest.mark.parametrize("case", SHARING.values(), ids=SHARING.keys())
def test_a_result_that_shares_memory_is_an_error_each_time(declare, case):
    signature, launch, args, what = case
    op = declare(signature, launch, lambda *args, **kwargs: pytest.fail("the reference ran"))
    kwargs = {"y": X.clone()} if "y" in signature else {}
    for _ in range(2):
        with pytest.raises(LaunchError, match=f"{op.name} on cpu: .*shares.*{what}.*clone"):
            op(*args, **kwargs)


def test_a_result_that_shares_memory_at_times_is_an_error_then(declare):
    op = declare("(Tensor x) -> Tensor", lambda k, x: x.contiguous())
    assert torch.equal(served(op, X.T), X.T)
    with pytest.raises(LaunchError, match="shares the memory of its argument `x`"):
        op(X)


def test_autograd_notices_an_inplace_op_that_returns_its_input(declare):
    def launch(k, x):
        k.add[{"T": x.dtype}](x, x, x, x.numel())
        return x

    op = declare("(Tensor(a!) x) -> Tensor", launch)
    x = X.clone()
    with pytest.raises(LaunchError, match="`x`") as raised:
        op(x)
    assert raised.value.launched == 1
    assert x._version == 1


@pytest.mark.parametrize("mode", ["never", "background"])
def test_a_call_that_changed_a_tensor_is_not_tried_again(declare, mode):
    def launch(k, x):
        x.mul_(2)
        k.add[{"T": x.dtype}](x, x, x, x.numel())

    op = declare("(Tensor(a!) x) -> ()", launch, lambda x: x.mul_(4))
    x = X.clone()
    with config.using(compile=mode, fallback="reference"):
        with pytest.raises(NotCached, match="The call had begun, so nothing else can compute it"):
            op(x)
        assert torch.equal(x, 2 * X)
        if mode == "background":
            background.settle()
            x = X.clone()
            op(x)
            assert torch.equal(x, 4 * X)


# ------------------------------------------------------------------ errors


def test_an_error_handled_in_a_launch_does_not_replace_another(declare):
    def refuse(k, x):
        raise ValueError("bad")

    inner = declare("(Tensor x) -> Tensor", refuse)

    def launch(k, x):
        with pytest.raises(RuntimeError):
            inner.overload(x)
        raise RuntimeError("ValueError: bad, and more of it")

    with pytest.raises(RuntimeError, match="and more of it") as raised:
        declare("(Tensor x) -> Tensor", launch)(X)
    assert type(raised.value) is RuntimeError


@pytest.mark.long
@pytest.mark.parametrize("signature", ["(Tensor x) -> Tensor", "(Tensor x, int[] n=[]) -> Tensor"])
def test_an_error_handled_in_a_launch_keeps_nothing_alive(declare, signature):
    def refuse(k, x):
        raise ValueError("bad")

    inner = declare("(Tensor x) -> Tensor", refuse)

    def launch(k, x, n=()):
        with pytest.raises(RuntimeError):
            inner.overload(x + 1 if n else x)
        return x + 1

    op = declare(signature, launch)
    op(X)
    x = X.clone()
    alive = weakref.ref(x)
    op(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("handling", [False, True], ids=["plain", "in a handler"])
def test_an_error_keeps_its_cause_and_its_context(declare, handling):
    def launch(k, x):
        try:
            {}["context"]
        except KeyError:
            try:
                int("cause")
            except ValueError as e:
                raise RuntimeError("error") from e

    op = declare("(Tensor x) -> Tensor", launch)

    def call():
        with pytest.raises(RuntimeError, match="error") as raised:
            op(X)
        assert type(raised.value.__cause__) is ValueError
        assert raised.value.__context__ is raised.value.__cause__
        assert type(raised.value.__context__.__context__) is KeyError

    if not handling:
        call()
        return
    try:
        {}["another"]
    except KeyError:
        call()


def test_a_compile_error_does_not_tell_of_its_stand_in(declare, compiler):
    compiler.fail = True
    with pytest.raises(CompileError) as raised:
        declare("(Tensor x, Tensor y) -> Tensor", add)(X, X)
    assert "RuntimeError" not in repr((raised.value.__cause__, raised.value.__context__))


# ------------------------------------------------------------------ copies and pickles


def test_a_copy_of_a_module_that_holds_an_op_holds_the_same_op(declare):
    module = torch.nn.Module()
    module.act = declare("(Tensor x, Tensor y) -> Tensor", add)
    assert copy.deepcopy(module).act is module.act
    assert copy.copy(module.act) is module.act
    assert pickle.loads(pickle.dumps(module)).act is module.act


MODULE = """
from jitkern.declare import kernel
op = kernel("jitkern_pickled::op(Tensor x) -> Tensor")
op.reference(lambda x: x + 1)
"""


@pytest.mark.long
def test_a_pickle_imports_the_module_that_declares_the_op(run_python, tmp_path):
    (tmp_path / "declares.py").write_text(MODULE)
    done = run_python("import declares, pickle; print(pickle.dumps([declares.op]).hex())")
    load = f"import pickle, torch; [op] = pickle.loads(bytes.fromhex({done.stdout.strip()!r}))\n"
    done = run_python(load + "print(op(torch.zeros(1)).item(), op)")
    assert done.stdout == "1.0 <op jitkern_pickled::op(Tensor x) -> Tensor>\n", done.stderr
    (tmp_path / "declares.py").write_text("")
    assert "does not declare it here; declare the op before" in run_python(load).stderr
    (tmp_path / "declares.py").unlink()
    assert "which cannot be imported here: No module named 'declares'" in run_python(load).stderr


@pytest.mark.long
def test_the_shipped_ops_are_all_there_after_one_was_unpickled(run_python):
    done = run_python("import jitkern.ops, pickle; print(pickle.dumps(jitkern.ops.softmax).hex())")
    load = f"import pickle; op = pickle.loads(bytes.fromhex({done.stdout.strip()!r}))\n"
    done = run_python(
        load + "import jitkern.ops; print(jitkern.ops.softmax is op, jitkern.ops.vec_add)"
    )
    assert done.stdout.startswith("True <op"), done.stderr


def test_an_op_that_is_not_declared_is_an_error_of_its_own():
    from jitkern.op.op import declared

    with pytest.raises(DeclarationError, match="jitkern_test::nowhere was pickled as an op of"):
        declared("jitkern_test::nowhere", __name__)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_launch_function_may_ask_for_an_alignment(declare, dynamic):
    def launch(k, x):
        out = torch.empty_like(x)
        if x.data_ptr() % 16 == 0:
            k.add[{"T": x.dtype}](out, x, x, x.numel())
        else:
            k.add[{"T": x.dtype}](out, x.clone(), x, x.numel())
        return out

    op = declare("(Tensor x) -> Tensor", launch, lambda x: 2 * x)
    x = torch.arange(9.0)
    torch.library.opcheck(op.overload, (x,))  # its fakes have no address
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tensor in (x, x[1:], x[2:].clone()):
        assert torch.equal(compiled(tensor), 2 * tensor)


@pytest.mark.long
@pytest.mark.parametrize("asks", [True, False])
def test_a_fake_that_returns_early_is_compiled_once(declare, asks):
    def launch(k, x):
        out = torch.empty_like(x)
        if asks and k.fake:
            return out
        k.fill[{"T": x.dtype}](out, x.numel(), 1.0 if x.numel() > 10 else 2.0)
        return out

    op = declare("(Tensor x) -> Tensor", launch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 50):
        assert compiled(torch.empty(size)).equal(torch.full((size,), 2.0 if size == 5 else 1.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if asks else 2)
    served(op, torch.empty(50))
