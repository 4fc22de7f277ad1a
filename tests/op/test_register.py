"""Ops in Torch: schema rules, dispatch, fallback, fake and gradient."""

import gc
import importlib
import itertools
import os
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from helpers import LONGEST, run_threads

from jitkern import config, testing
from jitkern.cache import events
from jitkern.compilers import compiler_for
from jitkern.config import background
from jitkern.declare import Cpp, Cuda, Extension, Triton, kernel
from jitkern.errors import (
    CacheError,
    CompileError,
    CompilerNotFound,
    DeclarationError,
    NotCached,
    TargetError,
)
from jitkern.launch.runner import Runner
from jitkern.op.needed_kernels import needs_of
from jitkern.source.kinds import Variant
from jitkern.target import Target

_number = itertools.count()
SCALE = 'extern "C" void scale(T* out, const T* x, double alpha, long n) { for (long i = 0; i < n; i++) out[i] = T(alpha) * x[i]; }'


@pytest.fixture
def declare(tmp_path):
    """A fresh op `jitkern_test::scaleN(Tensor x, float alpha=2.0) -> Tensor` on the real C compiler."""

    schema = "{name}(Tensor x, float alpha=2.0) -> Tensor"

    def make(schema=schema, *, cpu=True, launch=True):
        (tmp_path / "scale.cpp").write_text(SCALE)
        source = Cpp(str(tmp_path / "scale.cpp"))
        name = f"jitkern_test::scale{next(_number)}"
        op = kernel(schema.format(name=name), cpu=source if cpu else ())
        op.reference(lambda x, alpha=2.0: alpha * x)
        if launch:

            @op.launch("cpu")
            def _(k, x, alpha=2.0):
                torch._check(x.dim() > 0, lambda: f"scale: no scalars, got shape {tuple(x.shape)}")
                x = x.contiguous()
                out = torch.empty_like(x)
                k.scale[{"T": x.dtype}](out, x, alpha, x.numel())
                return out

        return op

    return make


X = torch.arange(6.0).reshape(2, 3)


def test_the_kernel_computes_and_defaults_and_keywords_work(declare):
    op = declare()
    assert torch.equal(op(X), 2 * X)
    assert torch.equal(op(X, 3.0), 3 * X)
    assert torch.equal(op(x=X, alpha=4.0), 4 * X)
    assert torch.equal(op.overload(X), 2 * X)
    by_name = declare("{name}(Tensor x, *, float alpha=2.0) -> Tensor")
    assert torch.equal(by_name(X, alpha=5.0), 5 * X)
    assert torch.equal(by_name(X), 2 * X)


def test_the_schemas_defaults_are_filled_in(declare):
    op = declare(launch=False)
    op.launch("cpu")(lambda k, x, alpha: x * alpha)
    op.reference(lambda x, alpha: x * alpha)
    assert torch.equal(op(X), 2 * X)
    assert op(X.to("meta")).shape == X.shape
    with config.using(cxx="no-such-compiler"):
        assert torch.equal(op(X), 2 * X)


def test_the_authors_check_reaches_the_user(declare):
    with pytest.raises(RuntimeError, match=r"scale: no scalars, got shape \(\)"):
        declare()(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{name}(Tensor(a!) x) -> Tensor(a!)", "refuses an op that returns an argument"),
        ("{name}(Tensor x, Scalar s) -> Tensor", "Scalar arguments are not supported"),
        ("{name}(Tensor x -> Tensor", "is not a Torch schema: expected \\)"),
        ("jitkern_test::q.big(Tensor x) -> Tensor", "has no overloads"),
        ("jitkern_test::co:bad(Tensor x) -> Tensor", "is no schema of an op: write one like `"),
        ("jitkern_test::", "is no schema of an op: write one like `"),
        ("{name}(Tenser x) -> Tensor", r"is not a Torch schema: unknown type(.*\n)+ +~+ <--- HERE"),
    ],
)
def test_a_schema_that_cannot_work_is_refused(declare, schema, says):
    with pytest.raises(DeclarationError, match=says):
        declare(schema)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fusible": "no"}, "fusible='no': write True or False"),
        ({"prewarm": "f32[3]"}, r"prewarm='f32\[3\]' is a string: give a list, \['f32\[3\]'\]"),
        (
            {"nondifferentiable": {"out"}},
            r"nondifferentiable=\{'out'\} is a set, of another order .*: give a list",
        ),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(options, says):
    with pytest.raises(DeclarationError, match=says):
        kernel("test_register::wrong(Tensor x) -> Tensor", **options)


def test_a_cost_or_key_that_no_call_fits_is_refused(declare):
    op = declare()
    with pytest.raises(DeclarationError, match=r"its cost function takes \(\), but is called with"):
        op.cost(lambda: (1, 1))
    with pytest.raises(DeclarationError, match=r"tune\(\) takes a function as key=, got 3"):
        op.tune("cpu", key=3)


def test_a_namespace_of_torch_is_refused():
    with pytest.raises(
        DeclarationError, match="`aten` is PyTorch's own: write `test_register::add"
    ):
        kernel("aten::add(Tensor x) -> Tensor")


@pytest.mark.parametrize("module", ["mypkg.scale.kernel", "__main__"])
@pytest.mark.parametrize("name", ["softmax", "scale"])
def test_who_writes_no_namespace_is_told_which(module, name):
    package = {"__main__": "mylib"}.get(module, "mypkg")
    says = rf"^kernel.py:2: `{name}\(.*has no namespace, .*: write `{package}::{name}\(Tensor x\) -"
    code = compile(f"\nkernel('{name}(Tensor x) -> Tensor')", "kernel.py", "exec")
    with pytest.raises(DeclarationError, match=says):
        exec(code, {"__name__": module, "kernel": kernel})


@pytest.mark.parametrize(
    "given", [{"cpu": Cuda("x.cu")}, {"cuda": Cpp("x.cpp")}, {"cpu": [Triton("x.py")]}], ids=str
)
def test_a_source_for_the_wrong_device_is_refused(given):
    with pytest.raises(DeclarationError, match=r"= takes .*, got"):
        kernel(f"jitkern_test::wrong{next(_number)}(Tensor x) -> Tensor", **given)


def test_an_extension_must_not_take_the_ops_own_name():
    name = f"jitkern_test::ext{next(_number)}"
    with pytest.raises(DeclarationError, match="must register its function under another name"):
        kernel(f"{name}(Tensor x) -> Tensor", cpu=Extension("x.cpp", function=name))


@pytest.mark.parametrize(
    ("decorator", "function", "says"),
    [
        (lambda op: op.launch("cpu"), lambda k, x: x, r"launch function takes \(k, x\), but is ca"),
        (lambda op: op.launch("cpu"), lambda k, x, a, b, c: x, r"is called with \(k, x, a, b\)"),
        (
            lambda op: op.reference,
            lambda y: y,
            r"test_register.py:\d+: its reference takes \(y\), ",
        ),
        (lambda op: op.fake, lambda: 1, r"its fake takes \(\), but is called with \(x, a, b\)"),
        (lambda op: op.samples, lambda: (), "its samples function takes .*called with .device."),
    ],
)
def test_a_function_that_no_call_fits_is_refused(decorator, function, says, declare):
    op = declare("{name}(Tensor x, float a, int b=3) -> Tensor")
    with pytest.raises(DeclarationError, match=says):
        decorator(op)(function)


def test_a_function_may_leave_out_what_has_a_default(declare):
    op = declare("{name}(Tensor x, float a, int b=3) -> Tensor")
    for function in (lambda x, a: x, lambda x, *rest: x, lambda x, a, b=1, c=2: x):
        assert op.reference(function) is function


def test_a_layout_that_no_kernel_takes_is_named(declare):
    op = kernel(f"jitkern_test::dense{next(_number)}(Tensor x) -> Tensor")
    with pytest.raises(DeclarationError, match=r"no kernel takes torch\.sparse_coo tensors of tor"):
        op(torch.ones(3).to_sparse())


def test_without_a_kernel_the_reference_runs_with_one_line(declare, caplog):
    op = declare(cpu=False, launch=False)
    assert torch.equal(op(X), 2 * X)
    op(X)
    assert caplog.text.count("runs its PyTorch reference: no kernel is declared for cpu") == 1
    with config.using(fallback="raise"), pytest.raises(TargetError, match="has no kernel for cpu"):
        op(X)


def test_an_op_for_gpus_checks_and_runs_its_reference(caplog):
    op = kernel(
        f"jitkern_test::dense{next(_number)}(Tensor(a!) x, Tensor y) -> ()",
        cuda=Cuda(text="// nothing"),
    )

    @op.reference
    def _(x, y):
        x.add_(y)

    @op.launch("cuda")
    def _(k, x, y):
        torch._check(x.shape == y.shape, lambda: f"shapes differ, {x.shape} and {y.shape}")

    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="shapes differ"):
        op(x, torch.ones(1))
    assert not x.any() and x._version == 0
    op(x, torch.ones(3))
    assert x.sum() == 3 and x._version > 0 and not caplog.messages
    with config.using(fallback="raise"), pytest.raises(TargetError, match="has no kernel for cpu"):
        op(x, torch.ones(3))


def test_no_compiler_runs_the_reference_and_raise_raises(declare, caplog):
    op = declare()
    with config.using(cxx="no-such-compiler"):
        assert torch.equal(op(X), 2 * X)
        assert "apt-get install g++" in caplog.text
        with config.using(fallback="raise"), pytest.raises(CompilerNotFound, match="apt-get"):
            op(X)


@pytest.mark.long
def test_the_reference_returns_the_kernels_strides(declare):
    op = declare()
    with config.using(cxx="no-such-compiler"):
        assert op(X.T).stride() == (2, 1)
    assert torch.equal(op(X.T), 2 * X.T)


def test_a_failed_compile_always_raises(declare, compiler):
    compiler.fail = True
    op = declare()
    for fallback in ("", "reference", "raise"):
        with config.using(fallback=fallback), pytest.raises(CompileError):
            op(X)


def test_never_raises_unless_the_reference_is_asked_for(declare):
    op = declare()
    with (
        config.using(compile="never"),
        pytest.raises(NotCached, match="jitkern prewarm test_register "),
    ):
        op(X)
    op = declare()
    with config.using(compile="never", fallback="reference"):
        assert torch.equal(op(X), 2 * X)


@pytest.mark.long
def test_a_refusal_ends_with_the_settings_it_was_made_under(declare):
    op = declare()
    with config.using(compile="never", fallback="reference"):
        op(X)
    compiles = events.stats()["compiles"]
    op(X)
    assert events.stats()["compiles"] == compiles + 1


@pytest.mark.long
def test_a_remembered_refusal_keeps_no_call_alive(declare):
    op = declare()
    with config.using(cxx="no-such-compiler"):
        op(X)
        x = X.clone()
        alive = weakref.ref(x)
        op(x)
        del x
        gc.collect()
        assert alive() is None


@pytest.mark.long
def test_a_helper_defined_below_the_launch_function_is_found(tmp_path, monkeypatch):
    (tmp_path / "inc.cpp").write_text('extern "C" void inc(float* x) { *x += 1; }')
    name = f"below{next(_number)}"
    (tmp_path / "below.py").write_text(
        "import torch\nfrom jitkern.declare import Cpp, kernel\n"
        f"op = kernel('jitkern_test::{name}(Tensor x) -> Tensor', cpu=Cpp('inc.cpp'))\n"
        "@op.launch('cpu')\ndef _(k, x):\n    out = copy(x)\n    k.inc(out)\n    return out\n"
        "def copy(x):\n    torch._check(x.dim() == 1)\n    return x.clone()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("below").op(torch.zeros(1)).item() == 1


def test_samples_may_leave_out_defaults(declare):
    op = declare()

    @op.launch("cpu")
    def _(k, x, alpha):
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype}](out, x, alpha, x.numel())
        return out

    op.samples(lambda device: iter([torch.ones(3, device=device)]))
    (variant,) = needs_of(op, op.sources["cpu"][0], "cpu").variants
    assert variant.label == "scale.f32"


def sizes_to_prewarm(op):
    testing.forget_samples(op)
    return [sample.args[0].shape for sample in op.prewarm_samples()]


def sizes_to_check(op):
    return [x.shape for (x,) in op.sample_inputs("cpu")]


@pytest.mark.parametrize("sizes", [sizes_to_prewarm, sizes_to_check])
def test_samples_of_random_sizes_are_the_same_in_each_process(declare, monkeypatch, sizes):
    op = declare()
    op.samples(lambda _: (torch.empty(torch.randint(10**9, ()), device="meta") for _ in range(3)))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # GPUs go on with their own numbers
    found, before, after = [], [], []
    for _ in range(2):
        torch.default_generator.seed()
        before.append(torch.get_rng_state())
        found.append(sizes(op))
        after.append(torch.get_rng_state())
    assert found[0] == found[1]
    assert len({*found[0]}) == 3
    assert not torch.equal(*before)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("schema", "function"),
    [
        ("(Tensor grad, Tensor out) -> Tensor", lambda grad, out: (grad, out)),
        ("(Tensor?[] xs) -> Tensor", lambda grad: grad),
    ],
)
def test_a_backward_that_would_be_silently_wrong_is_refused(schema, function):
    op = kernel(f"jitkern_test::clash{next(_number)}{schema}")
    with pytest.raises(
        DeclarationError, match="cannot tell the input `grad`|list of optional tensors"
    ):
        op.backward(function)


def test_prefer_chooses_among_the_sources(tmp_path, caplog):
    op = kernel(
        f"jitkern_test::two{next(_number)}(Tensor x) -> Tensor",
        cpu=[Cpp("a.cpp"), Extension("b.cpp", function="f")],
    )
    assert [s.kind for s in op.sources_on("cpu")] == ["cc", "extension"]
    with config.using(prefer="extension"):
        assert [s.kind for s in op.sources_on("cpu")] == ["extension", "cc"]
    with config.using(prefer="triton"):
        assert [s.kind for s in op.sources_on("cpu")] == ["cc", "extension"]


def test_background_serves_the_reference_until_a_kernel_is_there(declare, monkeypatch):
    gate = threading.Event()
    cc = compiler_for(Cpp("x.cpp"))
    real = cc.compile
    monkeypatch.setattr(cc, "compile", lambda *args: (gate.wait(LONGEST), real(*args))[1])
    op = declare()
    with config.using(compile="background"):
        assert torch.equal(op(X), 2 * X)
        before = events.stats()["hits"]
        gate.set()
        background.settle()
        assert torch.equal(op(X), 2 * X)
        assert events.stats()["hits"] == before + 1


@pytest.mark.parametrize(
    ("error", "again"),
    [(ZeroDivisionError("oops"), 1), (CacheError("full"), 1), (CompileError("no"), 0)],
)
def test_a_background_build_that_failed_is_tried_again(declare, monkeypatch, caplog, error, again):
    cc = compiler_for(Cpp("x.cpp"))
    tried = []

    def fail(*_):
        tried.append(1)
        raise error

    op = declare()
    with config.using(compile="background"), monkeypatch.context() as patched:
        patched.setattr(cc, "compile", fail)
        for _ in range(2):
            assert torch.equal(op(X), 2 * X)
            background.settle()
        assert len(tried) == 1, "not at every call"
        now = time.monotonic
        patched.setattr(time, "monotonic", lambda: now() + 60.0)  # as if a minute had gone by
        op(X)
        background.settle()
        assert len(tried) == 1 + again
    assert str(error) in caplog.text


def test_a_fork_builds_what_its_parent_was_about_to(declare):
    op = declare()
    runner = Runner(op.name, op.sources["cpu"][0], Target.current("cpu"), X.device)
    variant = Variant(op.name, op.sources["cpu"][0], "scale")
    assert [runner.claim(variant), runner.claim(variant)] == [True, False]
    child = os.fork()
    if not child:
        os._exit(10 + runner.claim(variant))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11


def test_background_keeps_the_reference_with_gradients(declare):
    op = declare()
    op.backward(lambda grad, alpha: alpha * grad)
    with config.using(compile="background"):
        x = X.clone().requires_grad_()
        op(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(X, 2))
        background.settle()
        before = events.stats()["hits"]
        op(X)
        assert events.stats()["hits"] == before


@pytest.mark.long
def test_threads_make_their_first_calls_together(declare):
    ops = [declare() for _ in range(100)]

    def work(number):
        for op in ops[number:] + ops[:number]:
            assert torch.equal(op(X, 3.0), 3 * X)

    run_threads(*(partial(work, i * 12) for i in range(8)))


@pytest.mark.long
def test_several_outputs_optional_tensors_and_their_gradient(tmp_path):
    (tmp_path / "two.cpp").write_text(
        'extern "C" void two(double* a, double* b, const double* x, const double* w, long n)'
        "{ for (long i = 0; i < n; i++) { a[i] = x[i] * (w ? w[i] : 1); b[i] = -x[i]; } }"
    )
    op = kernel(
        f"jitkern_test::two{next(_number)}(Tensor x, Tensor? w=None) -> (Tensor a, Tensor b)",
        cpu=Cpp(str(tmp_path / "two.cpp")),
    )

    @op.reference
    def _(x, w=None):
        return (x * w if w is not None else x.clone()), -x

    @op.launch("cpu")
    def _(k, x, w=None):
        a, b = torch.empty_like(x), torch.empty_like(x)
        k.two(a, b, x, w, x.numel())
        return a, b

    @op.backward
    def _(grad_a, grad_b, x, w):
        if w is None:
            return grad_a - grad_b, None
        return grad_a * w - grad_b, grad_a * x

    x, w = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(op, (x, w))
    assert torch.autograd.gradcheck(op, (x,))
    torch.library.opcheck(op.overload, (x, w))


def test_backward_may_ask_only_for_what_there_is(declare):
    says = r"its backward has the unknown parameters y; it may have: alpha, grad, needs, out, x"
    with pytest.raises(DeclarationError, match=says):
        declare().backward(lambda grad, y: grad)


@pytest.mark.long
def test_backward_keeps_only_what_it_asks_for(declare):
    op = declare()
    op.backward(lambda grad, alpha: grad * alpha)
    out = op(X.clone().requires_grad_(), 3.0)
    assert out.grad_fn.saved_tensors == ()


def test_an_op_that_changes_its_arguments_cannot_have_a_backward():
    op = kernel(f"jitkern_test::inc{next(_number)}(Tensor(a!) x) -> ()")
    with pytest.raises(DeclarationError, match="changes its arguments"):
        op.backward(lambda grad: grad)


def test_the_fake_has_the_kernels_strides(declare):
    op = declare()
    assert op(torch.empty(3, 2, device="meta").T).stride() == (3, 1)
    op.fake(lambda x, alpha=2.0: torch.empty_like(x))
    assert op(torch.empty(3, 2, device="meta").T).stride() == (1, 2)
